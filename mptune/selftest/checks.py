"""What the self-test judges: figures against limits. Each check is one line.

A check whose figure would follow from a fault that another check shows is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mptune.engines.base import Failure
from mptune.json_form import JsonForm
from mptune.selftest.cases import FIRST, FP32, SECOND, Case
from mptune.selftest.job import EngineRun

Status = Literal["holds", "does not hold", "cannot be checked here"]
MOST_ERROR = 3.0
"""An engine's error over the emulated one. Real FP16 engines: 0.82 to 1.08 (an H200, one group at a time)."""
MOST_CHANGE = 1e-4
"""Relative difference between two runs on one sample; atomic additions come in any order."""
FOREIGN = 0.1
"""Relative error of the second sample's outputs from which on they are another run's."""
LEAST_LIKENESS = 0.15
"""How much more alike (cosine) an engine's error is to its own plan's emulated one than to the other half's."""
MOST_FP32_ERROR = 5e-5
"""Relative error of FP32 without TF32: sums of some hundred products give about 5e-7, TF32 gives 3e-4."""
SPAN_RATIOS = (0.9, 1.05)
"""A span by the engine's clock over the same by the host's."""


@dataclass(frozen=True)
class Check(JsonForm):
    """One line of the self-test."""

    engine: str
    name: str
    status: Status
    figure: float | None
    limit: str
    text: str


@dataclass(frozen=True, eq=False)
class Seen:
    """One engine that was built and run.

    Attributes:
        fuses: whether the engine rounds as one that fuses nodes.
        outputs: of the first sample, of the second, of the first again; empty where it failed.
    """

    case: Case
    plan: str
    fuses: bool
    run: EngineRun | Failure
    outputs: tuple[np.ndarray, ...] = ()
    build_s: float = 0.0
    nbytes: int | None = None

    @property
    def reference(self) -> tuple[np.ndarray, ...]:
        """FP32 outputs of both samples."""
        return self.case.reference

    @property
    def emulated(self) -> Mapping[str, np.ndarray]:
        """Emulated outputs of the first sample by plan."""
        return self.case.fused if self.fuses else self.case.unfused

    @property
    def title(self) -> str:
        """Model and plan as text."""
        return f"{self.case.name}, {self.plan}"

    @property
    def error(self) -> float:
        """Relative L2 error of the first sample."""
        return relative(self.outputs[0], self.reference[0])

    def change(self, is_off: bool) -> float:
        """How far the second run on the first sample is from the first one; or that on the other from its reference.

        Where all outputs are off (``is_off``), the latter says nothing.
        """
        change, other = relative(self.outputs[2], self.outputs[0]), relative(self.outputs[1], self.reference[1])
        return max(change, other) if other > FOREIGN and not is_off else change

    def likeness(self, plan: str) -> float:
        """Cosine between the error and a plan's emulated one."""
        mine, other = self.outputs[0] - self.reference[0], self.emulated[plan] - self.reference[0]
        norms = float(np.linalg.norm(mine)) * float(np.linalg.norm(other))
        return float(np.sum(mine * other)) / norms if norms > 0 else 0.0


def relative(values: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2 error; infinite where the shapes differ or a value is not finite."""
    if values.shape != wanted.shape or not np.isfinite(values).all():
        return float("inf")
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))


def judge(engine: str, seen: Sequence[Seen]) -> tuple[Check, ...]:
    """The checks of one engine, by what was built and run."""
    ran = [each for each in seen if not isinstance(each.run, Failure)]
    builds = _builds(engine, seen)
    if not ran:
        return (builds,)
    outputs = _outputs(engine, ran)
    is_off = outputs.status == "does not hold"
    without_tf32 = _tf32(engine, ran, is_off)
    uses_tf32 = without_tf32.status == "does not hold"
    why_not = "its outputs are off" if is_off else "FP32 is not FP32" if uses_tf32 else ""
    return (
        builds,
        outputs,
        _precisions(engine, ran, why_not),
        without_tf32,
        _repeated(engine, ran, is_off),
        _clock(engine, ran),
    )


def _builds(engine: str, seen: Sequence[Seen]) -> Check:
    failed = [(each.title, each.run) for each in seen if isinstance(each.run, Failure)]
    text = f"{len(seen) - len(failed)} of {len(seen)} engines built and run"
    if failed:
        title, failure = failed[0]
        text += f"; {title}: {failure.stage.value}: {failure.kind.value}: {failure.message}"
    return Check(engine, "builds", "does not hold" if failed else "holds", float(len(failed)), "0 failures", text)


def _outputs(engine: str, ran: Sequence[Seen]) -> Check:
    limit = f"<= {MOST_ERROR:g}"
    ratios = [
        (each.error / relative(each.emulated[each.plan], each.reference[0]), each) for each in ran if each.plan != FP32
    ]
    if not ratios:
        return unchecked(engine, "outputs", limit, "no plan with FP16 could be run")
    worst, each = max(ratios, key=lambda pair: pair[0])
    text = f"largest error is {worst:.2g} times the emulated one ({each.title}: {each.error:.2g})"
    return _check(engine, "outputs", worst <= MOST_ERROR, worst, limit, text)


def _precisions(engine: str, ran: Sequence[Seen], why_not: str) -> Check:
    limit = f">= {LEAST_LIKENESS:g}"
    if why_not:
        return unchecked(engine, "precisions", limit, why_not)
    halves = [(each, SECOND if each.plan == FIRST else FIRST) for each in ran if each.plan in (FIRST, SECOND)]
    margins = [(each.likeness(each.plan) - each.likeness(other), each) for each, other in halves]
    if not margins:
        return unchecked(engine, "precisions", limit, "no mixed plan could be run")
    least, each = min(margins, key=lambda pair: pair[0])
    text = f"error is as the plan's emulated one, not as its complement's: cosine greater by {least:.2f} ({each.title})"
    if least < LEAST_LIKENESS:
        text = (
            f"error of {each.title} ({each.error:.2g}) is not as its plan rounds: cosine greater by {least:.2f} than to"
            " its complement"
        )
    return _check(engine, "precisions", least >= LEAST_LIKENESS, least, limit, text)


def _tf32(engine: str, ran: Sequence[Seen], is_off: bool) -> Check:
    limit = f"<= {MOST_FP32_ERROR:g}"
    plain = [each for each in ran if each.plan == FP32]
    if is_off or not plain:
        return unchecked(engine, "tf32", limit, "its outputs are off" if is_off else "all-FP32 could not be run")
    worst = max(plain, key=lambda each: each.error)
    text = f"FP32 error is {worst.error:.2g} with TF32 off ({worst.case.name}); TF32 would give about 3e-4"
    return _check(engine, "tf32", worst.error <= MOST_FP32_ERROR, worst.error, limit, text)


def _repeated(engine: str, ran: Sequence[Seen], is_off: bool) -> Check:
    worst, each = max(((each.change(is_off), each) for each in ran), key=lambda pair: pair[0])
    text = f"runs on two samples in turn differ by {worst:.2g} from what each of them gives ({each.title})"
    return _check(engine, "repeat", worst <= MOST_CHANGE, worst, f"<= {MOST_CHANGE:g}", text)


def _clock(engine: str, ran: Sequence[Seen]) -> Check:
    low, high = SPAN_RATIOS
    limit = f"{low:g} to {high:g}"
    readings = [
        (each, each.run.clock) for each in ran if isinstance(each.run, EngineRun) and each.run.clock is not None
    ]
    if not readings:
        return unchecked(engine, "clock", limit, "no engine could be timed")
    each, clock = max(readings, key=lambda pair: abs(np.log(max(pair[1].span_ratio, 1e-9))))
    text = f"{clock.executions} executions take {clock.span_ratio:.3f} of the host clock's time ({each.title})"
    return _check(engine, "clock", low <= clock.span_ratio <= high, clock.span_ratio, limit, text)


def _check(engine: str, name: str, holds: bool, figure: float, limit: str, text: str) -> Check:
    return Check(engine, name, "holds" if holds else "does not hold", figure, limit, text)


def unchecked(engine: str, name: str, limit: str, why: str) -> Check:
    """A check that cannot be taken here, and why."""
    return Check(engine, name, "cannot be checked here", None, limit, why)
