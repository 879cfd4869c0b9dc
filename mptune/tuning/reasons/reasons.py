"""Computes explanations from what a run directory holds: pins, one-group errors, latency terms and the evaluations.

Nothing is measured, and neither the model nor the device is needed: ``mptune report`` explains anywhere. A reason is
a marginal one: what would change if this one group of this one plan became FP16 as well, by the additive model with the
terms fitted to all builds (``mptune.tuning.sampler``). If a group's error is large and its Casts do not pay either, the
error is the reason: the Casts may be there only because of its neighbours' errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mptune.engines.base import Failure
from mptune.files import READ_ERRORS, read_json, write_json
from mptune.finding import Finding
from mptune.graph.grouping.groups import CASTS_INTEGERS, FOLDED
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import JsonForm
from mptune.printable import cut
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.explanation import Explanation, GroupWorth, Kept, Reason
from mptune.tuning.failures import describe
from mptune.tuning.fronts.dominance import faster_beyond_noise
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.reasons.group_findings import finding_of
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.plans import Floats
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import Pin, SearchSpace
from mptune.tuning.steps.remeasure import dropped_plans
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, Sensitivity

LEAST_GAIN = 5e-4
"""Share of the base latency: what a group saves below it cannot be timed."""

LEAST_RISE = 1e-2
"""A group that raises the error of a plan by less than this share costs it nothing that counts."""

_WORTHLESS = (FOLDED, CASTS_INTEGERS)
"""Why the model itself leaves a group in FP32: FP16 would save nothing."""

_LEARNT_FROM = 300
"""So many evaluations teach the gains all there is to learn; the cost of learning is cubic."""

_DIGITS = 4

_OPEN = "whether it is to blame is open, and a larger budget may tell"

_LONGEST_CAUSE = 160
"""Characters of what is said of a failure beside a group; its log and the page have the rest."""


EXPLAIN_JSON = "explain.json"
"""Name of the file in the run's data directory."""


@dataclass(frozen=True)
class GroupFacts:
    """A layer group as far as explanations need it, and its pin."""

    id: str
    name: str
    kind: str
    pin: Pin | None = None
    reduced: Precision = Precision.FP16


@dataclass(frozen=True)
class Grounds(JsonForm):
    """All layer groups, in the order of the model; gains and boundary costs before any build, where they are known.

    Attributes:
        pinned_gains_ms: id of a pinned group -> what it would take less in the reduced precision.
    """

    groups: tuple[GroupFacts, ...] = ()
    prior: Prior | None = None
    pinned_gains_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the prior's terms are of its groups and boundaries."""
        prior = self.prior
        if prior is None:
            return
        of_groups = {len(prior.precisions or prior.groups), len(prior.gains_ms or ())}
        costs = len(prior.boundary_costs_ms)
        if of_groups != {len(prior.groups)} or costs != len(prior.boundaries):
            raise ValueError("the terms of the prior do not fit together")

    @property
    def free(self) -> tuple[str, ...]:
        """Ids of the groups that are searched."""
        return tuple(group.id for group in self.groups if group.pin is None)

    @classmethod
    def of(cls, space: SearchSpace, prior: Prior | None, terms: LatencyTerms | None = None) -> Grounds:
        """The grounds of a space, without one-group errors, which belong to the sensitivity."""
        pins, reduced = space.pinned, space.reduced_of
        groups = tuple(GroupFacts(g.id, g.name, g.kind, pins.get(g.id), reduced(g.id)) for g in space.groups)
        if prior is None or prior.gains_ms is None:
            return cls(groups)
        gains = {g: terms.gain_ms(g, reduced(g)) for g in pins} if terms is not None else {}
        return cls(groups, replace(prior, log_square_errors=None, log_square_sds=None, part_shares=None), gains)

    @classmethod
    def load(cls, path: Path) -> Grounds:
        """Read what ``keep_grounds`` wrote; empty where there is nothing that can be read."""
        try:
            return cls.from_json(read_json(path))
        except READ_ERRORS:
            return cls()


def keep_grounds(space: SearchSpace, prior: Prior | None, data_dir: Path, terms: LatencyTerms | None = None) -> None:
    """Store what later explanations need; terms that are there already stay where ``prior`` brings none."""
    path = data_dir / EXPLAIN_JSON
    before, now = Grounds.load(path), Grounds.of(space, prior, terms)
    if now.prior is None and before.free == now.free:
        now = Grounds(now.groups, before.prior, before.pinned_gains_ms)
    if now != before:
        write_json(path, now.to_json())


def explain(
    record: StudyRecord,
    data_dir: Path,
    points: Sequence[Evaluation],
    others: Sequence[Evaluation],
    chosen: Evaluation | None,
    findings: Sequence[Finding] = (),
) -> Explanation:
    """Say why groups are FP32 in each point and in ``others``, and what each group costs and gains.

    The verdicts are about the chosen plan. Findings about groups are the reasons for them.
    """
    grounds = Grounds.load(data_dir / EXPLAIN_JSON)
    if not grounds.groups or any(e.plan.precision.keys() != {g.id for g in grounds.groups} for e in points):
        return Explanation()
    every = (Sensitivity.load(data_dir / SENSITIVITY_JSON, metric) for metric in (record.metric, "relative_l2"))
    ignored = chosen.ignored if chosen is not None else points[0].ignored if points else ()
    usable: Mapping[str, float] = next(
        (sensitivity.ignoring(ignored).errors for sensitivity in every if sensitivity.errors), {}
    )
    errors = {group: error for group, error in usable.items() if not math.isnan(error)}
    plans = {e.plan.fingerprint: e for e in (*points, *others, *([chosen] if chosen is not None else []))}
    reasons = _Reasons(grounds, errors, record, findings, tuple(plans.values()))
    kept = {fingerprint: reasons.of(evaluation) for fingerprint, evaluation in plans.items()}
    return Explanation(kept, reasons.worths(points, chosen, kept), reasons.gains_from)


class _Reasons:
    """What is known of every group of one run."""

    def __init__(
        self,
        grounds: Grounds,
        errors: Mapping[str, float],
        record: StudyRecord,
        findings: Sequence[Finding],
        evaluations: Sequence[Evaluation],
    ) -> None:
        self._grounds = grounds
        self._findings = {
            group.id: reason.code
            for group in grounds.groups
            if (reason := finding_of(group.id, findings, None if group.pin is None else group.pin.reason)) is not None
        }
        self._free = grounds.free
        self._errors = errors
        self._evaluated = record.evaluations()
        built = record.built_plans(self._free).thinned(_LEARNT_FROM)
        free = [group for group in grounds.groups if group.pin is None]
        self._to_blame, self._open = _of_no_sound_plan(record, free, errors, evaluations)
        self._latency: LatencyModel | None = None
        self._terms: Floats
        self._gains: dict[str, float] = {}
        self.gains_from: str | None = None
        self._base_ms = built.base_ms
        if grounds.prior is not None and math.isfinite(built.base_ms) and built.base_ms > 0:
            self._latency = LatencyModel(grounds.prior, built)
            self._terms = self._latency.mean()[None]
            self._gains = {g: _rounded(ms) for g, ms in zip(self._free, self._terms[0], strict=False)}
            builds = int(np.isfinite(built.latency_ms).sum())
            self.gains_from = "the roofline" if grounds.prior.exact else f"the roofline and {builds} builds"

    def of(self, evaluation: Evaluation) -> tuple[Kept, ...]:
        """The FP32 groups of a plan, each with its reason; the largest one-group error first, the unknown last."""
        saved = {group: _rounded(ms) for group, ms in self._saved(evaluation.plan).items()}
        tried = self._tried(evaluation.plan)
        kept = [
            self._kept(evaluation, group, saved.get(group.id), tried.get((group.id, group.reduced)))
            for group in self._grounds.groups
            if evaluation.plan.precision.get(group.id) is Precision.FP32
        ]
        errors = {group.group: -1.0 if group.one_group_error is None else group.one_group_error for group in kept}
        return tuple(sorted(kept, key=lambda group: -errors[group.group]))

    def _tried(self, plan: PrecisionPlan) -> dict[tuple[str, Precision], Evaluation]:
        """Group and precision -> what was evaluated that differs from a plan in nothing else."""
        own = plan.precision.items()
        others = [(e.plan.precision.items() - own, e) for e in self._evaluated]
        return {next(iter(changed)): e for changed, e in others if len(changed) == 1}

    def _saved(self, plan: PrecisionPlan | None) -> dict[str, float]:
        """Milliseconds that each FP32 group would save a plan, None for all-FP32, its Casts counted in."""
        if self._latency is None:
            return {}
        half = [plan is not None and plan.precision[group] is not Precision.FP32 for group in self._free]
        row = np.array([half], dtype=bool)
        flips = np.eye(len(self._free), dtype=bool)[~row[0]]
        latency = self._latency.predict(np.vstack([row, row | flips]), self._terms)[0]
        names = [group for group, is_half in zip(self._free, half, strict=True) if not is_half]
        return {g: float(latency[0] - ms) for g, ms in zip(names, latency[1:], strict=True)}

    def _kept(
        self, evaluation: Evaluation, group: GroupFacts, saves_ms: float | None, tried: Evaluation | None
    ) -> Kept:
        error = self._errors.get(group.id)
        reason, why = self._reason(evaluation, group, error, saves_ms, tried)
        code = None if reason is Reason.BOUNDARIES else self._findings.get(group.id)
        return Kept(group.id, group.name, reason, why, None if error is None else _rounded(error), saves_ms, code)

    def _reason(
        self,
        evaluation: Evaluation,
        group: GroupFacts,
        error: float | None,
        saves_ms: float | None,
        tried: Evaluation | None,
    ) -> tuple[Reason, str]:
        name = group.reduced.name
        if group.pin is not None:
            if group.pin.precision is not Precision.FP32:
                return Reason.UNKNOWN, "all-FP32 is the baseline, whatever is pinned"
            return Reason.BOUNDARIES if group.pin.reason in _WORTHLESS else Reason.PINNED, group.pin.reason
        if group.id in self._to_blame:
            return self._to_blame[group.id]
        gain = self._gains.get(group.id)
        if gain is not None and saves_ms is not None and gain <= 0 and saves_ms <= 0:
            return Reason.BOUNDARIES, f"{name} saves nothing in it"
        casts = ""
        if gain is not None and saves_ms is not None and saves_ms <= 0:
            casts = f"{name} would save {gain:.2g} ms, and the Casts for it cost {gain - saves_ms:.2g} ms"
        if error is not None and _raises(evaluation.error_value, error):
            return Reason.ERROR, f"kept for its error: {error:.1e} alone{_saving(saves_ms, name)}"
        if casts:
            return Reason.BOUNDARIES, casts
        if tried is not None and not faster_beyond_noise(tried, evaluation):
            return Reason.BOUNDARIES, f"this plan with it in {name} was evaluated, and was not faster beyond noise"
        if saves_ms is not None and saves_ms < LEAST_GAIN * self._base_ms:
            return Reason.BOUNDARIES, f"{name} would save {saves_ms:.2g} ms, too little to be timed"
        if tried is not None:
            error_then = f"the error of this plan is {tried.error_value:.1e}"
            return Reason.ERROR, f"with it in {name} {error_then}{_saving(saves_ms, name)}"
        if group.id in self._open:
            return self._open[group.id]
        if error is None or saves_ms is None:
            lacking = "one-group error" if error is None else "gain"
            return Reason.UNKNOWN, f"the search did not ask for its {lacking}"
        return Reason.UNTRIED, f"its error alone is {error:.1e}{_saving(saves_ms, name)}: a larger budget may try it"

    def worths(
        self, points: Sequence[Evaluation], chosen: Evaluation | None, kept: Mapping[str, Sequence[Kept]]
    ) -> tuple[GroupWorth, ...]:
        """All groups; first those that pay most, then those that gain nothing, overflow or are pinned."""
        gains, alone = self._gains, self._saved(None)
        reasons = {} if chosen is None else {k.group: k.reason for k in kept[chosen.plan.fingerprint]}
        worths = []
        for group in self._grounds.groups:
            error, gain = self._errors.get(group.id), gains.get(group.id, self._grounds.pinned_gains_ms.get(group.id))
            pays = error is not None and gain is not None and gain > 0 and math.isfinite(error)
            worths.append(
                GroupWorth(
                    group=group.id,
                    name=group.name,
                    kind=group.kind,
                    one_group_error=None if error is None else _rounded(error),
                    gain_ms=gain,
                    casts_ms=_rounded(max(0.0, gain - alone[group.id]))
                    if gain is not None and group.id in alone
                    else None,
                    error_per_ms=_rounded(error / gain) if pays and error is not None and gain is not None else None,
                    fp16_points=sum(p.plan.precision[group.id] is not Precision.FP32 for p in points),
                    points=len(points),
                    verdict=_verdict(group, chosen, reasons.get(group.id)),
                    is_pinned=group.pin is not None,
                    finding=self._findings.get(group.id),
                )
            )
        return tuple(sorted(worths, key=self._rank))

    def _rank(self, worth: GroupWorth) -> tuple[int, float]:
        if worth.error_per_ms is not None and worth.group not in self._to_blame:
            return 0, worth.error_per_ms
        last = 3 if worth.is_pinned else 2 if worth.group in self._to_blame else 1
        return last, 0.0 if worth.one_group_error is None else worth.one_group_error


def _raises(error: float, one_group_error: float) -> bool:
    """Whether a group would raise the error of a plan so that it counts, by the law of squares."""
    before = max(error, ERROR_FLOOR)
    return not math.hypot(before, one_group_error) < (1 + LEAST_RISE) * before


def _saving(saves_ms: float | None, name: str) -> str:
    return f", and {name} would save {saves_ms:.2g} ms" if saves_ms is not None and saves_ms > 0 else ""


def _verdict(group: GroupFacts, chosen: Evaluation | None, reason: Reason | None) -> str:
    if group.pin is not None:
        return f"pinned to {str(group.pin.precision).upper()}"
    if chosen is None:
        return "no plan is chosen"
    return chosen.plan.precision[group.id].name if reason is None else f"FP32: {reason.value}"


def _of_no_sound_plan(
    record: StudyRecord,
    groups: Sequence[GroupFacts],
    errors: Mapping[str, float],
    evaluations: Sequence[Evaluation],
) -> tuple[dict[str, tuple[Reason, str]], dict[str, tuple[Reason, str]]]:
    """Groups that are to blame, each with why it is FP32; and those of which that is open.

    To blame is a group that breaks a plan whose other groups are all in sound plans, too. A plan that gave no outputs
    shows a failure, and no overflow.
    """
    failures = record.failures()
    silent = [frozenset(plan.reduced_groups) for plan, _, _ in failures]
    broken = silent + [frozenset(e.plan.reduced_groups) for e in record.evaluations() if not e.is_finite]
    sound = frozenset(group for e in record.evaluations() if e.is_finite for group in e.plan.reduced_groups)
    broken_held_out, sound_held_out = _held_out(record, evaluations)
    to_blame: dict[str, tuple[Reason, str]] = {}
    open_: dict[str, tuple[Reason, str]] = {}
    for group in groups:
        name, reason = group.reduced.name, Reason.ERROR
        plans, rest = (broken_held_out, sound_held_out) if group.id in sound else (broken, sound)
        holding = [reduced for reduced in plans if group.id in reduced]
        is_to_blame = any(reduced - rest == {group.id} for reduced in holding)
        is_silent = bool(holding) and all(reduced in silent for reduced in holding)
        counted = f"{_all_plans(len(holding))} with it in {name}"
        if group.id in sound:
            if not holding or group.id in sound_held_out:
                continue
            text = f"{counted} that met the held-out samples gave NaN or Inf there"
        elif math.isinf(errors.get(group.id, 0.0)) and not (is_silent and is_to_blame):
            is_to_blame, text = True, f"alone in {name} its outputs are NaN or Inf"
        elif holding:
            reason = Reason.FAILED if is_silent else Reason.ERROR
            text = f"{counted} gave no {'' if is_silent else 'finite '}outputs{_first_cause(group, failures)}"
        else:
            continue
        if is_to_blame:
            to_blame[group.id] = reason, text
        else:
            open_[group.id] = Reason.FAILED, f"{text}; {_OPEN}"
    return to_blame, open_


def _held_out(record: StudyRecord, evaluations: Sequence[Evaluation]) -> tuple[list[frozenset[str]], frozenset[str]]:
    """The reduced groups of each plan that was not finite on the held-out samples, and of all plans that were."""
    dropped = dropped_plans(record, evaluations[0].ignored if evaluations else ())
    met = [e for e in evaluations if e.held_out is not None and e.is_finite and e.plan.fingerprint not in dropped]
    every = {e.plan.fingerprint: e.plan for e in record.evaluations() if e.plan.fingerprint in dropped}
    broken = [frozenset(plan.reduced_groups) for plan in every.values()]
    return broken, frozenset(group for e in met for group in e.plan.reduced_groups)


def _all_plans(count: int) -> str:
    return {1: "the one plan", 2: "both plans"}.get(count, f"all {count} plans")


def _first_cause(group: GroupFacts, failures: Sequence[tuple[PrecisionPlan, Origin, Failure]]) -> str:
    """How the first plan with a group in its reduced precision failed, in brackets; empty where none did."""
    first = next((f for plan, _, f in failures if plan.precision.get(group.id) is group.reduced), None)
    return "" if first is None else f" ({cut(' '.join(describe(first).split()), _LONGEST_CAUSE)})"


def _rounded(value: float) -> float:
    """Digits that mean something, so that a last bit of the arithmetic changes no file."""
    return float(f"{value:.{_DIGITS}g}")
