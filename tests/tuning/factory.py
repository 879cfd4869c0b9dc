"""Evaluations made by hand, for tests of what is done with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Toolchain
from mptune.engines.timing.latency import Latency
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_SAMPLER, Evaluation, Origin
from mptune.tuning.listener import Listener
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.sensitivity import OneGroupErrors, Sensitivity
from tests.fakes import SHA


def make_error(value: float, samples: int = 2) -> OutputError:
    non_finite = 0.0 if math.isfinite(value) else 1.0
    return OutputError({"y": {"relative_l2": (value,) * samples, "non_finite": (non_finite,) * samples}})


def make_evaluation(
    ms: float,
    error: float,
    *,
    width: float = 0.0,
    held_out: float | None = None,
    number: int = 0,
    origin: Origin = ORIGIN_SAMPLER,
    bits: int | None = None,
) -> Evaluation:
    """An evaluation with a 95 % interval of ``ms +- width``; its plan is made of the bits of ``bits`` or ``number``."""
    code = number if bits is None else bits
    precision = {f"g{i:03d}": Precision.FP16 if code >> i & 1 else Precision.FP32 for i in range(10)}
    source = "measured" if width else "predicted"
    return Evaluation(
        plan=PrecisionPlan(SHA, precision),
        number=number,
        origin=origin,
        latency=Latency(ms, ms, ms, (ms - width, ms + width), 0.01, source),  # type: ignore[arg-type]
        error=make_error(error),
        metric="relative_l2",
        error_source="measured",
        speedup=1.0,
        held_out=None if held_out is None else make_error(held_out),
    )


def find_sensitivity(
    space: SearchSpace, toolchain: Toolchain, metric: str, path: Path, listener: Listener, *shared: Any
) -> Sensitivity:
    """All one-group errors, known well enough; what an earlier call wrote is not done again."""
    errors = OneGroupErrors(space, toolchain, metric, path, listener, *shared)
    errors.take(math.inf, wait=True)
    return errors.sensitivity()
