"""Carry out a plan on a model and write the mixed model: plans from files, by nodes, or made from patterns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from mptune.engines.loading import load_typed_model
from mptune.errors import PlanError, RunError
from mptune.files import full_disk_as_error
from mptune.graph.grouping.by_node import plan_of_nodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import Granularity, LayerGroup, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import external_location, is_external
from mptune.graph.plan import PLAN_FORMAT, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.tuning.space import close_patterns, match

_KEYS = frozenset({"format", "model_sha256", "precision", "nodes"})
_PLAN_HINT = 'a plan is chosen/plan.json of a run, or {"nodes": {"NAME or GLOB": "fp16"}}'


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan with the groups that it gives precisions to.

    Attributes:
        groups: of one model.
        plan: a precision for each of them.
        warnings: one line each.
    """

    groups: tuple[LayerGroup, ...]
    plan: PrecisionPlan
    warnings: tuple[str, ...] = ()


def resolve_plan(model: Model, plan: PrecisionPlan | Path | None, keep_fp32: Sequence[str] = ()) -> ResolvedPlan:
    """Find the groups that a plan gives precisions to, or make a plan where there is none.

    Args:
        model: the model.
        plan: a plan, the path of one, or None for FP16 wherever FP16 can be right.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.

    Raises:
        PlanError: the plan cannot be read or is another model's, or a pattern means nothing.
    """
    if plan is None:
        resolved = _all_fp16(model)
    elif isinstance(plan, PrecisionPlan):
        resolved = _by_groups(model, plan, {})
    else:
        resolved = _from_file(model, plan)
    kept: dict[str, Precision] = {}
    for pattern in keep_fp32:
        groups = match(pattern, resolved.groups)
        if not groups:
            hint = close_patterns(pattern, resolved.groups)
            raise PlanError(f"--keep-fp32 {pattern} matches nothing in {model.path}", hint)
        kept.update(dict.fromkeys(groups, Precision.FP32))
    return ResolvedPlan(resolved.groups, resolved.plan.replace(kept), resolved.warnings)


def apply_plan(
    model: Path, plan: PrecisionPlan | Path | None, out: Path, keep_fp32: Sequence[str], *, force: bool
) -> tuple[Path, tuple[str, ...]]:
    """Write the mixed-precision model of a plan. The arguments are those of ``mptune.apply``.

    Returns:
        The path written, and warnings, one line each.
    """
    if out.is_dir() or (out.exists() and not force):
        refuse(out)  # before a large model is read
    if isinstance(plan, Path) and out.exists() and plan.exists() and out.samefile(plan):
        raise PlanError(f"{out} is what the mixed model is made from", "give another path with -o")
    loaded = load_typed_model(model)
    resolved = resolve_plan(loaded, plan, keep_fp32)
    return write_model(loaded, resolved, out, force=force), resolved.warnings


def write_model(model: Model, resolved: ResolvedPlan, out: Path, *, force: bool = False) -> Path:
    """Write the mixed model, self-contained; past 2 GiB its weights lie beside it. Whole or not at all.

    Raises:
        RunError: it exists already and ``force`` is not given, or it cannot be written.
        PlanError: the output is what the model is made from, or the plan does not fit the model.
    """
    rewriter = Rewriter(GroupedModel(model, resolved.groups))
    for path in rewriter.exported_files(resolved.plan, out):
        if path.exists() and any(path.samefile(source) for source in _sources(model)):
            raise PlanError(f"{path} is what the mixed model is made from", "give another path with -o")
        if path.is_dir() or (path.exists() and not force):
            refuse(path)
    with full_disk_as_error(out):
        return rewriter.export(resolved.plan, out)


def refuse(path: Path) -> NoReturn:
    """Say that an output is there already.

    Raises:
        RunError: always.
    """
    if path.is_dir():
        raise RunError(f"{path} is a directory", "give the path of a file with -o, such as mixed.onnx")
    raise RunError(f"{path} exists already", "give --force to overwrite it, or another path with -o")


def _sources(model: Model) -> set[Path]:
    """The files that a model is read from."""
    protos = (c.proto for c in model.initializers.values() if is_external(c.proto))
    folder = model.path.resolve().parent
    return {model.path} | {external_location(proto, folder).path for proto in protos}


def _all_fp16(model: Model) -> ResolvedPlan:
    """FP16 except where a hazard or the group itself rules it out; the warnings name the hazards."""
    groups = find_groups(model)
    pinned = pinned_by_hazards(find_hazards(GroupedModel(model, groups)))
    names = {group.id: group.name for group in groups}
    kept = set(pinned) | {group.id for group in groups if group.pinned is not None}
    plan = {g.id: Precision.FP32 if g.id in kept else Precision.FP16 for g in groups}
    warnings = tuple(f"{names[group]} ({group}) stays in FP32: {reason}" for group, reason in pinned.items())
    return ResolvedPlan(groups, PrecisionPlan(model.sha256, plan), warnings)


def _from_file(model: Model, path: Path) -> ResolvedPlan:
    document = _read(path)
    sha256 = document.get("model_sha256") or ""
    if sha256 and sha256 != model.sha256:
        raise PlanError(
            f"{path} was made for another model (sha256 {str(sha256)[:12]}, {model.path} has {model.sha256[:12]})",
            "give the model that was searched",
        )
    nodes = _node_precisions(document.get("nodes", {}), path)
    if document.get("precision"):
        return _by_groups(model, PrecisionPlan.from_json(document, str(path)), nodes)
    found = plan_of_nodes(model, nodes, str(path))
    fp16 = set(found.plan.fp16_groups)
    doubtful = pinned_by_hazards(find_hazards(GroupedModel(model, found.groups)))
    warnings = tuple(
        f"{group.name} is FP16 as the plan says, but FP16 cannot be right there: {doubtful[group.id]}"
        for group in found.groups
        if group.id in doubtful and group.id in fp16
    )
    return ResolvedPlan(found.groups, found.plan, (*found.warnings, *warnings))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}", _PLAN_HINT) from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"{path} is no plan: it is not JSON ({reason})", _PLAN_HINT) from None
    if not isinstance(document, dict) or not (document.get("precision") or document.get("nodes")):
        raise PlanError(f"{path} is no plan: it has neither 'precision' nor 'nodes'", _PLAN_HINT)
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise PlanError(f"{path}: a plan has no {unknown[0]!r}", f"it has {', '.join(sorted(_KEYS))}")
    if document.get("format", PLAN_FORMAT) != PLAN_FORMAT:
        raise PlanError(f"{path} has format {document['format']!r}, this mptune reads {PLAN_FORMAT}", "upgrade mptune")
    return {"format": PLAN_FORMAT, **document}


def _node_precisions(nodes: Any, path: Path) -> dict[str, Precision]:
    if not isinstance(nodes, dict):
        raise PlanError(f"{path}: 'nodes' is not an object", _PLAN_HINT)
    found = {}
    for name, precision in nodes.items():
        if precision not in [p.value for p in Precision]:
            raise PlanError(f"{path}: node {name!r} has precision {precision!r}", "precisions are 'fp16' and 'fp32'")
        found[name] = Precision(precision)
    return found


def _by_groups(model: Model, plan: PrecisionPlan, nodes: Mapping[str, Precision]) -> ResolvedPlan:
    """The groups of a plan, found by trying every granularity: a plan does not record its own."""
    if plan.model_sha256 and plan.model_sha256 != model.sha256:
        raise PlanError(
            f"the plan was made for another model (sha256 {plan.model_sha256[:12]}, {model.path} has "
            f"{model.sha256[:12]})",
            "give the model that was searched",
        )
    fitting = []
    for granularity in get_args(Granularity):
        if granularity == "auto":  # is one of the others
            continue
        groups = find_groups(model, granularity)
        if {group.id for group in groups} == set(plan.precision):
            if _agree(groups, plan, nodes):
                return ResolvedPlan(groups, plan)
            fitting.append(groups)
    if fitting:
        raise PlanError(
            "the plan's 'precision' and its 'nodes' contradict each other", "leave one of them out: nodes alone will do"
        )
    if nodes:
        found = plan_of_nodes(model, nodes)
        warning = "the plan's groups are another version's: its nodes were taken"
        return ResolvedPlan(found.groups, found.plan, (warning, *found.warnings))
    raise PlanError(
        f"the plan has {len(plan.precision)} groups, which are not those of {model.path}",
        "it was made for another model, or by another version of mptune: search again",
    )


def _agree(groups: Sequence[LayerGroup], plan: PrecisionPlan, nodes: Mapping[str, Precision]) -> bool:
    """Whether every node that the plan names has the precision of its group."""
    return all(nodes.get(name, plan.precision[g.id]) is plan.precision[g.id] for g in groups for name in g.nodes)
