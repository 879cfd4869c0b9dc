"""The reasons in every view: the table, ``report --explain``, the page, README.txt."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from mptune.cli import main
from mptune.reporting.terminal.front import print_explanation
from mptune.reporting.text import explain_kept
from mptune.tuning.explanation import Explanation, GroupWorth, Kept, Reason, reason_counts, reasons_text
from mptune.tuning.front import Front
from tests.fakes import make_toolchain, search
from tests.reporting.conftest import Bench, explained, printed, readme


def worth(group: str, error: float | None = None, **facts: str) -> GroupWorth:
    return GroupWorth(group, f"a/very/long/path/to/<{group}>[b]", "conv", error, **facts)


@pytest.fixture
def front(front: Front, bench: Bench) -> Front:
    return replace(front, explanation=explained(front, bench.groups))


@pytest.mark.parametrize("columns", [80, 110, 120])
def test_the_table_says_why(front: Front, columns: int) -> None:
    text = printed(front, columns)
    table = next(part for part in text.split("\n\n") if "speedup" in part).splitlines()
    assert all(len(line) <= columns for line in table)
    assert "FP32 because" in text or columns == 80, "before the intervals"
    assert ("+-0.5%" in text) == (columns >= 120), "the reasons take the place of the intervals"
    assert "\nkept in FP32: " in text
    assert "<g0" in printed(front, columns, show=print_explanation)
    assert front.chosen is not None
    for group in front.explanation.fp32_groups(front.chosen.plan.fingerprint):
        assert group.worth.name in readme(front)
        assert group.because in readme(front)


def test_the_baseline_needs_no_reason(front: Front) -> None:
    plain = replace(front, explanation=Explanation())
    assert "contains no reasons" in printed(plain, show=print_explanation)
    assert "not known" in readme(plain)
    text = printed(replace(front, chosen=front.fp32), 120)
    row = next(line for line in text.splitlines() if front.fp32.plan.fingerprint in line)
    assert "error" not in row
    assert "kept in FP32" not in text
    # Its groups are explained where all-FP16 keeps none.
    kept = f"{front.fp32.plan.fingerprint}: kept in FP32 because"
    assert kept in printed(replace(front, chosen=front.fp32), show=print_explanation)


@pytest.mark.parametrize("columns", [100, 140])
def test_the_groups_fit_and_are_complete(front: Front, bench: Bench, columns: int) -> None:
    text = printed(front, columns, show=print_explanation)
    table = text.split("\n\n")[2].splitlines()
    assert all(len(line) <= columns for line in table)
    assert len(table) == 2 + len(bench.groups)
    verdicts = ("FP16", *(f"FP32: {reason}" for reason in get_args(Reason)))
    for group in bench.groups:
        assert any(line.startswith(group.id) and line.rstrip().endswith(verdicts) for line in table)
    assert "not finite" in table[2]
    assert "gains: from the roofline and 48 builds" in text


def test_reasons_are_counted_in_the_order_of_the_groups() -> None:
    kept = [
        Kept(worth("g0", pinned="by 'op:Add' of my.toml"), "not-tried"),
        Kept(worth("g1", 1e-3), "error", 0.25),
        Kept(worth("g2", math.inf), "error", -0.5),
        Kept(worth("g3", finding="spacing"), "casts"),
        Kept(worth("g4", finding="overflow", pinned="it reached 1e6"), "finding"),
        Kept(worth("g5", 1e-1, finding="spacing"), "error"),
    ]
    assert reason_counts(kept) == "1 not-tried, 2 error, 1 casts, 1 overflow, 1 spacing"
    assert reason_counts(kept, most=1) == "1 not-tried, 5 more"
    assert reason_counts([]) == reasons_text([]) == ""
    wanted = "1 not tried, 2 for their error, 1 for the cost of Casts, 1 for overflow, 1 for spacing"
    assert reasons_text(kept) == wanted
    assert [re.sub(" a/.*?>\\[b]: ", " ", explain_kept(group)) for group in kept] == [
        "g0 not-tried: by 'op:Add' of my.toml",
        "g1 error: 1.0e-03 alone, would save 0.25 ms",
        "g2 error: NaN or Inf alone, would cost 0.5 ms",
        "g3 casts",
        "g4 overflow: it reached 1e6",
        "g5 spacing: 1.0e-01 alone",
    ]


def test_a_run_is_explained_elsewhere(place: Path, capsys) -> None:
    """Only the run directory is there, under another name: no model, no data."""
    front = search(make_toolchain(), budget=20)
    (place / "model.onnx").unlink()
    (place / "model.mptune").rename(place / "copy")
    assert main(["report", "copy", "--explain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == front.explanation.to_json("worst_part")
    ratios = [group["one_group_error"] / group["gain_ms"] for group in document["groups"]]
    assert ratios == sorted(ratios)
    assert set(document["plans"]) >= {p.plan.fingerprint for p in front.points}
    assert main(["report", "copy", "--explain"]) == 0
    text = capsys.readouterr().out
    assert all(worth.group in text for worth in front.explanation.groups)
    for point in json.loads((place / "copy" / "front.json").read_text())["points"]:
        assert len(point["fp32"]) == point["fp32_groups"]
        kept = document["plans"][point["plan"]]
        assert point["fp32"] == [{key: each[key] for key in ("group", "reason", "finding")} for each in kept]
