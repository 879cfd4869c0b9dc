"""A measured model that can be searched without its device: the law of its plans, off as far as it was seen to be.

Latency and error of a plan follow from the additive law that is fitted to all measured plans; each plan then deviates
from it, always by the same amount, drawn with the standard deviation of the law's residual on plans that it was not
fitted to. A timing has the noise that the measured ones had, and an emulated error deviates from the true one as those
that were measured and emulated did. A plan is not finite where one of its groups alone was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks.common import MeasuredPlans, bools_of, read_measured_plans, rounded
from benchmarks.peers.known import Known, read_known
from benchmarks.peers.law import AdditiveLaw, Residual, cross_validated
from benchmarks.simulator import Truth
from mptune.json_form import decode_float
from mptune.tuning.sampler.plans import Bools, Floats
from mptune.tuning.sampler.trials import Prior

_LATENCY, _ERROR, _EMULATION = 1, 2, 3
"""What a plan's deviations are drawn for."""

_LEAST = 0.05
"""Least latency, as a share of all-FP32's: where a law fits badly it may say anything."""

_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Laws:
    """A fitted law with how well it is known.

    Attributes:
        law: fitted to all plans.
        plans: so many.
        residual: on plans left out of the fit, a fifth at a time; without those of one group alone.
        emulation: standard deviation of the logarithm of emulated over measured error, of plans of many groups.
        timing: median standard error of a measured latency, relative.
        overflows: which free groups alone are not finite, as built or else as emulated, shape (groups,).
    """

    law: AdditiveLaw
    plans: int
    residual: Residual
    emulation: float
    timing: float
    overflows: Bools

    def to_json(self) -> dict[str, Any]:
        """How well the law is known."""
        return {
            "plans": self.plans,
            "residual": self.residual.to_json(),
            "emulation_log_sd": float(f"{self.emulation:.4g}"),
            "timing_sd": float(f"{self.timing:.4g}"),
            "not_finite_groups": int(self.overflows.sum()),
        }


def fit_laws(known: Known, measured: MeasuredPlans, searched: Path | None = None) -> Laws:
    """Fit the law of one model.

    Args:
        known: of the model.
        measured: its plans.
        searched: a file of what searches built of the same model; taken, too, where it has the same baseline.
    """
    prior, free, base_ms = known.with_errors(measured), known.is_free, measured.baseline_ms
    finite = [plan for plan in measured.plans if math.isfinite(plan.latency_ms) and math.isfinite(plan.error)]
    plans = [(plan.precision, plan.latency_ms, plan.error, plan.kind != "one-group") for plan in finite]
    document = json.loads(searched.read_text()) if searched is not None and searched.exists() else {}
    for row in document["plans"] if document.get("baseline_ms") == base_ms else ():
        figures = dict(zip(document["columns"], row, strict=True))
        latency_ms, error = (decode_float(figures[name]) for name in ("latency_ms", "error"))
        is_new = all(figures["precision"] != other.precision for other in measured.plans)
        if is_new and math.isfinite(latency_ms) and math.isfinite(error) and error > 0.0:
            plans.append((figures["precision"], latency_ms, error, True))
    rows = bools_of([bits for bits, *_ in plans])[:, free]
    latency, errors = (np.array([plan[column] for plan in plans]) for column in (1, 2))
    many = np.array([is_many for *_, is_many in plans]) & rows.any(axis=1)
    residual, pull = cross_validated(prior, rows, latency, errors, base_ms, many)
    both = [(p.emulated, p.error) for p in finite if p.kind != "one-group" and p.emulated and p.error > 0.0]
    ratios = np.log([emulated / error for emulated, error in both if math.isfinite(emulated)])
    overflows = {group: not math.isfinite(error) for group, error in known.alone.items()}
    for plan in measured.of_kind("one-group"):  # what was built decides
        overflows[known.groups[plan.precision.index("1")]] = not math.isfinite(plan.error)
    return Laws(
        AdditiveLaw.fit(prior, rows, latency, errors, base_ms, pull),
        len(rows),
        residual,
        float(ratios.std()) if len(ratios) else 0.0,
        float(np.median([plan.latency_sd_ms / plan.latency_ms for plan in finite])),
        np.array([overflows.get(group, False) for group in known.free]),
    )


class World(Truth):
    """A model whose plans follow a law, for ``benchmarks.simulator.search``; ``seed`` is the sampler's."""

    def __init__(self, known: Known, measured: MeasuredPlans, laws: Laws, seed: int = 0) -> None:
        self.known, self.laws, self._prior, self.deviates = known, laws, known.with_errors(measured), True
        super().__init__(groups=len(known.free), seed=seed, overflow=0.0, timing=laws.timing)

    def __post_init__(self) -> None:
        law = self.laws.law
        self.ids = self.known.free
        self.boundaries, self.costs = list(law.boundaries), law.costs_ms
        whole = np.maximum(law.gains_ms, 0.0) + law.base_ms / self.groups
        self.times = np.stack([whole, whole - law.gains_ms], axis=1)
        self.errors = np.sqrt(law.squares)
        self.overflows = self.laws.overflows
        self.missed = np.zeros(self.groups, dtype=bool)
        self.slow = np.zeros(self.groups, dtype=bool)
        self.base = law.base_ms

    def by_law(self, plans: Bools) -> tuple[Floats, Floats]:
        """Latency in milliseconds and error of each row by the law, without what each plan deviates by."""
        latency_ms, log_error = self.laws.law.predict(plans)
        return np.maximum(latency_ms, _LEAST * self.base), np.exp(log_error)

    def latency(self, plans: Bools) -> Floats:
        """Of each row, in milliseconds; all-FP32 is the baseline itself."""
        off = self._deviations(plans, _LATENCY, self.laws.residual.latency)
        return np.where(plans.any(axis=1), self.by_law(plans)[0] * np.exp(off), self.base)

    def error(self, plans: Bools) -> Floats:
        """Of each row."""
        off = self._deviations(plans, _ERROR, self.laws.residual.log_error)
        return np.exp(self.laws.law.predict(plans)[1] + np.where(plans.any(axis=1), off, 0.0))

    def finite(self, plans: Bools) -> Bools:
        """Whether each row's outputs are finite."""
        result: Bools = ~(plans & self.overflows).any(axis=1)
        return result

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """Emulated errors of whole plans."""
        plans = np.array([[choice[group] == "fp16" for group in self.ids] for choice in choices])
        found = self.error(plans) * np.exp(self._deviations(plans, _EMULATION, self.laws.emulation))
        return [float(value) for value in np.where(self.finite(plans), found, math.inf)]

    def prior(self) -> Prior:
        """What a search knows of it."""
        return self._prior

    def own_front(self, limits: Sequence[float]) -> dict[str, Any]:
        """The hypervolume of the law's front, and the gain within each limit.

        Without deviations: among millions of plans some would deviate greatly.
        """
        self.deviates = False
        try:
            front = self.near_exact()
            gains = [rounded(self.gain_within(front, limit)) for limit in limits]
            return {"own_front": rounded(self.hypervolume(front)), "own_gains": gains}
        finally:
            self.deviates = True

    @property
    def first(self) -> list[dict[str, str]]:
        """What a search of mptune's builds first."""
        free = self.known.is_free
        rows = bools_of([bits for _, bits in self.known.seeds])[:, free]
        return [{g: "fp16" if half else "fp32" for g, half in zip(self.ids, row, strict=True)} for row in rows]

    def bits(self, plan: Bools) -> str:
        """A row over the free groups as one 0 or 1 for each group of the model; pins stand as in the first plan."""
        whole = bools_of([self.known.seeds[0][1]])[0]
        whole[self.known.is_free] = plan
        return "".join("01"[int(half)] for half in whole)

    def _deviations(self, plans: Bools, kind: int, sd: float) -> Floats:
        """What each plan deviates by: normal, the same whenever it is asked, and of another plan another."""
        weights = np.random.default_rng(kind).integers(1, 2**63, plans.shape[1], dtype=np.uint64)
        mixed = plans.astype(np.uint64) @ weights + np.uint64(kind)
        for shift, factor in _MIXING:  # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        share = (((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(float) + 0.5) / 2.0**53
        deviations: Floats = sd * ndtri(share) * self.deviates
        return deviations


def open_world(results: Path, model: str, seed: int = 0, laws: Laws | None = None) -> World:
    """The world of a model whose files are in a folder of results; its laws are fitted where none are given."""
    measured = read_measured_plans(results / f"h200_plans_{model}.json")
    known = read_known(results / f"peers_known_{model}.json")
    if known.groups != tuple(group for group, _, _ in measured.groups):
        raise SystemExit(f"{model}: the layer groups are not those that were measured; measure again")
    return World(known, measured, laws or fit_laws(known, measured, results / f"h200_search_{model}.json"), seed)
