"""Latencies and speedups have the digits that their noise supports, the same ones wherever they stand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mptune.reporting.page import PageContent, page_document
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.texts import latency_text, speedup_of
from tests.reporting.conftest import Bench, MakeFront, front_text, predicted, readme
from tests.reporting.page.reading import plans_of


def with_noise(evaluation: Evaluation, share: float) -> Evaluation:
    """The same with an interval of so much of the median to either side."""
    ms = evaluation.latency.median_ms
    return replace(evaluation, latency=replace(evaluation.latency, ci95_ms=(ms * (1 - share), ms * (1 + share))))


def noisy(front: Front, share: float) -> Front:
    points = {point.plan: with_noise(point, share) for point in front.points}
    assert front.chosen is not None
    return replace(
        front,
        points=tuple(points.values()),
        chosen=points[front.chosen.plan],
        fp32=with_noise(front.fp32, share),
        fp16=None if front.fp16 is None else points[front.fp16.plan],
    )


@pytest.mark.parametrize(
    ("share", "ms", "baseline", "speedup"),
    [(0.0001, "1.200", "2.000", "1.67x"), (0.01, "1.20", "2.00", "1.67x"), (0.14, "1.2", "2.0", "1.7x")],
)
def test_every_place_shows_the_same_digits(
    make_front: MakeFront,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    ms: str,
    baseline: str,
    speedup: str,
) -> None:
    front = noisy(make_front()[0], share)
    chosen = front.chosen
    assert chosen is not None
    assert (latency_text(chosen), latency_text(front.fp32)) == (ms, baseline)
    assert speedup_of(chosen, front.fp32) == speedup
    assert speedup_of(front.fp32, front.fp32) == "1.00x", "by definition"

    printed = front_text(front, monkeypatch, 140).splitlines()
    (row,) = [line.split() for line in printed if line.startswith(f">  {chosen.plan.fingerprint}")]
    assert (row[2], row[4]) == (ms, speedup)
    assert any(f"faster     {speedup}: {ms} ms, all-FP32 {baseline} ms" in line for line in printed)
    columns = [line.index(".", 15) for line in printed if chosen.plan.fingerprint in line and line.startswith(">")]
    columns += [line.index(".", 15) for line in printed if line.startswith(f"   {front.fp32.plan.fingerprint}")]
    assert len(set(columns)) == 1, "decimal points stand below each other"

    assert any(line.split()[2:5:2] == [ms, speedup] for line in str(front).splitlines() if line.startswith(">  "))
    shown = plans_of(page_document(PageContent(front, (), bench.groups)))[chosen.plan.fingerprint]
    assert (shown["ms_text"], shown["speedup_text"]) == (ms, speedup)
    assert shown["ms"] == pytest.approx(1.2), "it sorts by all digits"

    text = readme(front)
    assert f"{ms} ms (median)" in text
    assert re.search(rf"\b{re.escape(baseline)} ms", text)
    assert speedup in text


def test_a_prediction_has_no_noise(make_front: MakeFront) -> None:
    front = predicted(make_front()[0])
    assert latency_text(front.fp32) == "2.000"
    assert speedup_of(front.points[0], front.fp32) == "2.22x"
