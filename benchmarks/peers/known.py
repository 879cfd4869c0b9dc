"""What a search knows of a model before any build, as a file: groups, pins, first plans, the roofline's terms.

With it and the file of measured plans (``benchmarks.peers.collect``) searches are replayed without the model, its data
or a device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.common import MeasuredPlans, one_group_plans
from benchmarks.measuring import Bench
from mptune.files import write_json
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import ObservedValues
from mptune.graph.plan import Precision
from mptune.json_form import decode_float, encode_float
from mptune.tuning.explanation import Grounds
from mptune.tuning.knowledge import Sensitivity, make_prior
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import load_space, make_space


@dataclass(frozen=True)
class Known:
    """What is known of one model.

    Attributes:
        groups: ids of all layer groups, in the order of the model.
        free: ids of those that are searched.
        seeds: name and plan (one 0 or 1 per group) of what a search builds first, all-FP32 and all-FP16 before others.
        prior: of the free groups, without errors.
        alone: emulated error of each group alone in FP16, by id.
    """

    groups: tuple[str, ...]
    free: tuple[str, ...]
    seeds: tuple[tuple[str, str], ...]
    prior: Prior
    alone: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_free(self) -> np.ndarray:
        """Whether each group is searched, shape (groups,)."""
        return np.isin(self.groups, self.free)

    def with_errors(self, measured: MeasuredPlans) -> Prior:
        """The prior with the emulated one-group errors, as a file of measured plans holds them or this one."""
        alone = dict(self.alone)
        for plan in measured.of_kind("one-group"):
            if plan.emulated is not None:
                alone[self.groups[plan.precision.index("1")]] = plan.emulated
        if missing := [group for group in self.free if group not in alone]:
            raise SystemExit(f"{measured.model}: no emulated error of {missing[0]}: collect goes on")
        squares = (2.0 * math.log(alone[group]) if alone[group] else -math.inf for group in self.free)
        return replace(self.prior, log_square_errors=tuple(max(square, -80.0) for square in squares))


def know(bench: Bench, path: Path) -> None:
    """Write what the tool would know of the bench's model with the default search space."""
    grouped = bench.context.grouped
    hazards = find_hazards(grouped, ObservedValues(bench.ranges))
    space = make_space(grouped, load_space("default"), hazards, {Precision.FP16: bench.without_kernel})
    prior = make_prior(space, Sensitivity("relative_l2", {}), bench.terms, exact=False)
    bits = {group: bench.bits(plan) for group, plan in one_group_plans(bench.model, bench.groups).items()}
    emulated = bench.record.emulated
    document = {
        "model": bench.model.path.stem,
        **Grounds.from_space(space, prior).to_json(),
        "seeds": [[str(seed.origin), bench.bits(seed.plan)] for seed in space.seeds],
        "alone": {group: encode_float(emulated[plan]) for group, plan in bits.items() if plan in emulated},
    }
    write_json(path, document)


def read_known(path: Path) -> Known:
    """Read what ``know`` wrote."""
    grounds = Grounds.load(path)
    if grounds.prior is None:
        raise SystemExit(f"{path} is missing or holds no latency terms: python -m benchmarks.peers collect MODEL")
    document = json.loads(path.read_text())
    seeds = tuple((name, bits) for name, bits in document["seeds"])
    alone = {group: decode_float(error) for group, error in document.get("alone", {}).items()}
    free = tuple(group.group for group in grounds.groups if group.pinned is None)
    return Known(tuple(group.group for group in grounds.groups), free, seeds, grounds.prior, alone)
