"""A few searches that are killed, on a machine where a fifth of the jobs fail; ``benchmarks.chaos`` does thirty."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos import GOAL, Known, main, plan_kills, repeated


@pytest.mark.slow
def test_three_searches_lose_nothing_to_kills_and_faults(tmp_path: Path) -> None:
    size = ["--runs", "3", "--undisturbed", "1", "--kills", "3", "--budget", "14", "--confirm-points", "4"]
    out = tmp_path / "chaos.json"
    status = main([*size, "--timeout-s", "6", "--jobs", "2", "--work", str(tmp_path / "work"), "--json", str(out)])
    found = json.loads(out.read_text())
    assert sum(found["kills"].values()) >= 6
    assert found["faults"] > 0
    wrong = {name: found[name] for name in ("lost", "repeated", "dropped", "hangs", "orphans", "left") if found[name]}
    assert not wrong, found["runs"]
    assert found["least"] >= GOAL, found["runs"]
    assert status == 0


def line(session: int, state: str, plan: str, what: str = "search") -> tuple[int, str, str, str]:
    return session, state, what, plan


@pytest.mark.parametrize(
    ("lines", "killed", "found"),
    [
        ([line(0, "begun", "a"), line(0, "done", "a")], [], {}),
        ([line(0, "done", "a"), line(0, "begun", "b"), line(1, "done", "a")], [0], {("search", "a"): 1}),
        ([line(0, "done", "a"), line(1, "done", "a")], [0], {}),
        ([line(0, "failed", "a"), line(0, "done", "a")], [], {}),
        ([line(0, "done", "a"), line(0, "begun", "a", "reopen"), line(1, "done", "a")], [0], {("search", "a"): 1}),
        ([line(0, "done", "a", "held_out"), line(0, "done", "a", "held_out")], [], {("held_out", "a"): 1}),
    ],
    ids=["once", "again", "in flight at the kill", "after a fault", "another job in flight", "one round too many"],
)
def test_what_counts_as_repeated(
    lines: list[tuple[int, str, str, str]], killed: list[int], found: dict[tuple[str, str], int]
) -> None:
    known = Known({"a": {}, "b": {}}, {"confirm:a:0": {}})
    assert repeated(lines, known, killed) == found


def test_what_counts_as_lost() -> None:
    then = Known({"a": 1, "b": 2}, {"confirm:a:0": 3})
    assert then.missing_in(Known({"a": 1, "b": 2, "c": 4}, {"confirm:a:0": 3})) == 0
    assert then.missing_in(Known({"a": 1, "b": 5}, {})) == 2
    assert Counter(kill.kind for seed in range(60) for kill in plan_kills(seed, 4, 3, 9)).keys() == {
        "parent",
        "worker",
        "both",
    }
