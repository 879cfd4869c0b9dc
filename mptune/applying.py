"""Carry out a plan on a model and write the mixed model: plans from files, by nodes, or made from patterns."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptune.data.samples import CalibrationSet
from mptune.engines.loading import check_written, load_typed_model
from mptune.errors import PlanError
from mptune.files import full_disk_as_error, read_json, refuse, writing
from mptune.graph.groups import APART_SUFFIX, GroupedModel, LayerGroup, find_groups, plan_of_nodes
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import external_location, is_external
from mptune.graph.plan import PLAN_FORMAT, PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes, unsupported
from mptune.graph.writing.rewrite import Rewriter
from mptune.inspection.model import observe_values
from mptune.settings import Granularity
from mptune.tuning.space import close_patterns, match

_GRANULARITIES: tuple[Granularity, ...] = ("op", "fusion", "block")
_KEYS = frozenset({"format", "model_sha256", "opset", "precision", "nodes"})
_PLAN_HINT = 'a plan is chosen/plan.json of a run, or {"nodes": {"NAME or GLOB": "fp16"}}'
_UNSEEN = (
    "the values of this model were not checked, only its weights and its structure: give --data PATH, so that groups "
    "whose values FP16 cannot hold are found"
)


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


def resolve_plan(
    model: Model,
    plan: PrecisionPlan | Path | None,
    keep_fp32: Sequence[str] = (),
    samples: CalibrationSet | None = None,
    *,
    reduced: Precision = Precision.FP16,
    keep_bf16: Sequence[str] = (),
) -> ResolvedPlan:
    """Find the groups that a plan gives precisions to, or make a plan where there is none (``mptune.apply``).

    A file of a plan may be of a model with the same nodes and other weights. The plan is checked on ``samples``; where
    there is no plan, what they show stays in FP32.
    """
    if plan is None:
        return _all_reduced(model, samples, reduced, keep_fp32, keep_bf16)
    resolved = _by_groups(model, plan, {}) if isinstance(plan, PrecisionPlan) else _from_file(model, plan)
    kept = _kept(keep_fp32, keep_bf16, resolved.groups, model)
    resolved = _supported(model, replace(resolved, plan=resolved.plan.replace(kept)))
    if not (resolved.is_of_other_weights or samples is not None or resolved.is_by_nodes):
        return resolved
    # It is carried out as it stands, with warnings where it has FP16 that cannot be right, or may not be.
    held = set(resolved.plan.precision.values())
    hazards, warnings = _hazards(GroupedModel(model, resolved.groups), samples, held)
    cure = "" if resolved.is_by_nodes else "; keep it in FP32: --keep-fp32 {id}"
    for precision in REDUCED:
        warnings += _ruled_out(hazards, resolved, precision, cure)
    if samples is not None:
        warnings += _finding_lines(hazards, resolved.plan, pinned_by_hazards(hazards))
    elif resolved.is_of_other_weights:
        warnings += (_UNSEEN,)
    return replace(resolved, warnings=(*resolved.warnings, *warnings))


def check_out(plan: PrecisionPlan | Path | None, out: Path, *, force: bool) -> None:
    """Refuse a place where the mixed model may not be written, before a large model is read."""
    if out.is_dir() or (out.exists() and not force):
        refuse(out)
    if isinstance(plan, Path) and out.exists() and plan.exists() and out.samefile(plan):
        raise PlanError(f"{out} is what the mixed model is made from", "give another path with -o")


def load_for_plan(model: Path, plan: PrecisionPlan | Path | None, opset: int | None) -> Model:
    """The model, raised to an operator set that is given, else to the one that a file's plan is of."""
    loaded = load_typed_model(model, opset=opset)
    wanted = _read(plan).get("opset") if opset is None and isinstance(plan, Path) else None
    is_raised = isinstance(wanted, int) and wanted > loaded.opset
    return load_typed_model(model, opset=wanted) if is_raised else loaded


def write_model(model: Model, resolved: ResolvedPlan, out: Path, *, force: bool = False) -> tuple[str, ...]:
    """Write the mixed model, self-contained; past 2 GiB its weights lie beside it. Whole or not at all.

    Returns the warnings of ``check_written``.
    """
    rewriter = Rewriter(GroupedModel(model, resolved.groups))
    files = rewriter.exported_files(resolved.plan, out)
    protos = (c.proto for c in model.initializers.values() if is_external(c.proto))
    folder = model.path.resolve().parent
    sources = {model.path} | {external_location(proto, folder)[0] for proto in protos}
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
    kept: dict[str, Precision] = {}
    for setting, patterns in (("keep_bf16", keep_bf16), ("keep_fp32", keep_fp32)):
        for pattern in patterns:
            ids = match(pattern, groups)
            if not ids:
                text = f"{pattern} matches nothing in {model.path}"
                raise PlanError(text, close_patterns(pattern, groups), setting=setting)
            kept |= dict.fromkeys(ids, Precision.BF16 if setting == "keep_bf16" else Precision.FP32)
    return kept


def _all_reduced(
    model: Model, samples: CalibrationSet | None, reduced: Precision, keep_fp32: Sequence[str], keep_bf16: Sequence[str]
) -> ResolvedPlan:
    """``reduced`` except where a hazard or the group itself rules it out, or a pattern means the group.

    The warnings name the hazards that keep groups in FP32, then what speaks against FP16 in the others.
    """
    groups = find_groups(model)
    asked = _kept(keep_fp32, keep_bf16, groups, model)
    precisions = (Precision.FP32, reduced, *([Precision.BF16] if keep_bf16 else []))
    hazards, warnings = _hazards(GroupedModel(model, groups), samples, precisions)
    pinned = {g: why for g, why in pinned_by_hazards(hazards, reduced).items() if asked.get(g) is not Precision.BF16}
    names = {group.id: group.name for group in groups}
    fixed = {*pinned, *(group.id for group in groups if group.pinned is not None)}
    plan = {g.id: Precision.FP32 if g.id in fixed else asked.get(g.id, reduced) for g in groups}
    stays = [f"{names[group]} ({group}) stays in FP32: {reason}" for group, reason in pinned.items()]
    resolved = _supported(model, ResolvedPlan(groups, PrecisionPlan(model.sha256, plan)))
    about = _finding_lines(hazards, resolved.plan, pinned)
    unseen = (_UNSEEN,) if samples is None and about else ()
    doubts = _ruled_out(hazards, resolved, Precision.BF16, "") if reduced is not Precision.BF16 else ()
    return replace(resolved, warnings=(*warnings, *stays, *resolved.warnings, *doubts, *about, *unseen))


def _supported(model: Model, resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan with those groups in FP32 whose operators have no BF16 at the model's operator set, and a warning."""
    asked = [group.id for group in resolved.groups if resolved.plan.precision[group.id] is Precision.BF16]
    missing = unsupported(ValueTypes(GroupedModel(model, resolved.groups)), Precision.BF16) if asked else {}
    lacking = [group for group in asked if group in missing]
    if not lacking:
        return resolved
    reasons = "; ".join(dict.fromkeys(missing[group] for group in lacking))
    warning = f"{len(lacking)} of {len(asked)} groups that should be BF16 stay in FP32: {reasons}"
    plan = resolved.plan.replace(dict.fromkeys(lacking, Precision.FP32))
    return replace(resolved, plan=plan, warnings=(*resolved.warnings, warning))


def _hazards(
    grouped: GroupedModel, samples: CalibrationSet | None, precisions: Collection[Precision]
) -> tuple[tuple[Hazard, ...], tuple[str, ...]]:
    """The hazards of the weights, and of the values on the data where there are any; and warnings about the data."""
    if samples is None:
        return find_hazards(grouped), ()
    names = tuple(map(str, precisions))
    values, about = observe_values(grouped, samples, names)
    lines = (f"{each.code}: {each.message}" for each in (*samples.findings, *about) if each.severity != "info")
    return find_hazards(grouped, values, names), (*samples.warnings, *lines)


def _ruled_out(hazards: Sequence[Hazard], resolved: ResolvedPlan, precision: Precision, cure: str) -> tuple[str, ...]:
    """The groups that a plan has in a precision in which they cannot be right, one line each."""
    doubtful, name = pinned_by_hazards(hazards, precision), precision.name
    return tuple(
        f"{group.name} is {name} as the plan says, but {name} cannot be right there: {doubtful[group.id]}"
        + cure.format(id=group.id)
        for group in resolved.groups
        if group.id in doubtful and resolved.plan.precision[group.id] is precision
    )


def _finding_lines(hazards: Sequence[Hazard], plan: PrecisionPlan, settled: Collection[str]) -> tuple[str, ...]:
    """What else the values show, by code: of the groups of a plan that are not settled."""
    groups = [(hazard, hazard.place.group) for hazard in hazards]
    left = [h for h, group in groups if group and group not in settled and h.holds_in(plan.precision[group])]
    findings = hazard_findings(left, "apply")
    return tuple(f"{each.code}: {each.message}" for each in findings if each.severity != "info")


def _from_file(model: Model, path: Path) -> ResolvedPlan:
    """The plan of a file, which may be of a model with the same nodes and other weights: one that was trained again."""
    document = _read(path)
    nodes: dict[str, Precision] = document["nodes"]
    sha256 = str(document.get("model_sha256") or "")
    if not sha256 or sha256 == model.sha256:
        if document.get("precision"):
            return _by_groups(model, PrecisionPlan.from_json(document, str(path)), nodes)
        by_nodes = plan_of_nodes(model, nodes, str(path))
        return ResolvedPlan(by_nodes.groups, by_nodes.plan, by_nodes.warnings, is_by_nodes=True)
    other = f"{path} was made for another model (sha256 {sha256[:12]}, {model.path} has {model.sha256[:12]})"
    names = {node.name for node in model.nodes}
    missing = {name for group in find_groups(model, "op") for name in group.nodes} - nodes.keys()
    unlike = [name for name in nodes if name not in names] or sorted(missing)
    if unlike or not document.get("precision"):
        raise PlanError(
            f"{other} with other nodes{f', such as {unlike[0]!r}' if unlike else ''}",
            "give the model that was searched, or one of the same structure, such as one that was trained again",
        )
    plan = replace(PrecisionPlan.from_json(document, str(path)), model_sha256=model.sha256)
    resolved = _by_groups(model, plan, nodes)
    warning = (
        f"{other} with the same nodes: its precisions are taken; the errors that it was chosen by are not known here"
    )
    return replace(resolved, warnings=(warning, *resolved.warnings), is_of_other_weights=True)


def _read(path: Path) -> dict[str, Any]:
    """The JSON of a plan, checked; ``nodes`` have precisions."""
    try:
        document = read_json(path)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}", _PLAN_HINT) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"{path} is no plan: it is not JSON ({reason})", _PLAN_HINT) from None
    objects = [document.get(name) or {} for name in ("precision", "nodes")] if isinstance(document, dict) else []
    if not any(objects) or not all(isinstance(each, dict) for each in objects):
        raise PlanError(f"{path} is no plan: it has neither 'precision' nor 'nodes' as an object", _PLAN_HINT)
    if unknown := sorted(set(document) - _KEYS):
        raise PlanError(f"{path}: a plan has no {unknown[0]!r}", f"it has {', '.join(sorted(_KEYS))}")
    if document.get("format", PLAN_FORMAT) != PLAN_FORMAT:
        raise PlanError(f"{path} has format {document['format']!r}, this mptune reads {PLAN_FORMAT}", "upgrade mptune")
    nodes = document.get("nodes") or {}
    for name, precision in nodes.items():
        if precision not in [p.value for p in PRECISIONS]:
            hint = f"a precision is one of: {', '.join(PRECISIONS)}"
            raise PlanError(f"{path}: node {name!r} has precision {precision!r}", hint)
    return {"format": PLAN_FORMAT, **document, "nodes": {name: Precision.named(each) for name, each in nodes.items()}}


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
        is_split = any(group.endswith(APART_SUFFIX) for group in of_groups)
        warnings = () if is_split else ("the plan's groups are another version's: its nodes were taken",)
        return ResolvedPlan(by_nodes.groups, by_nodes.plan, (*warnings, *by_nodes.warnings))
    raise PlanError(
        f"the plan has {len(of_groups)} groups, which are not those of {model.path}",
        "it was made for another model, or by another version of mptune: search again",
    )
