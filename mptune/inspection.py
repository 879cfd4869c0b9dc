"""What a model is made of, as a search would see it: groups, operators, FLOPs, bytes, hazards and pins."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mptune.data.calibration import CalibrationSet, load_calibration
from mptune.data.numbers import encode_float
from mptune.engines.base import Failure, Workspace
from mptune.engines.jobs.ranges import TensorRange, seen_of
from mptune.engines.toolchains.predicted import PredictedToolchain
from mptune.engines.workload import Workload
from mptune.finding import SEVERITIES, Finding, by_severity
from mptune.graph.casting.support import unsupported
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_fitting_groups, find_groups
from mptune.graph.hazards.find import Hazard, find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import hazard_findings
from mptune.graph.hazards.interface import interface_findings
from mptune.graph.hazards.masked_rows import masked_row_findings
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.loading.value_dependent import shape_facts
from mptune.graph.op_rules import node_rule
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.settings import DataSettings, Granularity, InMemory, SearchSettings
from mptune.targets.costs import VIEWS, GroupCost, group_costs, is_folded, ungrouped_cost
from mptune.targets.flops import ShapeTable, node_flops
from mptune.targets.memory import MemoryNeed, memory_need
from mptune.targets.target import load_target
from mptune.targets.unsearched.already_mixed import already_mixed_findings
from mptune.targets.unsearched.out_of_reach import out_of_reach_findings
from mptune.targets.unsearched.quantised import quantised_findings
from mptune.tuning.failures import did_not_run
from mptune.tuning.reasons.reference import training_findings, without_repetition
from mptune.tuning.space import NamedSpace, Pin, make_space
from mptune.tuning.steps.baseline import check_ranges, check_reference, optimisation_findings

_EVERY_PRECISION = tuple(map(str, Precision))
_WEIGHTS = frozenset({"float", "float16", "double", "bfloat16"})


@dataclass(frozen=True)
class InspectedGroup:
    """One layer group.

    Attributes:
        group: what it holds.
        cost: what it computes and moves.
        pin: its precision and the reason, where it is not searched.
        repeats: how many groups of the model have its structure, itself included.
        no_bf16: why it cannot be BF16; None where it could be.
        only_bf16: it is pinned to FP32 because FP16 cannot be right, and BF16 could be.
    """

    group: LayerGroup
    cost: GroupCost
    pin: Pin | None
    repeats: int
    no_bf16: str | None = None
    only_bf16: bool = False


@dataclass(frozen=True)
class OperatorSummary:
    """All nodes of one operator.

    Attributes:
        name: with the domain where that is not ONNX's own.
        count: how many nodes.
        grouped: how many of them have a precision.
        flops: of all of them.
        fixed: why the others have none; "" where nothing is FP32 about them.
    """

    name: str
    count: int
    grouped: int
    flops: float
    fixed: str


@dataclass(frozen=True)
class Inspection:
    """What ``inspect_model`` found.

    Attributes:
        model: what was inspected.
        parameters: how many floating-point constants there are.
        weight_bytes: in how many bytes.
        memory: what all-FP32 and all-FP16 need of it at once.
        granularity: of the groups.
        space: name of the search space whose pins count.
        groups: in topological order.
        operators: by FLOPs, the most first.
        rest: what nodes without a precision compute and move together.
        hazards: the most severe first.
        assumed: symbolic dimension -> the size that FLOPs and bytes are counted for; empty where shapes were observed.
        unknown_shapes: how many FP32 values have no known shape, and count as one element per unknown dimension.
        observed: what the samples are called whose values and shapes were observed; None where none were.
        samples: how many.
        warnings: that have no code, one line each.
        findings: hazards and data warnings that have a code, the most severe first.
    """

    model: Model
    parameters: int
    weight_bytes: int
    memory: MemoryNeed
    granularity: Granularity
    space: str
    groups: tuple[InspectedGroup, ...]
    operators: tuple[OperatorSummary, ...]
    rest: GroupCost
    hazards: tuple[Hazard, ...]
    assumed: Mapping[str, int]
    unknown_shapes: int
    observed: str | None
    samples: int
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of one inference of the whole model, a multiply-add counted as two."""
        return self.rest.flops + sum(g.cost.flops for g in self.groups)

    def to_json(self) -> dict[str, Any]:
        """What ``mptune inspect --json`` prints."""
        model = self.model
        return {
            "model": {
                "path": str(model.path),
                "sha256": model.sha256,
                "opset": model.opset,
                "nodes": len(model.nodes),
                "parameters": self.parameters,
                "weight_bytes": self.weight_bytes,
                "inputs": [_value(info) for info in model.inputs],
                "outputs": [_value(info) for info in model.outputs],
            },
            "memory_bytes": asdict(self.memory),
            "granularity": self.granularity,
            "space": self.space,
            "shapes": {"assumed": dict(self.assumed), "observed": self.observed, "unknown": self.unknown_shapes},
            "samples": self.samples,
            "groups": [_group(g) for g in self.groups],
            "operators": [
                {"name": o.name, "nodes": o.count, "with_precision": o.grouped, "flops": o.flops, "fixed": o.fixed}
                for o in self.operators
            ],
            "rest": _cost(self.rest),
            "hazards": [{**h.to_json(), "value": encode_float(h.value)} for h in self.hazards],
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": list(self.warnings),
        }


def _value(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": None if info.shape is None else list(info.shape)}


def _cost(cost: GroupCost) -> dict[str, float]:
    return {"flops": cost.flops, "fp32_bytes": cost.fp32_bytes, "fp16_bytes": cost.fp16_bytes}


def _group(inspected: InspectedGroup) -> dict[str, Any]:
    group, pin = inspected.group, inspected.pin
    return {
        "id": group.id,
        "name": group.name,
        "kind": group.kind,
        "ops": dict(group.ops),
        "nodes": list(group.nodes),
        "pattern": group.pattern,
        "repeats": inspected.repeats,
        **_cost(inspected.cost),
        "pinned": None if pin is None else {"precision": str(pin.precision), "reason": pin.reason},
        "no_bf16": inspected.no_bf16,
        "only_bf16": inspected.only_bf16,
    }


def inspect_model(
    model: Model, named: NamedSpace, data: Path | InMemory | None = None, batch: int = 1, budget: int | None = None
) -> Inspection:
    """Find the groups, operators, costs, hazards and pins of a model, as a search with this space and data would.

    Args:
        model: the model.
        named: the search space: its granularity and pins.
        data: calibration samples; with them the model is run once over each, in a worker, and values are observed.
        batch: rows per sample where the batch is dynamic.
        budget: evaluations, for granularity ``auto``.

    Raises:
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    granularity: Granularity = named.file.granularity
    if granularity == "auto":
        granularity, groups = find_fitting_groups(model, budget or SearchSettings().budget)
    else:
        groups = find_groups(model, granularity)
    grouped = GroupedModel(model, groups)
    samples, ranges, about_reference = None, dict[str, TensorRange](), tuple[Finding, ...]()
    assumed: Mapping[str, int] = {}
    if data is None:
        static = static_shapes(model, batch)
        shapes, assumed = static.shapes, static.assumed
    else:
        settings = DataSettings(batch=batch)
        samples = load_calibration(data, model.inputs, settings, seed=0)
        samples = replace(samples, samples=samples.samples[: settings.max_search_samples])
        ranges, about_reference = observe_values(grouped, samples, _EVERY_PRECISION)
        shapes = {name: seen.shape for name, seen in ranges.items()}
    absmax = {name: seen.absmax for name, seen in ranges.items()}
    every = find_hazards(grouped, absmax, seen=seen_of(ranges))
    found = [hazard for hazard in every if hazard.precision is Precision.FP16]
    about_data = [replace(f, origin="inspect") for f in samples.findings] if samples else []
    quantised = quantised_findings(grouped, shapes, "inspect")
    mixed = already_mixed_findings(grouped, shapes, "inspect")
    interface = interface_findings(model, "inspect")
    unreached = out_of_reach_findings(grouped, shapes, "inspect")
    masked = {name: seen.masked for name, seen in ranges.items() if seen.masked is not None}
    about_rows = masked_row_findings(grouped, masked, "inspect")
    about_training = training_findings(model, "inspect", is_run=data is not None)
    findings = [
        *about_training,
        *about_data,
        *about_reference,
        *about_rows,
        *mixed,
        *quantised,
        *unreached,
        *interface,
        *hazard_findings(found, "inspect"),
    ]
    about_parts = [
        *(replace(_as_hazard("quantised", f, "flops_share"), severity="info") for f in quantised),  # pinned
        *(_as_hazard("types", f, "flops_share") for f in unreached),
        *(_as_hazard("mixed", f, "flops_share") for f in mixed),
        *map(_interface_hazard, interface),
        *(_as_hazard("mask", f, "masked_rows") for f in about_rows),
        *(_reference_hazard(f) for f in without_repetition((*about_training, *about_reference))),
    ]
    hazards = _sorted([*found, *map(_input_hazard, about_data), *about_parts])
    space = make_space(grouped, named, hazards, absmax)
    no_bf16 = _without_bf16(grouped, every)
    of_three = make_space(grouped, named, hazards, absmax, precisions=_EVERY_PRECISION, without_bf16=no_bf16)
    only_bf16 = space.pinned.keys() & set(of_three.free)
    costs = group_costs(grouped, shapes)
    repeats = Counter(group.pattern for group in groups)
    floats = [c for c in model.initializers.values() if c.dtype in _WEIGHTS]
    return Inspection(
        model=model,
        parameters=sum(ShapeTable(model, {}).elements(c.name) for c in floats),
        weight_bytes=sum(c.nbytes for c in floats),
        memory=memory_need(model, shapes),
        granularity=granularity,
        space=named.name,
        groups=tuple(
            InspectedGroup(
                g, costs[g.id], space.pinned.get(g.id), repeats[g.pattern], no_bf16.get(g.id), g.id in only_bf16
            )
            for g in groups
        ),
        operators=_operators(grouped, ShapeTable(model, shapes)),
        rest=ungrouped_cost(grouped, shapes),
        hazards=hazards,
        assumed=assumed,
        unknown_shapes=_unknown(model, shapes),
        observed=None if samples is None else samples.source,
        samples=0 if samples is None else len(samples.samples),
        warnings=(*(samples.warnings if samples else ()), *check_ranges(ranges), *space.warnings),
        findings=by_severity(without_repetition(findings)),
    )


def _without_bf16(grouped: GroupedModel, hazards: Sequence[Hazard]) -> dict[str, str]:
    """Why groups cannot be BF16 whatever the engine: themselves, their operators at this opset, their values."""
    lacking = unsupported(ValueTypes(grouped), Precision.BF16)
    return {
        **pinned_by_hazards(hazards, Precision.BF16, is_measured=True),
        **{group: lacking.reason(ops) for group, ops in lacking.groups.items()},
        **{group.id: group.pinned for group in grouped.groups if group.pinned is not None},
    }


def observe_values(
    grouped: GroupedModel, samples: CalibrationSet, precisions: Sequence[str] = DEFAULT_PRECISIONS
) -> tuple[dict[str, TensorRange], tuple[Finding, ...]]:
    """Run the model over the samples in a worker: the range and shape of every value, and findings about the model.

    Args:
        grouped: the model and its layer groups.
        samples: what it is run on.
        precisions: that probes of single nodes round to.

    Raises:
        BaselineError: it does not run on them.
    """
    with tempfile.TemporaryDirectory(prefix="mptune-inspect-") as folder:
        places = [Path(folder) / name for name in ("weights", "data", "engines", "logs")]
        for place in places:
            place.mkdir()
        workspace = Workspace(grouped.model.path.resolve(), *places)
        samples.save(workspace.samples("search"))
        workload = Workload(grouped, workspace, tuple(precisions))
        with PredictedToolchain(load_target("cpu"), workload, SearchSettings()) as toolchain:
            reference = toolchain.reference("search")
            ranges = toolchain.observe()
    if isinstance(ranges, Failure):
        gone = replace(ranges, log_path=None)
        raise did_not_run("the model cannot be observed in FP32", gone, grouped.model)
    if isinstance(reference, Failure):
        return dict(ranges), ()
    about = check_reference(reference, "inspect", skip=True)
    known = (*about, *training_findings(grouped.model, "inspect", is_run=True))
    optimised = optimisation_findings(reference.optimisation_error, grouped.model, "inspect", known=known)
    return dict(ranges), (*about, *optimised)


def _sorted(hazards: Sequence[Hazard]) -> tuple[Hazard, ...]:
    return tuple(sorted(hazards, key=lambda hazard: SEVERITIES.index(hazard.severity)))


def _input_hazard(finding: Finding) -> Hazard:
    """A finding about the data as the table of hazards shows it: at the first input, or at all samples."""
    tensor = finding.where.inputs[0] if finding.where.inputs else "samples"
    value = next((float(x) for x in finding.evidence.values() if isinstance(x, float)), 0.0)
    return Hazard(finding.severity, "input", None, None, tensor, value, finding.text, finding.cure, finding.code)


def _as_hazard(kind: str, finding: Finding, number: str) -> Hazard:
    """A finding about the model as the table of hazards shows it; ``number`` names the evidence that is its value."""
    return Hazard(
        finding.severity,
        kind,
        None,
        None,
        "the model",
        float(finding.evidence[number]),
        finding.text,
        finding.cure,
        finding.code,
        finding.evidence,
    )


def _reference_hazard(finding: Finding) -> Hazard:
    """A finding about the model in FP32 as the table of hazards shows it; it pins no group."""
    where = finding.where
    node = where.nodes[0] if where.nodes else None
    outputs = [output.name for output in where.outputs]
    tensor = next(iter((*where.tensors, *outputs)), "the model")
    value = next((float(x) for x in finding.evidence.values() if isinstance(x, (int, float))), 0.0)
    place = ("reference", None, node, tensor, value)
    return Hazard(finding.severity, *place, finding.text, finding.cure, finding.code, finding.evidence)


def _interface_hazard(finding: Finding) -> Hazard:
    where = finding.where
    tensor = ", ".join([output.name for output in where.outputs[:1]] or ["the model"])
    node = where.nodes[0] if where.nodes else None
    value = float(len(where.outputs))
    return Hazard(finding.severity, "output", node, None, tensor, value, finding.text, finding.cure, finding.code)


def _unknown(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    return sum(name not in shapes and name not in model.initializers for name in computed)


def _operators(grouped: GroupedModel, shapes: ShapeTable) -> tuple[OperatorSummary, ...]:
    model = grouped.model
    folded = shape_facts(model).folded
    found: dict[str, OperatorSummary] = {}
    for node in model.nodes:
        if node.op_type == "Constant" and node.is_standard:
            continue
        name = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
        before = found.get(name, OperatorSummary(name, 0, 0, 0.0, ""))
        fixed = before.fixed or ("" if node.name in grouped.owners else node_rule(model, node).fixed or "")
        is_free = node.has_subgraph or node.op_type in VIEWS or is_folded(node, folded)
        flops = 0.0 if is_free else node_flops(node, shapes)[0]
        here = node.name in grouped.owners
        found[name] = OperatorSummary(name, before.count + 1, before.grouped + here, before.flops + flops, fixed)
    return tuple(sorted(found.values(), key=lambda o: (-o.flops, -o.count, o.name)))
