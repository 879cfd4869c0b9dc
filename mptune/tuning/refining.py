"""Layer groups refined by measurement: what makes the error of a group is parted from what FP16 speeds up.

A group shares a precision because an engine runs it as one kernel. Where its error comes from one part of it, and the
time is saved by another, no plan of whole groups has both. Which part makes the error is measured: the indivisible
units of a group are emulated in FP16 one by one. No engine is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import READ_ERRORS, read_json, write_json
from mptune.finding import Finding
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.find import blame, nodes_beyond
from mptune.graph.hazards.hazard import Hazard, ObservedValues, hazard_findings
from mptune.graph.ops import HEAVY, operator
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.settings import SearchSettings
from mptune.tuning.knowledge import SENSITIVITY_JSON, Sensitivity
from mptune.tuning.plan_limits import aimed_error, searched_error

_SAMPLES = 2
"""Samples that errors are taken on."""

_LEAST_GAIN = 0.01
"""Share of all-FP32's latency that a group saves in FP16, at least, to be refined."""

_BLAMED_ERROR, _MOST_BLAMED, _BLAMED_SHARE = 0.1, 12, 0.5
"""Share of the limit above which it is measured which node makes a group's error; groups at most; and share of that
error from which on the node's values say why."""

CULPRITS_JSON = "culprits.json"
"""Name of the file in the run's data directory."""

_LARGE_ERROR = 1.0 / 3.0
"""Share of the limit above which a group is refined; and of a group's error, what may be left once it is parted."""


@dataclass(frozen=True)
class Unit:
    """Nodes of one group that are never separated.

    Attributes:
        id: of a group that has these nodes alone.
        group: id of the group.
        nodes: their names, in topological order.
        is_heavy: whether a convolution, a product, or another operator that takes time is among them.
        error: of the outputs with these nodes alone in FP16; ``inf`` where they are not finite.
    """

    id: str
    group: str
    nodes: tuple[str, ...]
    is_heavy: bool
    error: float = 0.0


@dataclass(frozen=True)
class RefinedGroup(JsonForm):
    """A group that was parted.

    Attributes:
        group: its id, which the rest keeps.
        nodes: those that have a group of their own now, in topological order.
        error: with the whole group in FP16; ``inf`` where outputs are not finite, or where values are beyond FP16.
        rest_error: with the rest of it in FP16.
    """

    group: str
    nodes: tuple[str, ...]
    error: float
    rest_error: float

    def text(self, name: str) -> str:
        """One line; ``name`` is the group's."""
        nodes = ", ".join(self.nodes[:3]) + (f" and {len(self.nodes) - 3} more" if len(self.nodes) > 3 else "")
        is_finite = math.isfinite(self.error)
        whole = f"its error is {self.error:.2g}" if is_finite else "it holds values that are not finite"
        return f"{name} is split: in FP16 {whole}, without {nodes} its error is {self.rest_error:.2g}"


def refine(
    toolchain: Toolchain,
    grouped: GroupedModel,
    hazards: Sequence[Hazard],
    settings: SearchSettings,
    stage: Callable[[str], object],
) -> tuple[RefinedGroup, ...]:
    """The groups to part, and where: ``mptune.graph.groups.set_apart`` does it.

    A group is refined that holds something heavy beside something that is not, and could save ``_LEAST_GAIN``, if it
    has values beyond FP16, or if its error alone is above ``_LARGE_ERROR`` of the limit that the search aims at.
    Requires that values were observed. Nothing is refined where emulation fails.
    """
    limit, free = aimed_error(settings), {group.id for group in grouped.groups if group.pinned is None}
    # Those that hold something heavy beside something that is not.
    units = {g: each for g, each in _all_units(grouped).items() if g in free and len({u.is_heavy for u in each}) == 2}
    if not units or str(Precision.FP16) not in settings.precisions:
        return ()
    terms = toolchain.latency_terms()
    if isinstance(terms, Failure):
        return ()
    beyond, ruled_out = nodes_beyond(grouped, hazards)
    least_ms = _LEAST_GAIN * terms.base_ms
    units = {
        group: parts
        for group, parts in units.items()
        if group not in ruled_out and terms.gain_ms(group, Precision.FP16) > least_ms
    }
    errors = {grouped.owners[node]: math.inf for node in beyond}
    if limit is None:
        units = {group: parts for group, parts in units.items() if group in errors}
    if units:
        stage(f"emulating {len(units)} group{'s' if len(units) > 1 else ''} that may be refined")
    split = _apart(grouped, units)
    if limit is not None:
        unknown = {group: parts for group, parts in units.items() if group not in errors}
        errors |= _large_errors(toolchain, split, unknown, _LARGE_ERROR * limit, settings)
    units = {group: parts for group, parts in units.items() if group in errors}
    if not units:
        return ()
    measured = _culprits(toolchain, split, units, settings)

    # Of what is not heavy the largest errors go, until the rest is small.
    most = math.inf if limit is None else _LARGE_ERROR * limit
    rests: dict[str, list[Unit]] = {}
    for group, parts in measured.items():
        rest = [unit for unit in parts if beyond.isdisjoint(unit.nodes)]
        for unit in [unit for unit in rest if not unit.is_heavy]:
            if math.hypot(*(left.error for left in rest)) <= most:
                break
            rest.remove(unit)
        if len(rest) < len(parts) and any(unit.is_heavy for unit in rest):
            rests[group] = rest
    rest_errors = _errors(toolchain, split, list(rests.values()), settings)
    order = {node.name: node.index for node in grouped.model.nodes}
    refined = []
    for (group, rest), rest_error in zip(rests.items(), rest_errors, strict=False):
        if math.isfinite(rest_error) and rest_error <= _LARGE_ERROR * errors[group]:
            nodes = [name for unit in measured[group] if unit not in rest for name in unit.nodes]
            refined.append(RefinedGroup(group, tuple(sorted(nodes, key=order.__getitem__)), errors[group], rest_error))
    return tuple(refined)


@dataclass(frozen=True)
class Culprit(JsonForm):
    """The node of a group whose rounding makes most of the group's error.

    Attributes:
        node: its name; of nodes that are never separated, the first.
        share: its error alone over the group's, at most 1; NaN where outputs are not finite with this node in FP16.
        code: of the finding that its values call for; None where they call for none.
    """

    node: str
    share: float
    code: str | None = None

    @property
    def text(self) -> str:
        """Behind the group's error."""
        return f"{self.node} makes {'it so' if math.isnan(self.share) else f'{100 * self.share:.0f} % of it'}"


@dataclass(frozen=True)
class Culprits(JsonForm):
    """Group id -> its culprit, of the groups of several units whose errors are large."""

    by_group: Mapping[str, Culprit] = field(default_factory=dict)

    @classmethod
    def load(cls, data_dir: Path) -> Culprits:
        """Those that a search has left; none where there is nothing that can be read."""
        try:
            return cls.from_json(read_json(data_dir / CULPRITS_JSON))
        except READ_ERRORS:
            return cls()


def keep_culprits(
    toolchain: Toolchain, context: RunContext, observed: ObservedValues, data_dir: Path, findings: Sequence[Finding]
) -> tuple[Finding, ...]:
    """Measure and store the culprits of the groups with the largest one-group errors, once in a run.

    Of those whose error is above ``_BLAMED_ERROR`` of the limit that the search aims at, at most ``_MOST_BLAMED``.
    Returns what their values call for, as far as it is not among ``findings``.
    """
    grouped, settings = context.grouped, context.settings
    path, limit = data_dir / CULPRITS_JSON, aimed_error(settings)
    if path.exists() or limit is None:
        return ()
    errors = Sensitivity.load(data_dir / SENSITIVITY_JSON, settings.metric).errors
    units = {group: parts for group, parts in _all_units(grouped).items() if len(parts) > 1 and group in errors}
    large = sorted((g for g in units if errors[g] > _BLAMED_ERROR * limit), key=lambda g: -errors[g])
    units, by_group = {group: units[group] for group in large[:_MOST_BLAMED]}, {}
    for group, parts in _culprits(toolchain, _apart(grouped, units), units, settings).items():
        first = parts[0]
        share = min(first.error / errors[group], 1.0) if math.isfinite(first.error) else math.nan
        by_group[group] = Culprit(first.nodes[0], share)
    nodes = [culprit.node for culprit in by_group.values() if not culprit.share < _BLAMED_SHARE]
    reasons = blame(grouped, observed, nodes, context.precisions)
    by_group = {g: replace(c, code=reasons[c.node].code) if c.node in reasons else c for g, c in by_group.items()}
    write_json(path, Culprits(by_group).to_json())
    named = {(each.code, node) for each in findings for node in each.where.nodes}
    new = hazard_findings(list(reasons.values()), "search")
    return tuple(each for each in new if (each.code, each.where.nodes[0]) not in named)


def _culprits(
    toolchain: Toolchain, split: GroupedModel, units: Mapping[str, Sequence[Unit]], settings: SearchSettings
) -> dict[str, list[Unit]]:
    """Group id -> its units with their errors alone, the largest first; nothing where emulation fails."""
    every = [unit for parts in units.values() for unit in parts]
    errors = _errors(toolchain, split, [[unit] for unit in every], settings)
    by_group: dict[str, list[Unit]] = {}
    for unit, error in sorted(zip(every, errors, strict=False), key=lambda pair: -pair[1]):
        by_group.setdefault(unit.group, []).append(replace(unit, error=error))
    return by_group


def _all_units(grouped: GroupedModel) -> dict[str, list[Unit]]:
    """Group id -> its units."""
    heavy = {node.name for node in grouped.model.nodes if operator(node.op_type).kind in HEAVY}
    units: dict[str, list[Unit]] = {}
    for unit in find_groups(grouped.model, "op"):
        group = grouped.owners[unit.nodes[0]]
        parts = units.setdefault(group, [])
        parts.append(Unit(f"{group}.{len(parts)}", group, unit.nodes, not heavy.isdisjoint(unit.nodes)))
    return units


def _large_errors(
    toolchain: Toolchain,
    split: GroupedModel,
    units: Mapping[str, Sequence[Unit]],
    least: float,
    settings: SearchSettings,
) -> dict[str, float]:
    """Group id -> its error alone, of those that are above ``least``.

    By halves, as errors add in squares: what together has a small error has no group of a large one. One by one where
    the error together is as if every group's were that large.
    """
    large: dict[str, float] = {}
    sets = [list(units)] if units else []
    while sets:
        errors = _errors(toolchain, split, [[unit for group in ids for unit in units[group]] for ids in sets], settings)
        above = [(ids, error) for ids, error in zip(sets, errors, strict=False) if error > least]
        large |= {ids[0]: error for ids, error in above if len(ids) == 1}
        sets = []
        for ids, error in above:
            size = (len(ids) + 1) // 2 if error <= least * math.sqrt(len(ids)) else 1
            sets += [ids[k : k + size] for k in range(0, len(ids), size)] if len(ids) > 1 else []
    return large


def _apart(grouped: GroupedModel, units: Mapping[str, Sequence[Unit]]) -> GroupedModel:
    """The model with each of these units as a group of its own."""
    groups = list[LayerGroup]()
    for group in grouped.groups:
        parts = [replace(group, id=unit.id, nodes=unit.nodes) for unit in units.get(group.id, ())]
        groups += parts or [group]
    return replace(grouped, groups=tuple(groups))


def _errors(
    toolchain: Toolchain, split: GroupedModel, fp16: Sequence[Sequence[Unit]], settings: SearchSettings
) -> list[float]:
    """The error of each plan with these units in FP16, ``inf`` where it is not finite; nothing where that fails."""
    fp32, part = split.uniform(Precision.FP32), range(min(_SAMPLES, toolchain.emulated_samples.count))
    plans = [fp32.replace(dict.fromkeys([unit.id for unit in units], Precision.FP16)) for units in fp16]
    answer = toolchain.emulate(plans, part, split) if plans else ()
    if isinstance(answer, Failure):
        return []
    if settings.metric in ADD_IN_SQUARES:
        return [searched_error(error, settings.metric, settings) for error in answer]
    return [math.inf if error.without(settings.ignore).non_finite else 0.0 for error in answer]
