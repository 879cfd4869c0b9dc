"""Sensitivity: the output error of each free group alone in FP16, by emulation, before anything is built."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mptune.data.numbers import decode_float, encode_float
from mptune.engines.base import Toolchain
from mptune.files import write_json
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.listener import Listener
from mptune.tuning.sampler.boundaries import Boundary
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.emulated import emulate_plans
from mptune.tuning.steps.shared_errors import SharedErrors

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""

_WAIT_S = 0.3

_AT_A_TIME = 8
"""Groups per job: an interrupted run repeats at most one job, and progress is reported after each."""


@dataclass(frozen=True)
class Sensitivity:
    """One-group errors.

    Attributes:
        metric: the statistic.
        errors: group id -> error with that group alone in FP16; ``inf`` where it fails or is not finite.
    """

    metric: str
    errors: Mapping[str, float]

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads.

        Raises:
            RunError: the disk is full, or the place cannot be written.
        """
        errors = {group: encode_float(error) for group, error in self.errors.items()}
        write_json(path, {"metric": self.metric, "errors": errors})

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What ``save`` wrote for this metric; empty where there is nothing that can be read."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["metric"] == metric:
                return cls(metric, {g: decode_float(e) for g, e in document["errors"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls(metric, {})


def find_sensitivity(
    space: SearchSpace,
    toolchain: Toolchain,
    metric: str,
    path: Path,
    listener: Listener,
    shared: SharedErrors | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Sensitivity:
    """Emulate each free group alone; what an earlier call wrote is not done again.

    Args:
        space: its free groups are taken.
        toolchain: emulates; its reference is taken already.
        metric: the objective statistic.
        path: file that keeps the result, written after every few groups.
        listener: receives the progress.
        shared: what the other workers of the search do; None where there are none.
        sleep: waits for so many seconds, where other workers have the rest in work.

    Raises:
        RunError: the machine failed, or the file cannot be written.
    """
    errors = dict(Sensitivity.load(path, metric).errors)
    fp32 = PrecisionPlan.uniform(space.model_sha256, [g.id for g in space.groups], Precision.FP32)
    chunks = [space.free[start : start + _AT_A_TIME] for start in range(0, len(space.free), _AT_A_TIME)]
    while True:
        errors.update({} if shared is None else shared.known())
        missing = [number for number, chunk in enumerate(chunks) if any(group not in errors for group in chunk)]
        if not missing:
            break
        number = missing[0] if shared is None else shared.claim(missing)
        if number is None:
            sleep(_WAIT_S)
            continue
        done = sum(group in errors for group in space.free)
        listener.stage(f"sensitivity: {done} of {len(space.free)} groups")
        few = [group for group in chunks[number] if group not in errors]
        plans = [fp32.replace({group: Precision.FP16}) for group in few]
        found = emulate_plans(toolchain, plans, metric, listener)
        errors.update(zip(few, (error.value for error in found), strict=True))
        if shared is not None:
            shared.keep(number, {group: errors[group] for group in chunks[number]})
        Sensitivity(metric, errors).save(path)
    known = Sensitivity(metric, errors)
    if known != Sensitivity.load(path, metric):
        known.save(path)
    return known


def make_prior(space: SearchSpace, sensitivity: Sensitivity, terms: LatencyTerms | None, *, exact: bool) -> Prior:
    """The sampler's prior: what is known about errors and latencies before any build.

    Args:
        space: The search space; its free groups are the prior's terms.
        sensitivity: One-group error of every free group.
        terms: Gains and boundary costs of the roofline, in milliseconds; None if no latency can be predicted.
        exact: Whether latencies are predicted by these terms, so that they have no uncertainty.
    """
    position = {group: index for index, group in enumerate(space.free)}
    squares = tuple(
        math.inf if math.isinf(error) else math.log(max(error, ERROR_FLOOR) ** 2)
        for error in (sensitivity.errors[group] for group in space.free)
    )
    ops = {group.id: frozenset(group.ops) for group in space.groups}
    operators = tuple(ops[group] for group in space.free)
    if terms is None:
        return Prior(space.free, squares, operators=operators)
    boundaries: dict[Boundary, float] = {}
    for term in terms.boundaries:
        ends = dict.fromkeys((term.producer_group, *term.consumer_groups))
        members = tuple(sorted(position[e] for e in ends if e is not None and e in position))
        fixed = {space.pinned[e].precision for e in ends if e is not None and e in space.pinned}
        fp32 = term.fp32_consumer or term.producer_group is None or Precision.FP32 in fixed
        fp16 = Precision.FP16 in fixed
        if members and not (fp32 and fp16) and len(members) + fp32 + fp16 > 1:
            boundary = Boundary(members, fp32, fp16)
            boundaries[boundary] = boundaries.get(boundary, 0.0) + max(term.cost_ms, 0.0)
    # What the pins alone save against all-FP32, the Casts that they need under every plan counted in.
    pins = space.plan(dict.fromkeys(space.free, Precision.FP32))
    crossed = sum(c for boundary, c in boundaries.items() if boundary.fp16)
    return Prior(
        groups=space.free,
        log_square_errors=squares,
        gains_ms=tuple(float(terms.gains_ms.get(group, 0.0)) for group in space.free),
        boundaries=tuple(boundaries),
        boundary_costs_ms=tuple(boundaries.values()),
        fixed_gain_ms=terms.base_ms - terms.predict(pins) + crossed,
        exact=exact,
        operators=operators,
    )
