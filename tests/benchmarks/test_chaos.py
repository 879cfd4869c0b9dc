"""A few searches that are killed, on a machine where a fifth of the jobs fail; ``benchmarks.chaos`` does thirty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.chaos import GOAL, KINDS, Known, main, plan_kills, repeated


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


@pytest.mark.parametrize(
    ("lines", "killed", "repeats"),
    [
        (["0 begun a", "0 done a"], [], {}),
        (["0 done a", "0 begun b", "1 done a"], [0], {("search", "a"): 1}),
        (["0 done a", "1 done a"], [0], {}),
        (["0 failed a", "0 done a"], [], {}),
        (["0 done a", "0 begun a held_out", "1 done a"], [0], {("search", "a"): 1}),
        (["0 done a held_out", "0 done a held_out"], [], {("held_out", "a"): 1}),
    ],
    ids=["once", "again", "in flight at the kill", "after a fault", "another job in flight", "one round too many"],
)
def test_what_counts_as_repeated(lines: list[str], killed: list[int], repeats: dict[tuple[str, str], int]) -> None:
    known = Known({"a": {}, "b": {}}, {"confirm:a:0": {}})
    words = [f"{line} search".split()[:4] for line in lines]
    assert repeated([(int(n), state, what, plan) for n, state, plan, what in words], known, killed) == repeats


def test_what_counts_as_lost() -> None:
    then = Known({"a": 1, "b": 2}, {"confirm:a:0": 3})
    assert then.missing_in(Known({"a": 1, "b": 2, "c": 4}, {"confirm:a:0": 3})) == 0
    assert then.missing_in(Known({"a": 1, "b": 5}, {})) == 2
    assert {kill.kind for seed in range(60) for kill in plan_kills(seed, 4, 3, 9)} == set(KINDS)
