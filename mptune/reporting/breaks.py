"""What breaks in FP16, and why: the findings about values that FP16 cannot hold, with what plain FP16 makes of them.

What only BF16 has too few digits for is shown where the chosen plan has BF16, or where nothing is FP16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.finding import RANGE_CODES, Finding, Where, plain_outcome
from mptune.findings.wording import AT, fill
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.reporting.text import reduced_names
from mptune.tuning.front import Front, front_rows
from mptune.tuning.fronts.texts import error_outcome, error_text
from mptune.tuning.reasons.group_findings import LARGE_FROM, breaks

_NAMED = 3
NOT_FINITE, LARGE_ERROR = "not finite", "large error"
"""What a place is called that no finding is about."""


@dataclass(frozen=True)
class Break:
    """A place where plain FP16 goes wrong.

    Attributes:
        code: of the finding; ``NOT_FINITE`` or ``LARGE_ERROR`` where no finding says why.
        seen: what was seen, with the value and the sample.
        plain: what an engine built with plain FP16 gives there.
        kept: whether the chosen plan keeps all these groups in FP32; None where no plan is chosen.
        others: so many further values of the same groups have the same code.
        held: the precisions of these groups in the chosen plan that say so.
        precision: that plain engines are built with.
    """

    code: str
    place: Where
    seen: str
    plain: str
    kept: bool | None
    others: int = 0
    held: str = ""
    precision: Precision = Precision.FP16

    @property
    def where(self) -> str:
        """Group, node and value, one line."""
        parts = (("", self.place.groups), ("node ", self.place.nodes), ("value ", self.place.tensors))
        return ", ".join(what + ", ".join(names) for what, names in parts if names) or "no single group"

    @property
    def outcome(self) -> str:
        """What plain FP16, or BF16, gives, and what the chosen plan does about it."""
        verbs = {None: "", True: "the chosen plan keeps it in ", False: "the chosen plan has it in "}
        name = self.precision.name
        kept = verbs[self.kept] + (self.held or ("FP32" if self.kept else name) if self.kept is not None else "")
        return f"plain {name}: {self.plain}{'; ' if kept else ''}{kept}"


def heading(front: Front) -> str:
    """Above what breaks: FP16, or BF16 where that alone breaks something, or no plan has FP16 and nothing breaks."""
    broken = {place.precision for place in breaks_in_fp16(front)}
    name = (Precision.FP16 if Precision.FP16 in broken else Precision.BF16).name if broken else _first_name(front)
    return f"What breaks in {name}, and why"


def _first_name(front: Front) -> str:
    return reduced_names(row.evaluation.plan for row in front_rows(front)).partition(" ")[0]


def breaks_in_fp16(front: Front) -> tuple[Break, ...]:
    """What breaks in FP16; one entry for all values of the same groups with the same code.

    Groups that the chosen plan has in FP16 come first; otherwise in the order of the front's findings.
    """
    plan = None if front.chosen is None else front.chosen.plan
    without_fp16 = front.fp16 is not None and not front.fp16.plan.fp16_groups
    in_bf16 = set(plan.bf16_groups) if plan is not None else set()
    merged: dict[tuple[str, bool, tuple[str, ...]], list[Finding]] = {}
    for finding in front.findings:
        is_shown = not finding.is_of_bf16_alone or without_fp16 or not in_bf16.isdisjoint(finding.where.groups)
        if breaks(finding) and finding.is_about_model and is_shown:
            key = finding.code, finding.is_of_bf16_alone, tuple(sorted(finding.where.groups))
            merged.setdefault(key, []).append(finding)
    places = [_of_findings(findings, plan) for findings in merged.values()]
    places.sort(key=lambda place: place.kept is True)
    explained = {group for place in places for group in place.place.groups}
    return (*places, *_unexplained(front, explained))


def _of_findings(findings: list[Finding], plan: PrecisionPlan | None) -> Break:
    worst = max(findings, key=lambda finding: ("lost" in finding.evidence, _size(finding)))  # not finite, before all
    if worst.code == "overflow":  # what overflows first is why the rest does; a constant is held, and does not
        worst = min(findings, key=lambda finding: "held_as" in finding.evidence)
    kept, held = _held(worst, plan)
    precision = Precision.BF16 if worst.is_of_bf16_alone else Precision.FP16
    others = len(findings) - 1
    return Break(worst.code, worst.where, _seen(worst), plain_fp16(worst), kept, others, held, precision)


def _held(finding: Finding, plan: PrecisionPlan | None) -> tuple[bool | None, str]:
    """Whether a plan has all its groups where a finding does no harm, and the precisions that say so."""
    groups = finding.where.groups
    if plan is None or not groups:
        return None, ""
    harmless = {Precision.FP32}
    if finding.code in RANGE_CODES:
        harmless.add(Precision.BF16)
    if finding.is_of_bf16_alone:
        harmless.add(Precision.FP16)
    there = dict.fromkeys(plan.precision.get(group, Precision.FP32) for group in groups)
    kept = all(precision in harmless for precision in there)
    return kept, " and ".join(precision.name for precision in there if kept or precision not in harmless)


def _unexplained(front: Front, explained: set[str]) -> list[Break]:
    """Groups that alone in FP16 give NaN, Inf or a large error, without a finding that says why; the worst first.

    Where the one-group errors are not known, or are small, it is the plan with all of them that gives it.
    """
    kept = () if front.chosen is None else front.chosen.plan.fp32_groups
    # What all-FP32 has too, as with an engine that is wrong, is not FP16's doing.
    threshold = max(LARGE_FROM, 2.0 * front.fp32.judged_error) if front.metric in ADD_IN_SQUARES else math.inf
    worst = sorted(
        (worth for worth in front.explanation.groups if (worth.one_group_error or 0.0) >= threshold),
        key=lambda worth: -(worth.one_group_error or 0.0),
    )
    name = _first_name(front)
    places = [
        Break(
            NOT_FINITE if worth.one_group_error == math.inf else LARGE_ERROR,
            Where((worth.name,), (worth.group,)),
            "no finding says why",
            f"{error_outcome(worth.one_group_error or 0.0)} in the outputs, with this group alone in {name}",
            None if front.chosen is None else worth.group in kept,
            precision=Precision.named(name.lower()),
        )
        for worth in worst
        if worth.group not in explained
    ]
    fp16 = front.fp16
    if worst or fp16 is None or explained.intersection(fp16.plan.reduced_groups):
        return places
    if not fp16.is_finite or max(fp16.judged_error, fp16.error_value) >= threshold:
        what = f"an error of {error_text(fp16)}" if fp16.is_finite else "NaN or Inf"
        kind = LARGE_ERROR if fp16.is_finite else NOT_FINITE
        why = f"no finding says why; `mptune inspect {front.model_path} --data PATH` shows what its values are"
        plain = f"{what} in the outputs of {front.fp16_name}"
        groups = fp16.plan.reduced_groups
        where = Where(groups=groups if len(groups) <= _NAMED else ())
        places.append(Break(kind, where, why, plain, None, precision=Precision.named(name.lower())))
    return places


def plain_fp16(finding: Finding) -> str:
    """What an engine that computes this place in FP16 gives there, as far as the evidence shows it."""
    evidence = finding.evidence
    if "one_group_error" in evidence:
        return f"{error_outcome(float(evidence['one_group_error']))} in the outputs, with such a group alone in FP16"
    return plain_outcome(finding.code, evidence, is_of_bf16_alone=finding.is_of_bf16_alone)


def _size(finding: Finding) -> float:
    """How large a finding is among those of its code and its groups."""
    names = ("absmax", "masked_rows", "share", "factor", "largest")
    return max((float(finding.evidence[name]) for name in names if name in finding.evidence), default=0.0)


def _seen(finding: Finding) -> str:
    """The finding's text without the place that it begins with."""
    for tensor in finding.where.tensors:
        for node in (*finding.where.nodes, None):
            text = finding.text.removeprefix(fill(AT, {"tensor": tensor, "node": node}))
            if text != finding.text:
                return text
    return finding.text
