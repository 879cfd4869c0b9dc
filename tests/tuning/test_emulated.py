"""Emulated errors of whole plans: asked once, kept, held against what is measured."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mptune
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.latency import Latency
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_SAMPLER, Evaluation
from mptune.tuning.knowledge import Knowledge
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.conftest import save_mlp
from tests.fakes import FAST, Diary, FakeToolchain, Law, make_plan, search
from tests.graph.helpers import feeds
from tests.graph.test_corpus import CORPUS
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import evaluation_of, make_bench, make_error
from tests.tuning.test_tuner import make_toolchain

METRIC = "relative_l2"


def choices(space: SearchSpace, *rows: str) -> list[dict[str, str]]:
    return [dict(space.choices(make_plan(bits))) for bits in rows]


@pytest.fixture
def know(open_record: OpenRecord, tmp_path: Path) -> Callable[..., Knowledge]:
    """What a search knows of a space's plans, which are emulated on a toolchain."""

    def make(space: SearchSpace, toolchain: FakeToolchain, diary: Diary | None = None, **options: Any) -> Knowledge:
        record = open_record(space)
        return Knowledge(make_bench(record, toolchain, listener=diary), METRIC, tmp_path, **options)

    return make


def test_each_plan_is_emulated_once(know: Callable[..., Knowledge]) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space)
    emulator = know(space, toolchain)
    rows = choices(space, "1000", "0110", "1000")
    errors = emulator.emulate(rows)
    assert errors == [pytest.approx(toolchain.law.error(make_plan(bits))) for bits in ("1000", "0110", "1000")]
    assert toolchain.emulated == [make_plan("1000").fingerprint, make_plan("0110").fingerprint]
    assert emulator.emulate(rows[:1]) == errors[:1]


class WrongAlone(FakeToolchain):
    """The emulated errors of groups alone are off by factors of up to 10."""

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        found = super().emulate(plans, part)
        return tuple(self._off(plan, error) for plan, error in zip(plans, found, strict=True))

    def _off(self, plan: PrecisionPlan, error: OutputError) -> OutputError:
        if len(plan.fp16_groups) != 1:
            return error
        off = 10.0 ** np.random.default_rng(int(plan.fp16_groups[0][1:])).uniform(-1.0, 1.0)
        statistics = error.per_output["y"]
        return OutputError({"y": {**statistics, METRIC: tuple(off * value for value in statistics[METRIC])}})


@pytest.mark.parametrize("seconds", [1e-6, 1e3])
def test_a_search_emulates_to_learn_where_that_is_cheap(
    open_record: OpenRecord, tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes 0.1 s (``tests.fakes``), a job of emulations so many seconds."""
    space, ticks, diary = make_small_space(10), itertools.count(), Diary()
    toolchain = WrongAlone(Law([group.id for group in space.groups]))
    settings, record = SearchSettings(budget=6), open_record(space)
    asked: list[int] = []
    allowed: list[int] = []

    class Counting(Knowledge):
        def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
            asked.append(len(choices))
            return super().emulate(choices)

        def affordable(self, seconds: float) -> int:
            allowed.append(super().affordable(seconds))
            return allowed[-1]

    bench = make_bench(record, toolchain, settings, diary)
    known = Counting(bench, METRIC, tmp_path, clock=lambda: seconds * next(ticks))
    decoded: list[int] = []
    decode = Evaluation.from_json
    monkeypatch.setattr(Evaluation, "from_json", lambda found: decoded.append(found["number"]) or decode(found))
    Tuner(bench, known).run()
    assert record.spent == 6
    assert len(decoded) == len(set(decoded)), "each evaluation is decoded once"
    assert len(asked) >= 3, "candidates are emulated, too"
    assert (allowed[0], asked[0]) == (2, 8), "two, as no time is known, and four times as many at first"
    assert set(allowed[1:]) == ({EMULATIONS_TO_LEARN} if seconds < 1.0 else {0})
    assert len(allowed) == 4, "before each plan that is no seed"


def test_what_is_known_of_single_groups_is_not_emulated_again(know: Callable[..., Knowledge]) -> None:
    space = make_small_space(3)
    toolchain = make_toolchain(space, non_finite={"g002"})
    emulator = know(space, toolchain)
    emulator.sampler()
    assert len(toolchain.emulated) == 3
    law = toolchain.law.error(make_plan("010"))
    assert emulator.emulate(choices(space, "010", "001")) == [pytest.approx(law, rel=1e-3), math.inf]
    assert len(toolchain.emulated) == 3
    assert emulator.recall(make_plan("010")) == (pytest.approx(law, rel=1e-3), 2)


def test_what_overflows_is_infinite_and_what_fails_is_not_known(know: Callable[..., Knowledge]) -> None:
    space = make_small_space(4)
    toolchain = make_toolchain(space, emulation_fails={"g001"}, non_finite={"g002"})
    emulator = know(space, toolchain)
    errors = emulator.emulate(choices(space, "1000", "0100", "0010"))
    assert [math.isinf(error) for error in errors] == [False, False, True]
    assert math.isnan(errors[1])
    assert emulator.recall(make_plan("0100")) is None, "it failed: nothing is known of the outputs"
    assert emulator.recall(make_plan("0010")) == (math.inf, 2)
    before = len(toolchain.emulated)
    assert math.isnan(emulator.emulate(choices(space, "0100"))[0])
    assert len(toolchain.emulated) == before, "it is not tried again and again"


def test_a_machine_that_stays_broken_is_tried_again_and_then_nothing_is_asked(know: Callable[..., Knowledge]) -> None:
    space, diary, asked = make_small_space(2), Diary(), []
    toolchain = make_toolchain(space)
    emulator = know(space, toolchain, diary)
    (known,) = emulator.emulate(choices(space, "10"))

    def emulate(plans: object) -> Failure:
        asked.append(plans)
        return Failure(Stage.RUN, FailureKind.DEVICE_LOST, "gone")

    toolchain.emulate = emulate  # type: ignore[method-assign, assignment]
    assert [math.isnan(error) for error in emulator.emulate(choices(space, "01", "10"))] == [True, False]
    assert math.isnan(emulator.emulate(choices(space, "11"))[0])
    assert emulator.emulate(choices(space, "10")) == [known]
    assert len(asked) == 2
    again, warning = diary.warnings
    assert "trying again" in again
    assert "gone" in again
    assert "without emulating" in warning
    assert "gone" in warning


def evaluation(error: float, metric: str = METRIC) -> Evaluation:
    statistics = {METRIC: (error, 9.0), "max_abs": (1.0, 1.0), "non_finite": (0.0, 0.0)}
    errors = OutputError({"y": statistics})
    return Evaluation(make_plan("10"), 1, ORIGIN_SAMPLER, Latency.predicted(1.0), errors, metric, "measured", 1.0)


@pytest.mark.parametrize(
    ("measured", "emulated", "fp32", "agree"),
    [
        (1.4e-3, 1e-3, 0.0, True),
        (0.7e-3, 1e-3, 0.0, True),
        (1.6e-3, 1e-3, 0.0, False),
        (0.6e-3, 1e-3, 0.0, False),
        (1.0e-3, 1e-5, 1e-3, True),
        (1.0e-3, math.inf, 0.0, False),
        (0.0, 3.67e-7, 0.0, True),  # FP16 groups that round nothing, on an H200
        (2.0e-7, 2.0e-6, 0.0, False),
    ],
)
def test_a_factor_between_both_errors_is_kept(measured: float, emulated: float, fp32: float, agree: bool) -> None:
    found = evaluation(measured).with_emulated(emulated, 1, fp32)
    assert found.emulated == emulated
    assert found.disagrees == (not agree)
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found
    other = evaluation(measured, "max_abs").with_emulated(emulated, 1, fp32)
    assert (other.emulated, other.disagrees) == (emulated, False)


@pytest.mark.parametrize(("source", "holds"), [("measured", True), ("measured", False), ("emulated", True)])
def test_a_search_asks_it_only_where_errors_are_measured_and_those_of_an_emulation(
    source: str, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_mlp(tmp_path / "model.onnx")
    groups = [g.id for g in find_groups(load_model("model.onnx"))]
    toolchain = FakeToolchain(Law(groups), error_source=source, emulation_holds=holds)  # type: ignore[arg-type]
    front = mptune.search("model.onnx", budget=14, target="cpu", latency=FAST, open_toolchain=toolchain.open)
    asked = source == "measured" and holds
    assert (len(toolchain.emulated) > len(groups)) == asked, "more than one plan for each group"
    assert any(point.emulated is not None for point in front.points) == asked
    assert len(toolchain.emulated) == len(set(toolchain.emulated))


def test_errors_of_groups_that_are_not_emulated_are_added(
    know: Callable[..., Knowledge], open_record: OpenRecord
) -> None:
    space = replace(make_small_space(4), not_emulated=("g001",))
    toolchain, record = make_toolchain(space), open_record(space)
    emulator = know(space, toolchain)
    assert math.isnan(*emulator.emulate(choices(space, "1100")))
    record.enqueue(space.alone("g001"), ORIGIN_SAMPLER)
    proposal = record.ask()
    evaluation = replace(evaluation_of(proposal, toolchain), error=make_error(7e-3))
    record.tell_evaluation(proposal, evaluation)
    again = know(space, toolchain)
    again.sampler()
    (alone,) = again.emulate(choices(space, "1000"))
    assert again.emulate(choices(space, "1100", "0100")) == pytest.approx([math.hypot(alone, 7e-3), 7e-3])
    assert again.recall(make_plan("0100")) is None, "no emulated error to compare a measured one with"


class Recurrent(FakeToolchain):
    """Its LSTM is far less exact than emulated."""

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        emulated = FakeToolchain(replace(self.law, errors={**self.law.errors, "g001": 1e-4}), emulated=self.emulated)
        return emulated.emulate(plans, part)


@pytest.mark.usefixtures("opened_here")
def test_a_search_measures_a_recurrent_layer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(CORPUS[0].parent / "lstm.onnx", "model.onnx")
    feed = feeds(load_model(tmp_path / "model.onnx"))
    np.savez("data.npz", **{name: np.stack([value[0]] * 8) for name, value in feed.items()})
    toolchain = Recurrent(Law(["g000", "g001", "g002"], errors={"g001": 1e-2}))
    front = search(toolchain, budget=8)
    model = load_model("model.onnx")
    fp32 = GroupedModel(model, find_groups(model)).uniform(Precision.FP32)
    assert fp32.replace({"g001": Precision.FP16}).fingerprint in toolchain.built[:3]
    assert [finding.code for finding in front.findings if finding.code == "emulation-differs"] == []
