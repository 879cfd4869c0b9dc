"""Which finding says why a layer group stays in FP32, and those that large one-group errors give rise to.

A group that normalises vectors is right in FP16 by itself; where one less their cosine follows, its last digits are all
that is left. A finding about the subtraction says nothing of that group; its one-group error does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.finding import BREAKING_CODES, PINNING_CODES, Finding, FindingOrigin, Where
from mptune.findings.wording import SEVERITIES
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.texts import error_outcome

if TYPE_CHECKING:
    from mptune.engines.context import RunContext
    from mptune.graph.grouping.grouped import GroupedModel
    from mptune.graph.hazards.hazard import Hazard

LARGE_FROM = 0.1
"""An error from here on, in standard deviations of the outputs, is no rounding that a user would take."""


def breaks(finding: Finding) -> bool:
    """Whether a finding is about what FP16 breaks: not a mask that is held as the largest finite value, and masks."""
    is_held_mask = finding.code == "mask" and "held_as" in finding.evidence
    return finding.code in BREAKING_CODES and not is_held_mask


def finding_of(group: str, findings: Iterable[Finding], pin_reason: str | None = None) -> Finding | None:
    """The finding that is a reason to keep a group in FP32; the one with the words of its pin, if any, first."""
    codes = BREAKING_CODES if pin_reason is None else PINNING_CODES
    there = [finding for finding in findings if group in finding.where.groups and finding.code in codes]
    reasons = [finding for finding in there if breaks(finding) or finding.code not in BREAKING_CODES]
    if not reasons:
        return None
    return min(reasons, key=lambda finding: (not _says(finding, pin_reason), codes.index(finding.code)))


def in_order(findings: Iterable[Finding], errors: Mapping[str, float]) -> tuple[Finding, ...]:
    """The most severe first; of these what breaks, the largest one-group error first; then the rest, as it comes.

    A group without a one-group error, as one that is pinned because it breaks, comes before the others, by the plainest
    of its findings. What one group has stays in the order of the graph: what goes wrong first is why the rest does.
    """
    listed = list(findings)
    plainest: dict[str, int] = {}
    for finding in filter(breaks, listed):
        for group in finding.where.groups:
            plainest[group] = min(plainest.get(group, len(BREAKING_CODES)), BREAKING_CODES.index(finding.code))

    def rank(finding: Finding) -> tuple[int, bool, float, int]:
        severity, groups = SEVERITIES.index(finding.severity), finding.where.groups
        if not (breaks(finding) and finding.is_about_model):
            return severity, True, 0.0, 0
        error = max((errors.get(group, math.inf) for group in groups), default=math.inf)
        return severity, False, -error, min((plainest[group] for group in groups), default=0)

    return tuple(sorted(listed, key=rank))


def _says(finding: Finding, pin_reason: str | None) -> bool:
    """Whether a pin's reason, ``tensor: what was seen of it``, is the finding's text."""
    return pin_reason is not None and any(
        finding.text.endswith(pin_reason.removeprefix(tensor))
        for tensor in finding.where.tensors
        if pin_reason.startswith(f"{tensor}: ")
    )


_SHOW_IT = frozenset({"relative_error", "share", "lost"})
"""Evidence of findings that shows what rounding the operands of their nodes does."""
_ENLARGING = frozenset({"cancellation", "spacing", "index-in-float", "vanishing-values"})


def with_reasons(
    context: RunContext,
    findings: Sequence[Finding],
    hazards: Sequence[Hazard],
    metric: str,
    fp32: Evaluation | None = None,
    origin: FindingOrigin = "search",
) -> tuple[Finding, ...]:
    """The findings, and those that say why groups without one have a large one-group error.

    Values of such a group that are too small for FP16, which by themselves are no finding; else the place further on
    that enlarges its rounding. An error that all-FP32 has too, as with an engine that is wrong, is not FP16's doing.
    """
    # Imports what runs models, which reports of these findings do without.
    from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, Sensitivity

    grouped = context.grouped
    errors = Sensitivity.load(context.data_dir / SENSITIVITY_JSON, metric).errors
    least = LARGE_FROM if fp32 is None else max(LARGE_FROM, 2.0 * fp32.judged_error)
    threshold = least if metric in ADD_IN_SQUARES else math.inf
    large = [
        group
        for group in grouped.groups
        if errors.get(group.id, 0.0) >= threshold and finding_of(group.id, findings) is None
    ]
    places: dict[str, Finding] = {}
    for finding in findings:
        shows = finding.code in _ENLARGING and not _SHOW_IT.isdisjoint(finding.evidence)
        if shows and not finding.is_of_bf16_alone:
            for node in finding.where.nodes:
                places.setdefault(node, finding)
    reached: dict[str, list[str]] = {}
    vanished: list[Finding] = []
    for group in large:
        small = next((hazard for hazard in hazards if hazard.place.group == group.id and _is_small(hazard)), None)
        if small is not None:
            vanished.append(_underflow(small, errors[group.id], origin))
            continue
        place = _first_place(grouped, group.nodes, places)
        if place is not None:
            reached.setdefault(place, []).append(group.id)
    return (
        *findings,
        *vanished,
        *(_finding(grouped, name, places[name], groups, errors, origin) for name, groups in reached.items()),
    )


def _is_small(hazard: Hazard) -> bool:
    is_small = hazard.wording == "weights" or hazard.wording.startswith("underflow")
    return is_small and hazard.severity == "warning"


def _underflow(hazard: Hazard, error: float, origin: FindingOrigin) -> Finding:
    """A hazard that is none of the findings by itself, as one."""
    from mptune.graph.hazards.hazard import as_finding  # not where a run is read

    evidence, words = {"one_group_error": error, "largest": hazard.value}, {**hazard.evidence, **hazard.words}
    wording = "weights matter" if hazard.wording == "weights" else hazard.wording
    return as_finding([replace(hazard, wording=wording, evidence=evidence, words=words)], origin)


def _first_place(grouped: GroupedModel, start: Sequence[str], places: Mapping[str, Finding]) -> str | None:
    """The first node along the graph that a finding is about and that results of some nodes come to."""
    model = grouped.model
    own = set(start)
    reached = {out for node in model.nodes if node.name in own for out in node.outputs if out}
    for node in model.nodes:  # in topological order
        if node.name not in own and reached.intersection(node.inputs):
            if node.name in places:
                return node.name
            reached.update(out for out in node.outputs if out)
    return None


def _finding(
    grouped: GroupedModel,
    name: str,
    place: Finding,
    groups: Sequence[str],
    errors: Mapping[str, float],
    origin: FindingOrigin,
) -> Finding:
    operator = next(node.op_type for node in grouped.model.nodes if node.name == name)
    worst = max(groups, key=lambda group: errors[group])
    return Finding.of(
        place.code,
        origin,
        Where(nodes=(name,), groups=tuple(groups), tensors=place.where.tensors, samples=place.where.samples),
        {"one_group_error": errors[worst]},
        kind="downstream",
        operator=operator,
        groups=", ".join(groups),
        worst=worst,
        outcome=error_outcome(errors[worst]),
    )
