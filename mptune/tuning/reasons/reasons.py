"""Computes explanations from what a run directory holds; neither the model nor the device is needed.

A reason is a marginal one: what would change if this one group of this one plan became FP16 as well, by the additive
model with the terms fitted to all builds (``mptune.tuning.sampler``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mptune.files import READ_ERRORS, read_json, write_json
from mptune.finding import Finding
from mptune.graph.groups import FOLDED
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth, Kept, Reason
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.prior import SENSITIVITY_JSON, Sensitivity

LEAST_GAIN = 5e-4
"""Share of the base latency: what a group saves below it cannot be timed."""
LEAST_RISE = 1e-2
"""A group that raises the error of a plan by less than this share costs it nothing that counts."""
_LEARNT_FROM = 300
"""This many evaluations teach the gains all there is to learn; the cost of learning is cubic."""
EXPLAIN_JSON = "explain.json"
"""Name of the file in the run's data directory."""


@dataclass(frozen=True)
class Grounds(JsonForm):
    """All layer groups without figures, in the order of the model; gains and boundary costs before any build."""

    groups: tuple[GroupWorth, ...] = ()
    prior: Prior | None = None

    @property
    def free(self) -> tuple[str, ...]:
        """Ids of the groups that are searched."""
        return tuple(group.group for group in self.groups if group.pinned is None)

    @classmethod
    def of(cls, space: SearchSpace, prior: Prior | None) -> Grounds:
        """The grounds of a space, without one-group errors, which belong to the sensitivity."""
        pins = {group.id: space.pinned.get(group.id) for group in space.groups}
        groups = (GroupWorth(g.id, g.name, g.kind) for g in space.groups)
        pinned = (replace(w, pinned=p.reason, finding=p.finding) if (p := pins[w.group]) else w for w in groups)
        if prior is None or prior.gains_ms is None:
            return cls(tuple(pinned))
        return cls(tuple(pinned), replace(prior, log_square_errors=None, log_square_sds=None, part_shares=None))

    @classmethod
    def load(cls, path: Path) -> Grounds:
        """Read what ``keep_grounds`` wrote; empty where there is nothing that can be read."""
        try:
            return cls.from_json(read_json(path))
        except READ_ERRORS:
            return cls()


def keep_grounds(space: SearchSpace, prior: Prior | None, data_dir: Path) -> None:
    """Store what later explanations need; terms that are there already stay where ``prior`` brings none."""
    before, now = Grounds.load(data_dir / EXPLAIN_JSON), Grounds.of(space, prior)
    if now.prior is None and before.free == now.free:
        now = Grounds(now.groups, before.prior)
    if now != before:
        write_json(data_dir / EXPLAIN_JSON, now.to_json())


def explain(
    record: StudyRecord,
    data_dir: Path,
    points: Sequence[Evaluation],
    others: Sequence[Evaluation] = (),
    findings: Sequence[Finding] = (),
) -> Explanation:
    """Say why groups are FP32 in each point of a front and in other plans, and what each group costs and gains."""
    grounds = Grounds.load(data_dir / EXPLAIN_JSON)
    groups, free = grounds.groups, grounds.free
    if not groups or any(e.plan.precision.keys() != {g.group for g in groups} for e in points):
        return Explanation()
    plans = {e.plan.fingerprint: e for e in (*points, *others)}

    # One-group errors of the metric, or else in relative L2.
    ignored = next((e.ignored for e in plans.values()), ())
    stored = (Sensitivity.load(data_dir / SENSITIVITY_JSON, metric) for metric in (record.metric, "relative_l2"))
    usable: Mapping[str, float] = next((each.ignoring(ignored).errors for each in stored if each.errors), {})
    errors = {group: error for group, error in usable.items() if not math.isnan(error)}

    # Gains and costs of boundaries, fitted to all builds: what each group would save that a plan has in FP32.
    gains_ms: dict[str, float] = {}
    source, latency, terms = None, None, np.empty(0)
    built = record.built_plans(free).thinned(_LEARNT_FROM)
    if grounds.prior is not None and math.isfinite(built.base_ms) and built.base_ms > 0:
        latency = LatencyModel(grounds.prior, built)
        terms = latency.mean()[None]
        gains_ms = dict(zip(free, map(float, terms[0]), strict=False))
        builds = int(np.isfinite(built.latency_ms).sum())
        source = "the roofline" if grounds.prior.exact else f"the roofline and {builds} builds"

    def saved_ms(reduced: Collection[str]) -> dict[str, float]:
        if latency is None:
            return {}
        row = np.array([[group in reduced for group in free]])
        flips = row | np.eye(len(free), dtype=bool)[~row[0]]  # (n_fp32, n_free): one more group each
        before, *after = latency.predict(np.vstack([row, flips]), terms)[0]
        fp32 = (group for group in free if group not in reduced)
        return {group: float(before - ms) for group, ms in zip(fp32, after, strict=True)}

    codes = {group: f.code for f in reversed(findings) if f.is_breaking for group in f.where.groups}
    alone_ms = saved_ms(())
    worths = [
        replace(
            group,
            one_group_error=errors.get(group.group),
            gain_ms=gains_ms.get(group.group),
            casts_ms=max(0.0, gains_ms[group.group] - alone_ms[group.group]) if group.group in gains_ms else None,
            fp16_points=sum(p.plan.precision[group.group] is not Precision.FP32 for p in points),
            finding=codes.get(group.group) if group.pinned is None else group.finding,
        )
        for group in groups
    ]
    kept: dict[str, tuple[Kept, ...]] = {}
    for name, evaluation in plans.items():
        fp32 = {worth.group: worth for worth in worths if evaluation.plan.precision[worth.group] is Precision.FP32}
        saves = saved_ms(evaluation.plan.reduced_groups)
        least_ms, error = LEAST_GAIN * built.base_ms, max(evaluation.error_value, ERROR_FLOOR)
        reasons = [Kept(w, _reason(w, saves.get(g), least_ms, error), saves.get(g)) for g, w in fp32.items()]
        reasons.sort(key=lambda k: (k.worth.one_group_error is None, -(k.worth.one_group_error or 0.0)))
        kept[name] = tuple(reasons)
    return Explanation(kept, tuple(sorted(worths, key=_rank)), source)


def _reason(worth: GroupWorth, saves_ms: float | None, least_ms: float, plan_error: float) -> Reason:
    """Why a plan of this error keeps a group in FP32; a saving below ``least_ms`` cannot be timed."""
    if worth.pinned is not None:
        if worth.finding is None:
            return "casts" if worth.pinned == FOLDED else "not-tried"
        return "no-kernel" if worth.finding.endswith("-kernel") else "finding"
    error = worth.one_group_error
    raises = error is not None and not math.hypot(plan_error, error) < (1 + LEAST_RISE) * plan_error
    # Casts that do not pay may be there only because of the neighbours' errors: then its own error is why.
    if saves_ms is not None and saves_ms < least_ms and (not raises or (worth.gain_ms or 0.0) <= 0):
        return "casts"
    return "error" if raises else "not-tried"


def _rank(worth: GroupWorth) -> tuple[int, float]:
    """First what pays most, then what gains nothing or overflows, then what is pinned."""
    error, gain = worth.one_group_error, worth.gain_ms
    if error is not None and math.isfinite(error) and gain is not None and gain > 0:
        return 0, error / gain
    return 2 if worth.pinned is not None else 1, error or 0.0
