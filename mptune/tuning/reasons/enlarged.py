"""Why groups have a large one-group error that no finding explains: values that vanish, or a place further on.

A group that normalises vectors is right in FP16 by itself; where one less their cosine follows, its last digits are all
that is left. A finding about the subtraction says nothing of that group; its one-group error does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.workload import Workload
from mptune.finding import Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.hazard import Hazard
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.limits import error_outcome
from mptune.tuning.reasons.group_findings import LARGE_FROM, finding_of
from mptune.tuning.steps.sensitivity import SENSITIVITY_JSON, Sensitivity

_VANISHING = "vanishing-epsilon"
_SHOW_IT = frozenset({"relative_error", "share", "lost"})
"""Evidence of findings that shows what rounding the operands of their nodes does."""
_ENLARGING = frozenset({"cancellation", "spacing", "index-in-float", _VANISHING})


def with_reasons(
    workload: Workload,
    findings: Sequence[Finding],
    hazards: Sequence[Hazard],
    metric: str,
    fp32: Evaluation | None = None,
    origin: FindingOrigin = "search",
) -> tuple[Finding, ...]:
    """The findings, and those that say why groups without one have a large one-group error.

    Values of such a group that are too small for FP16; else the place further on that enlarges its rounding.

    Args:
        hazards: of the model; those of small values are none of the findings, as most do no harm.
        metric: what the errors are.
        fp32: all-FP32: what that has too, as with an engine that is wrong, is not FP16's doing.
    """
    grouped = workload.grouped
    errors = Sensitivity.load(workload.workspace.data_dir / SENSITIVITY_JSON, metric).errors
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
        small = next((hazard for hazard in hazards if hazard.group == group.id and _is_small(hazard)), None)
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
    return hazard.code is None and hazard.kind in ("underflow", "vanishing") and hazard.severity == "warning"


def _underflow(hazard: Hazard, error: float, origin: FindingOrigin) -> Finding:
    """A hazard that is none of the findings by itself, as one."""
    evidence, names = {"one_group_error": error, "largest": hazard.value}, {**hazard.evidence, **hazard.names}
    wording = "weights matter" if hazard.kind == "vanishing" else hazard.wording
    return Hazard.finding([replace(hazard, wording=wording, evidence=evidence, names=names)], origin)


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
