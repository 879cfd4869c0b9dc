"""Carry out a plan on a model and write the mixed model: plans from files, by nodes, or made from patterns."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pydantic

from mptune.data.samples import CalibrationSet
from mptune.engines.loading import check_written, load_typed_model
from mptune.errors import PlanError, one_line
from mptune.files import full_disk_as_error, read_json, refuse, writing
from mptune.finding import FP16_CODES, Finding
from mptune.findings.reference import OPSET_RAISED
from mptune.findings.wording import counted, listed
from mptune.graph.groups import APART, GroupedModel, LayerGroup, find_groups, plan_of_nodes
from mptune.graph.hazards import find, static
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.interface import interface_lines
from mptune.graph.loading.model import Model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes, unsupported
from mptune.graph.writing.rewrite import Rewriter
from mptune.observing import observe_values
from mptune.settings import Granularity
from mptune.tuning.space import close_patterns, match

_GRANULARITIES: tuple[Granularity, ...] = ("op", "fusion", "block")
_PLAN_HINT = 'a plan is chosen/plan.json of a run, or {"nodes": {"NAME or GLOB": "fp16"}}'
_NAMED = 3  # groups, or nodes, that a line names


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan with the groups that it gives precisions to.

    Attributes:
        is_of_other_weights: the plan was made for a model with the same nodes and other weights.
        is_by_nodes: written by hand, with nodes.
    """

    groups: tuple[LayerGroup, ...]
    plan: PrecisionPlan
    warnings: tuple[str, ...] = ()
    is_of_other_weights: bool = False
    is_by_nodes: bool = False
    io: str = Precision.FP32  # of FP32 inputs and outputs in the mixed model


def resolve_plan(
    model: Model,
    plan: PrecisionPlan | Path | None,
    keep_fp32: Sequence[str] = (),
    samples: CalibrationSet | None = None,
    *,
    reduced: Precision = Precision.FP16,
    keep_bf16: Sequence[str] = (),
    io: str | None = None,
) -> ResolvedPlan:
    """Find the groups that a plan gives precisions to, or make a plan where there is none (``mptune.apply``).

    A file of a plan may be of a model with the same nodes and other weights. The plan is checked on ``samples``; where
    there is no plan, what they show stays in FP32, so that nothing is written that would be warned of.
    """
    if plan is None:
        groups = find_groups(model)
        resolved = ResolvedPlan(groups, PrecisionPlan.uniform(model.sha256, [each.id for each in groups], reduced))
    else:
        resolved = _by_groups(model, plan, {}) if isinstance(plan, PrecisionPlan) else _from_file(model, plan)
    overrides = _kept(keep_fp32, keep_bf16, resolved.groups, model)
    wanted, hazards, lines = resolved.plan.replace(overrides), tuple[Hazard, ...](), list[str]()

    # The values where there are data, else the weights alone. A plan of this very model was made with both known.
    grouped = GroupedModel(model, resolved.groups)
    if samples is not None:
        precisions = tuple(map(str, {Precision.FP32, *wanted.precision.values()}))
        values, findings, _ = observe_values(grouped, samples, precisions)
        hazards = find.find_hazards(grouped, values, precisions)
        lines = [*samples.warnings, *_shown((*samples.findings, *findings))]
    elif plan is None or resolved.is_of_other_weights or resolved.is_by_nodes:
        hazards = find.find_hazards(grouped)
    ruled_out = find.pinning_hazards(hazards, reduced)
    for hazard in hazards if plan is None and samples is not None else ():  # what would be warned of, and FP32 cures
        is_doubt = hazard.severity != "info" and not hazard.is_note and hazard.code in FP16_CODES
        if hazard.place.group is not None and is_doubt and hazard.holds_in(reduced):
            ruled_out.setdefault(hazard.place.group, hazard)
    ruled_out = {group: hazard for group, hazard in ruled_out.items() if group not in overrides}
    lines += _shown(static.interface_findings(model, "apply"))

    # Without a plan, what cannot be right stays in FP32; a plan is carried out as it stands, with warnings.
    fixed = {each.id for each in resolved.groups if each.pinned is not None}
    if plan is None:
        lines += _staying(resolved.groups, ruled_out)
        fixed |= ruled_out.keys()
        wanted = wanted.replace(dict.fromkeys(fixed, Precision.FP32))
    asked = wanted.groups_in(Precision.BF16)
    missing = unsupported(ValueTypes(grouped), Precision.BF16) if asked else {}
    if lacking := [group for group in asked if group in missing]:
        wanted = wanted.replace(dict.fromkeys(lacking, Precision.FP32))
        reasons = "; ".join(dict.fromkeys(missing[group] for group in lacking))
        lines.append(f"{len(lacking)} of {len(asked)} groups that should be BF16 stay in FP32: {reasons}")
    for precision in REDUCED:
        doubtful, name = find.pinned_by_hazards(hazards, precision), precision.name
        lines += [
            f"{each.name} is {name} as the plan says, but {name} cannot be right there: {doubtful[each.id]}; keep it in"
            f" FP32: --keep-fp32 {each.id}"
            for each in resolved.groups
            if each.id in doubtful and wanted.precision[each.id] is precision
        ]

    # What else the values show of the groups that are not settled.
    at = [(hazard, hazard.place.group) for hazard in hazards if plan is None or samples is not None]
    left = [h for h, group in at if group and group not in ruled_out and h.holds_in(wanted.precision[group])]
    about = _shown(hazard_findings(left, "apply"))
    io = io or resolved.io
    lines += interface_lines(replace(grouped, io=io), () if samples is None else samples.samples)
    is_untried = samples is None and (plan is None or resolved.is_of_other_weights or resolved.is_by_nodes)
    untried = [_untried(wanted, fixed)] if is_untried else []
    return replace(resolved, plan=wanted, warnings=(*resolved.warnings, *lines, *about, *untried), io=io)


def _staying(groups: Sequence[LayerGroup], ruled_out: Mapping[str, Hazard]) -> list[str]:
    """The groups that stay in FP32, and why: one line for each code."""
    by_code: dict[str, list[LayerGroup]] = {}
    for group in groups:
        if group.id in ruled_out:
            by_code.setdefault(ruled_out[group.id].code, []).append(group)
    lines = []
    for same in by_code.values():
        names = listed([f"{group.name} ({group.id})" for group in same], _NAMED, " and {others} more")
        first, verb = ruled_out[same[0].id], "stays" if len(same) == 1 else "stay"
        lines.append(f"{names} {verb} in FP32: {first.place.tensor}: {first.reason}")
    return lines


def _untried(plan: PrecisionPlan, pinned: Collection[str]) -> str:
    """What is written without data."""
    counts = ((each.name, len(plan.groups_in(each))) for each in (*REDUCED, Precision.FP32))
    written = ", ".join(f"{counted(count, 'group')} in {name}" for name, count in counts if count)
    held = len({*plan.groups_in(Precision.FP32)} & {*pinned})
    return (
        f"wrote {written}{f' ({held} pinned)' if held else ''}; nothing was tried: the values of this model were not"
        " checked, only its weights and its structure; give --data PATH, so that groups whose values do not fit stay"
        " in FP32"
    )


def _shown(findings: Iterable[Finding]) -> list[str]:
    """Warnings, one line for what is wrong alike in many places: the first is told in full."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.severity != "info" or finding.code == OPSET_RAISED:
            alike.setdefault((finding.code, finding.cure), []).append(finding)
    lines = []
    for first, *others in alike.values():
        places = [repr(next(iter(each.where.nodes or each.where.tensors), each.text)) for each in others]
        also = f"; also at {listed(places, _NAMED, ' and {others} more')}" if places else ""
        lines.append(f"{first.code}: {first.message}{also}")
    return lines


def check_out(plan: PrecisionPlan | Path | None, out: Path, *, force: bool) -> None:
    """Refuse a place where the mixed model may not be written, before a large model is read."""
    if out.is_dir() or (out.exists() and not force):
        refuse(out)
    if isinstance(plan, Path) and out.exists() and plan.exists() and out.samefile(plan):
        raise PlanError(f"{out} is what the mixed model is made from", "give another path with -o")


def load_for_plan(model: Path, plan: PrecisionPlan | Path | None, opset: int | None) -> Model:
    """The model, raised to an operator set that is given, else to the one that a file's plan is of."""
    loaded = load_typed_model(model, opset=opset)
    wanted = _PlanFile.read(plan).opset if opset is None and isinstance(plan, Path) else None
    return load_typed_model(model, opset=wanted) if wanted is not None and wanted > loaded.opset else loaded


def write_model(model: Model, resolved: ResolvedPlan, out: Path, *, force: bool = False) -> tuple[str, ...]:
    """Write the mixed model, self-contained; past 2 GiB its weights lie beside it. Whole or not at all.

    Returns the warnings of ``check_written``.
    """
    rewriter = Rewriter(GroupedModel(model, resolved.groups, io=resolved.io))
    files = rewriter.exported_files(resolved.plan, out)
    sources = (model.path, *model.data_files)
    for path in files:
        if path.exists() and any(path.samefile(source) for source in sources):
            raise PlanError(f"{path} is what the mixed model is made from", "give another path with -o")
        if path.is_dir() or (path.exists() and not force):
            refuse(path)
    with full_disk_as_error(out), writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mptune-", dir=out.parent) as scratch:
            written = rewriter.export(resolved.plan, Path(scratch) / out.name)
            warnings = check_written(written, str(out), model.path)
            for path in reversed(files):  # the data have their name before the model has
                (written.parent / path.name).replace(path)
    return warnings


def _kept(
    keep_fp32: Sequence[str], keep_bf16: Sequence[str], groups: Sequence[LayerGroup], model: Model
) -> dict[str, Precision]:
    """Group id -> the precision that patterns keep it in; what both mean is FP32."""
    overrides: dict[str, Precision] = {}
    for setting, patterns in (("keep_bf16", keep_bf16), ("keep_fp32", keep_fp32)):
        for pattern in patterns:
            ids = match(pattern, groups)
            if not ids:
                text = f"{pattern} matches nothing in {model.path}"
                raise PlanError(text, close_patterns(pattern, groups), setting=setting)
            overrides |= dict.fromkeys(ids, Precision.BF16 if setting == "keep_bf16" else Precision.FP32)
    return overrides


class _PlanFile(pydantic.BaseModel):
    """The content of chosen/plan.json, or of a plan that was written by hand."""

    model_config = pydantic.ConfigDict(extra="forbid")

    format: Literal[1] = 1
    model_sha256: str = ""
    opset: int | None = None
    io: Literal["fp32", "fp16"] = "fp32"
    precision: dict[str, Precision] = {}  # by group
    nodes: dict[str, Precision] = {}

    @classmethod
    def read(cls, path: Path) -> _PlanFile:
        """Read a plan; a ``PlanError`` for what is none."""
        try:
            file = cls.model_validate(read_json(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror or error}", _PLAN_HINT) from None
        except ValueError as error:
            raise PlanError(f"{path} is no plan: {one_line(error)}", _PLAN_HINT) from None
        if not file.precision and not file.nodes:
            raise PlanError(f"{path} is no plan: it has neither 'precision' nor 'nodes'", _PLAN_HINT)
        return file


def _from_file(model: Model, path: Path) -> ResolvedPlan:
    """The plan of a file, which may be of a model with the same nodes and other weights: one that was trained again."""
    file = _PlanFile.read(path)
    plan, nodes = PrecisionPlan(model.sha256, file.precision), file.nodes
    if file.model_sha256 in ("", model.sha256):
        if file.precision:
            return replace(_by_groups(model, plan, nodes), io=file.io)
        by_nodes = plan_of_nodes(model, nodes, str(path))
        return ResolvedPlan(by_nodes.groups, by_nodes.plan, by_nodes.warnings, is_by_nodes=True, io=file.io)
    other = f"{path} was made for another model (sha256 {file.model_sha256[:12]}, {model.path} has {model.sha256[:12]})"
    names = {node.name for node in model.nodes}
    missing = {name for group in find_groups(model, "op") for name in group.nodes} - nodes.keys()
    unlike = [name for name in nodes if name not in names] or sorted(missing)
    if unlike or not file.precision:
        raise PlanError(
            f"{other} with other nodes{f', such as {unlike[0]!r}' if unlike else ''}",
            "give the model that was searched, or one of the same structure, such as one that was trained again",
        )
    resolved = _by_groups(model, plan, nodes)
    warning = (
        f"{other} with the same nodes: its precisions are used; the errors that it was chosen by do not apply here"
    )
    return replace(resolved, warnings=(warning, *resolved.warnings), is_of_other_weights=True, io=file.io)


def _by_groups(model: Model, plan: PrecisionPlan, nodes: dict[str, Precision]) -> ResolvedPlan:
    """The groups of a plan, found by trying every granularity: a plan does not record its own."""
    if plan.model_sha256 and plan.model_sha256 != model.sha256:
        made_for = f"sha256 {plan.model_sha256[:12]}, {model.path} has {model.sha256[:12]}"
        raise PlanError(f"the plan was made for another model ({made_for})", "give the model that was searched")
    of_groups, is_fitting = plan.precision, False
    for granularity in _GRANULARITIES:
        groups = find_groups(model, granularity)
        if {group.id for group in groups} == of_groups.keys():
            is_fitting = True
            if all(nodes.get(name, of_groups[g.id]) is of_groups[g.id] for g in groups for name in g.nodes):
                return ResolvedPlan(groups, plan)
    if is_fitting:
        raise PlanError(
            "the plan's 'precision' and its 'nodes' contradict each other", "leave one of them out: nodes alone will do"
        )
    if nodes:
        by_nodes = plan_of_nodes(model, nodes)
        is_split = any(group.endswith(f"-{APART}") for group in of_groups)
        warnings = () if is_split else ("the plan's groups are another version's: its nodes are used",)
        return ResolvedPlan(by_nodes.groups, by_nodes.plan, (*warnings, *by_nodes.warnings))
    raise PlanError(
        f"the plan has {len(of_groups)} groups, which are not those of {model.path}",
        "it was made for another model, or by another version of mptune: search again",
    )
