"""Why groups stay FP32 in each plan of a front, and what every group costs and gains, from a run directory alone.

A reason is a marginal one: what would change if this one group of this one plan became FP16 as well, by the additive
model with the terms fitted to all builds (``mptune.tuning.sampler``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mptune.files import READ_ERRORS, read_json, write_json
from mptune.finding import Finding
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm, encode
from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.trials import Prior
from mptune.tuning.space import SearchSpace

LEAST_GAIN = 5e-4  # share of the base latency: what a group saves below it cannot be timed
LEAST_RISE = 1e-2  # a group that raises the error of a plan by a smaller share costs it nothing that counts
_LEARNT_FROM = 300  # evaluations teach the gains all there is to learn; the cost of learning is cubic
EXPLAIN_JSON = "explain.json"  # in the run's data directory

Reason = Literal["finding", "no-kernel", "error", "casts", "not-tried"]
"""Why a group is FP32: a finding pins it; the engine has no kernel; its error; FP16 saves nothing beyond its Casts; or
none of these, as where the search space pins it."""


@dataclass(frozen=True)
class GroupWorth(JsonForm):
    """What one group costs and gains in FP16, whatever the plan; what is not known is None.

    Attributes:
        one_group_error: the objective error with this group alone in FP16; ``inf`` where that is not finite.
        gain_ms: what it takes less in FP16, its Casts not counted.
        casts_ms: what the Casts around it cost while all its neighbours are FP32.
        fp16_points: in how many points of the front it is FP16 or BF16.
        pinned: why its precision is not searched; None where it is.
        finding: code of the finding that pins it, or else of the first one about its values.
        culprit: which of its nodes makes the error, and how much of it, in words; None where that was not measured.
    """

    group: str
    name: str
    kind: str
    one_group_error: float | None = None
    gain_ms: float | None = None
    casts_ms: float | None = None
    fp16_points: int = 0
    pinned: str | None = None
    finding: str | None = None
    culprit: str | None = None


@dataclass(frozen=True)
class Kept:
    """A group that a plan keeps in FP32, why, and what FP16 there would save this plan, the Casts counted in."""

    worth: GroupWorth
    reason: Reason
    saves_ms: float | None = None

    @property
    def finding(self) -> str | None:
        """The code of the finding that pins it, or that is about its values where its error is the reason."""
        return None if self.reason in ("casts", "not-tried") else self.worth.finding

    @property
    def word(self) -> str:
        """Why it is FP32, in a word: the code of its finding, else the reason."""
        return self.finding or self.reason

    @property
    def because(self) -> str:
        """Why it is FP32 with the figures, one line, as every view says it."""
        error, figures = self.worth.one_group_error, [self.worth.pinned] if self.worth.pinned else []
        if error is not None:
            figures.append(f"{error:.1e} alone" if math.isfinite(error) else "NaN or Inf alone")
        if self.worth.culprit is not None and self.reason == "error":
            figures.append(self.worth.culprit)
        if self.saves_ms is not None:
            figures.append(f"would {'save' if self.saves_ms >= 0 else 'cost'} {abs(self.saves_ms):.2g} ms")
        return f"{self.word}: {', '.join(figures)}" if figures else self.word

    def to_json(self) -> dict[str, Any]:
        """As front.json lists it, without figures."""
        return {"group": self.worth.group, "reason": self.reason, "finding": self.finding}


@dataclass(frozen=True)
class Explanation:
    """Why the plans of a front are what they are. Empty where the run holds nothing to explain them with.

    Attributes:
        by_plan: plan fingerprint -> its FP32 groups, the largest one-group error first, those without one last.
        groups: all layer groups, by error per millisecond gained; those that gain nothing, and pinned ones, last.
        gains_from: where the gains come from, such as ``the roofline and 48 builds``; None where they are not known.
    """

    by_plan: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    groups: tuple[GroupWorth, ...] = ()
    gains_from: str | None = None

    def fp32_groups(self, fingerprint: str) -> tuple[Kept, ...]:
        """The FP32 groups of a plan; empty where nothing is known of it."""
        return self.by_plan.get(fingerprint, ())

    def to_json(self, metric: str) -> dict[str, Any]:
        """What ``mptune report RUN --explain --json`` prints; the metric is what the errors are."""
        plans = {
            plan: [{**k.to_json(), "one_group_error": k.worth.one_group_error, "saves_ms": k.saves_ms} for k in groups]
            for plan, groups in self.by_plan.items()
        }
        document = {"format": 1, "metric": metric, "gains_from": self.gains_from, "groups": self.groups, "plans": plans}
        encoded: dict[str, Any] = encode(document)
        return encoded


_IN_WORDS = {"error": "for {its} error", "casts": "for the cost of Casts", "not-tried": "not tried"}
"""Reasons in a sentence; a finding or a missing kernel is named by its code."""


def reasons_text(groups: Iterable[Kept]) -> str:
    """FP32 groups by finding or reason in words, such as ``25 for their error, 4 for the cost of Casts``."""
    counts = Counter(group.word for group in groups)
    return ", ".join(
        f"{count} {_IN_WORDS.get(word, f'for {word}').format(its='its' if count == 1 else 'their')}"
        for word, count in counts.items()
    )


def reason_counts(groups: Iterable[Kept], most: int | None = None) -> str:
    """FP32 groups by finding or reason, such as ``2 overflow, 12 error, 1 more``; at most ``most`` words are listed."""
    counts = list(Counter(group.word for group in groups).items())
    parts = [f"{count} {word}" for word, count in counts[:most]]
    rest = 0 if most is None else sum(count for _, count in counts[most:])
    return ", ".join([*parts, f"{rest} more"] if rest else parts)


@dataclass(frozen=True)
class Grounds(JsonForm):
    """All layer groups without figures, in the order of the model; gains and boundary costs before any build."""

    groups: tuple[GroupWorth, ...] = ()
    prior: Prior | None = None

    @classmethod
    def from_space(cls, space: SearchSpace, prior: Prior | None) -> Grounds:
        """The grounds of a space, without one-group errors, which belong to the sensitivity."""
        groups = []
        for group in space.groups:
            pin = space.pinned.get(group.id)
            reason, code = (None, None) if pin is None else (pin.reason, pin.finding)
            groups.append(GroupWorth(group.id, group.name, group.kind, pinned=reason, finding=code))
        if prior is None or prior.gains_ms is None:
            return cls(tuple(groups))
        return cls(tuple(groups), replace(prior, log_square_errors=None, log_square_sds=None, part_shares=None))

    @classmethod
    def load(cls, path: Path) -> Grounds:
        """Read what ``keep_grounds`` wrote; empty where there is nothing that can be read."""
        try:
            return cls.from_json(read_json(path))
        except READ_ERRORS:
            return cls()


def keep_grounds(space: SearchSpace, prior: Prior | None, data_dir: Path) -> None:
    """Store what later explanations need; terms that are there already stay where ``prior`` brings none."""
    before, now = Grounds.load(data_dir / EXPLAIN_JSON), Grounds.from_space(space, prior)
    if now.prior is None and before.prior is not None and before.prior.groups == space.free:
        now = replace(now, prior=before.prior)
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
    from mptune.graph.groups import FOLDED  # These import ONNX, which views do without.
    from mptune.tuning.knowledge import SENSITIVITY_JSON, Sensitivity
    from mptune.tuning.refining import Culprits

    grounds = Grounds.load(data_dir / EXPLAIN_JSON)
    groups, free = grounds.groups, [group.group for group in grounds.groups if group.pinned is None]
    if not groups or any(e.plan.precision.keys() != {g.group for g in groups} for e in points):
        return Explanation()
    plans = {e.plan.fingerprint: e for e in (*points, *others)}

    # One-group errors of the metric, or else in relative L2.
    ignored = next((e.ignored for e in plans.values()), ())
    stored = (Sensitivity.load(data_dir / SENSITIVITY_JSON, metric) for metric in (record.metric, "relative_l2"))
    usable: Mapping[str, float] = next((each.ignoring(ignored).errors for each in stored if each.errors), {})
    errors = {group: error for group, error in usable.items() if not math.isnan(error)}

    # Gains and costs of boundaries, fitted to all builds: what each group would save that a plan has in FP32.
    source, latency, terms, gains_ms = None, None, np.empty(0), dict[str, float]()
    built = record.built_plans(free).thinned(_LEARNT_FROM)
    if grounds.prior is not None and math.isfinite(built.base_ms) and built.base_ms > 0:
        with suppress(*READ_ERRORS):  # the terms of a damaged file may not fit the groups, nor one another
            latency = LatencyModel(grounds.prior, built)
    if grounds.prior is not None and latency is not None:
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
    alone_ms, blamed = saved_ms(()), Culprits.load(data_dir).by_group
    worths = []
    for group in groups:
        gain_ms, culprit = gains_ms.get(group.group), blamed.get(group.group)
        code = codes.get(group.group, culprit.code if culprit else None)
        worth = replace(
            group,
            one_group_error=errors.get(group.group),
            gain_ms=gain_ms,
            casts_ms=None if gain_ms is None else max(0.0, gain_ms - alone_ms[group.group]),
            fp16_points=sum(p.plan.precision[group.group] is not Precision.FP32 for p in points),
            finding=code if group.pinned is None else group.finding,
            culprit=culprit.text if culprit else None,
        )
        worths.append(worth)

    def reason(worth: GroupWorth, saves_ms: float | None, plan_error: float) -> Reason:
        if worth.pinned is not None:
            if worth.finding is None:
                return "casts" if worth.pinned == FOLDED else "not-tried"
            return "no-kernel" if worth.finding.endswith("-kernel") else "finding"
        error = worth.one_group_error
        raises = error is not None and not math.hypot(plan_error, error) < (1 + LEAST_RISE) * plan_error
        # Casts that do not pay may be there only because of the neighbours' errors: then its own error is why.
        is_gain = saves_ms is None or saves_ms >= LEAST_GAIN * built.base_ms
        if not is_gain and (not raises or (worth.gain_ms or 0.0) <= 0):
            return "casts"
        return "error" if raises else "not-tried"

    by_plan: dict[str, tuple[Kept, ...]] = {}
    for name, evaluation in plans.items():
        saves, error = saved_ms(evaluation.plan.reduced_groups), max(evaluation.error_value, ERROR_FLOOR)
        fp32 = [w for w in worths if evaluation.plan.precision[w.group] is Precision.FP32]
        fp32.sort(key=lambda w: (w.one_group_error is None, -(w.one_group_error or 0.0)))
        by_plan[name] = tuple(Kept(w, reason(w, saves.get(w.group), error), saves.get(w.group)) for w in fp32)

    def rank(worth: GroupWorth) -> tuple[int, float]:
        """First what pays most, then what gains nothing or overflows, then what is pinned."""
        error, gain = worth.one_group_error, worth.gain_ms
        if error is not None and math.isfinite(error) and gain is not None and gain > 0:
            return 0, error / gain
        return 2 if worth.pinned is not None else 1, error or 0.0

    return Explanation(by_plan, tuple(sorted(worths, key=rank)), source)
