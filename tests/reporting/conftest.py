"""Fronts over real small models, with figures given by hand so that every view has something to show."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.environment import Environment, GpuState
from mptune.engines.latency import Latency
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.reporting.chosen import readme_text
from mptune.reporting.page import PageContent
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.terminal.front import print_front
from mptune.run_json import TargetSection
from mptune.tuning.choosing import choose
from mptune.tuning.confirmation import Confirmation, ConfirmedPlan, error_agreement, latency_agreement
from mptune.tuning.dominance import hypervolume, pareto
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.explanation import Explanation, GroupWorth, Kept, Reason
from mptune.tuning.front import Front

Evaluations = tuple[Evaluation, ...]

SOURCES = {"latency_source": "predicted", "error_source": "emulated"}
SEARCHED = TargetSection(name="h200", engine="emulation", device="NVIDIA H200 SXM", **SOURCES)


class Terminal(io.StringIO):
    """A terminal, as far as rich asks."""

    def isatty(self) -> bool:
        return True


def printed(content: object, columns: int = 100, show: Callable[..., None] = print_front, **options: object) -> str:
    """What a function prints of a front, or of other content, where there is no terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        show(content, stream := io.StringIO(), **options)
    return stream.getvalue()


def readme(front: Front) -> str:
    """README.txt of the chosen plan, without an engine and samples beside it."""
    assert front.chosen is not None
    return readme_text(front, front.chosen, None, None, BuildRecipe(), has_check=False)


def make_error(value: float, output: str = "y", non_finite: float = 0.0) -> OutputError:
    """An error with the same value on both of two samples."""
    both = (value, value)
    return OutputError({output: {"relative_l2": both, "max_abs": both, "non_finite": (non_finite, 0)}})


def make_latency(ms: float, source: str = "measured") -> Latency:
    """A latency with an interval of one percent where it is measured."""
    if source == "predicted":
        return Latency.predicted(ms)
    return Latency(ms, ms * 1.02, ms * 1.05, (ms * 0.995, ms * 1.005), 0.01, "measured", (ms,))


@dataclass(frozen=True)
class Bench:
    """A model, its groups, and evaluations and fronts over it."""

    model: Model
    groups: tuple[LayerGroup, ...]

    @property
    def grouped(self) -> GroupedModel:
        """The two together."""
        return GroupedModel(self.model, self.groups)

    def plan(self, fp16: int) -> PrecisionPlan:
        """The first ``fp16`` free groups in FP16."""
        free = [group.id for group in self.groups if group.pinned is None]
        return self.grouped.uniform(Precision.FP32).replace(dict.fromkeys(free[:fp16], Precision.FP16))

    def evaluation(self, fp16: int, ms: float, error: float, **changes: Any) -> Evaluation:
        """An evaluation of ``plan(fp16)``; ``source`` is of the latency, other keywords are fields."""
        given = {
            "plan": self.plan(fp16), "number": fp16, "origin": Origin("sampler"), "metric": "relative_l2",
            "latency": make_latency(ms, changes.pop("source", "measured")), "error": make_error(error),
            "error_source": "measured", "speedup": 2.0 / ms,
        }  # fmt: skip
        return Evaluation(**{**given, **changes})

    def front(self, directory: Path) -> tuple[Front, Evaluations]:
        """A front of four points, with a dominated plan and one that is not finite beside it."""
        every = len(self.groups)
        fp32 = self.evaluation(0, 2.0, 0.0, origin=Origin("seed", "all-fp32"))
        fp16 = self.evaluation(every, 0.9, 2.4e-2, origin=Origin("seed", "all-fp16"))
        norms = Origin("seed", "norms and softmax in FP32")
        exact = self.evaluation(1, 1.7, 3e-4, origin=norms, remeasured=True, held_out=make_error(4e-4))
        fast, slow = self.evaluation(2, 1.2, 2e-3), self.evaluation(3, 1.9, 5e-3)
        broken = replace(self.evaluation(4, 1.0, 0.0, number=9), error=make_error(float("nan"), non_finite=3.0))
        evaluations = (fp32, fp16, exact, fast, slow, broken)
        points = pareto(evaluations)
        choice = choose(points, Choice(max_error=5e-3), ("relative_l2",))
        given = {
            "run_dir": directory, "model_path": self.model.path, "model_sha256": self.model.sha256,
            "target": "this-gpu", "engine": "onnxruntime", "device": "NVIDIA H200", "metric": "relative_l2",
            "fp32": fp32, "fp16": fp16, "points": points, "choice": choice,
            "chosen": next(point for point in points if point.plan.fingerprint == choice.chosen),
            "evaluations": len(evaluations) + 1, "failures": 2, "hypervolume": hypervolume(points, fp32),
            "warnings": ("the calibration data are random: give real samples with --data",),
        }  # fmt: skip
        return Front(**given), evaluations


def predicted(front: Front) -> Front:
    """The same front as of a target that is not here: latencies predicted, errors emulated."""

    def turn(evaluation: Evaluation) -> Evaluation:
        latency = Latency.predicted(evaluation.latency.median_ms)
        return replace(evaluation, latency=latency, error_source="emulated", remeasured=False)

    names = {"target": "jetson-orin-nano-8gb", "engine": "roofline", "device": "Jetson Orin Nano 8 GB"}
    assert front.fp16 is not None
    assert front.chosen is not None
    ends = {"fp32": turn(front.fp32), "fp16": turn(front.fp16), "chosen": turn(front.chosen)}
    return replace(front, points=tuple(map(turn, front.points)), **names, **ends)


def explained(front: Front, groups: Sequence[LayerGroup], name: str = "a/very/long/path/to/<{}>[b]") -> Explanation:
    """Reasons by turns for every FP32 group, with nasty names."""
    turns, reasons = get_args(Reason), dict[str, tuple[Kept, ...]]()
    for point in front.points:
        each = enumerate(point.plan.fp32_groups)
        worths = [GroupWorth(g, name.format(g), "conv", 10.0**-k, pinned=f"why <{k}> {name[:99]}") for k, g in each]
        each_kept = (Kept(worth, turns[k % len(turns)], 0.1) for k, worth in enumerate(worths))
        reasons[point.plan.fingerprint] = tuple(each_kept)
    errors = [math.inf, *(10.0**-k for k in range(1, len(groups)))]
    facts = (GroupWorth(g.id, g.name, g.kind, errors[k], 0.01, 0.002, k) for k, g in enumerate(groups))
    return Explanation(reasons, tuple(facts), "the roofline and 48 builds")


@pytest.fixture(scope="session")
def bench(mlp_path: Path) -> Bench:
    """The MLP and its groups."""
    model = load_model(mlp_path)
    return Bench(model, find_groups(model))


@pytest.fixture
def environment() -> Environment:
    """A machine with one GPU."""
    gpu = GpuState(0, "NVIDIA H200", memory_mb=143771, driver="580.1", sm_clock_mhz=1980, max_sm_clock_mhz=1980)
    return Environment({"python": "3.11.7", "onnxruntime": "1.31.1"}, "Linux", "A CPU", 16, (gpu,))


@pytest.fixture
def front(bench: Bench, run_dir: Path) -> Front:
    """The usual front."""
    return bench.front(run_dir)[0]


@pytest.fixture
def evaluations(bench: Bench, run_dir: Path) -> Evaluations:
    """Those that the usual front is of."""
    return bench.front(run_dir)[1]


@pytest.fixture
def content(front: Front, evaluations: Evaluations, bench: Bench, environment: Environment) -> PageContent:
    """That of the usual front's page."""
    return PageContent(front, evaluations, bench.groups, environment)


@pytest.fixture
def confirmation(bench: Bench, tmp_path: Path) -> Confirmation:
    front, evaluations = bench.front(tmp_path)
    plans = []
    for e in evaluations:
        searched = replace(e, latency=Latency.predicted(e.latency.median_ms / 10), error_source="emulated")
        measured, failure = replace(e, held_out=e.error), "its outputs are <not> finite"
        plans.append(ConfirmedPlan(searched, *((measured, "") if e.is_finite else (None, failure))))
    plans.sort(key=lambda p: (p.measured is None, p.searched.latency.median_ms))
    pairs = [(p.searched, p.measured) for p in plans if p.measured is not None]
    return Confirmation(front, SEARCHED, tuple(plans), latency_agreement(pairs), error_agreement(pairs))
