"""What a model is made of, as a search would see it: groups, operators, FLOPs, bytes, values, hazards and pins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnx import TensorProto

from mptune.engines.toolchains.reference import LEAST_OBSERVED
from mptune.finding import Finding, by_severity
from mptune.graph import groups as grouping
from mptune.graph.facts import facts_of, node_rule
from mptune.graph.hazards import find, hazard, static
from mptune.graph.loading import tensors
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import PRECISIONS, Precision
from mptune.graph.value_types import unsupported, value_types
from mptune.observing import load_samples, observe_values
from mptune.settings import Granularity, InMemory, SearchSettings
from mptune.targets import costs, findings as target_findings
from mptune.tuning.output_findings import training_findings, without_repetition
from mptune.tuning.refining import RefinedGroup
from mptune.tuning.space import NamedSpace, Pin, make_space

_OBSERVED_FLOPS = 1.5e11
"""What is computed to observe values, about; a few seconds of one core."""
_WEIGHTS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


@dataclass(frozen=True)
class InspectedGroup:
    """One layer group."""

    group: grouping.LayerGroup
    cost: costs.GroupCost
    pin: Pin | None  # its precision and the reason, where it is not searched
    repeats: int  # groups of the model that have its structure, itself included
    no_bf16: str | None = None  # why it cannot be BF16; None where it could be
    only_bf16: bool = False  # it is pinned to FP32 because FP16 cannot be right, and BF16 could be

    def to_json(self) -> dict[str, Any]:
        """The group in ``mptune inspect --json``."""
        group, pin = self.group, self.pin
        return {
            "id": group.id,
            "name": group.name,
            "kind": group.kind,
            "ops": dict(group.ops),
            "nodes": list(group.nodes),
            "pattern": group.pattern,
            "repeats": self.repeats,
            **_cost(self.cost),
            "pinned": None if pin is None else {"precision": str(pin.precision), "reason": pin.reason},
            "no_bf16": self.no_bf16,
            "only_bf16": self.only_bf16,
        }


@dataclass
class OperatorSummary:
    """All nodes of one operator."""

    name: str  # with the domain where that is not ONNX's own
    nodes: int = 0
    with_precision: int = 0
    flops: float = 0.0
    fixed: str = ""  # why the others have no precision; "" where nothing is FP32 about them


@dataclass(frozen=True)
class Inspection:
    """What ``inspect`` found in a model: groups, operators, costs, hazards.

    Attributes:
        parameters: how many floating-point constants there are, ``weight_bytes`` in how many bytes.
        memory: what all-FP32 and all-FP16 need of it at once.
        space: name of the search space whose pins count.
        groups: in topological order.
        operators: by FLOPs, the most first.
        rest: what nodes without a precision compute and move together.
        hazards: the most severe first.
        assumed: symbolic dimension -> the size that FLOPs and bytes are counted for; empty where shapes were observed.
        unknown_shapes: how many FP32 values have no known shape, and count as one element per unknown dimension.
        observed: what the samples are called whose values and shapes were observed; None where none were.
        refined: a line for each group that a search splits.
        samples: how many; ``available`` are as many as a search would run.
        warnings: that have no code, one line each.
        about: findings about the model as a whole, and about the data.
    """

    model: Model
    parameters: int
    weight_bytes: int
    memory: costs.MemoryNeed
    granularity: Granularity
    space: str
    groups: tuple[InspectedGroup, ...]
    operators: tuple[OperatorSummary, ...]
    rest: costs.GroupCost
    hazards: tuple[hazard.Hazard, ...]
    assumed: Mapping[str, int]
    unknown_shapes: int
    observed: str | None
    samples: int
    available: int
    warnings: tuple[str, ...]
    refined: tuple[str, ...] = ()
    about: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those about the model, and the hazards that have a code, the most severe first."""
        return by_severity((*self.about, *hazard.hazard_findings(self.hazards, "inspect")))

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
            "samples_available": self.available,
            "groups": [each.to_json() for each in self.groups],
            "operators": list(map(asdict, self.operators)),
            "rest": _cost(self.rest),
            "refined": list(self.refined),
            "hazards": [each.to_json() for each in self.hazards],
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": list(self.warnings),
        }


def _cost(cost: costs.GroupCost) -> dict[str, float]:
    return {"flops": cost.flops, "fp32_bytes": cost.fp32_bytes, "fp16_bytes": cost.fp16_bytes}


def _value(info: tensors.TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": None if info.shape is None else list(info.shape)}


def inspect_model(
    model: Model,
    named: NamedSpace,
    data: Path | InMemory | None = None,
    batch: int = 1,
    budget: int | None = None,
    stage: Callable[[str], object] | None = None,
    *,
    all_samples: bool = False,
) -> Inspection:
    """Find the groups, operators, costs, hazards and pins of a model, as a search with this space and data would."""
    granularity, precisions = named.file.granularity, tuple(map(str, PRECISIONS))
    if granularity == "auto":
        granularity, groups = grouping.find_fitting_groups(model, budget or SearchSettings.budget)
    else:
        groups = grouping.find_groups(model, granularity)
    grouped = grouping.GroupedModel(model, groups)

    # Values are observed by running the model; without data, shapes come from the graph alone.
    samples = None
    assumed: Mapping[str, int] = {}
    observed, of_values, available = hazard.ObservedValues(), tuple[Finding, ...](), 0
    refined: tuple[RefinedGroup, ...] = ()
    if data is None:
        table = static_shapes(model, batch)
        shapes, assumed = table.shapes, table.assumed
    else:
        samples = load_samples(model, data, batch)
        available = len(samples.samples)
        if not all_samples:  # a look at a large model takes fewer than a search
            given = static_shapes(model, given={n: array.shape for n, array in samples.samples[0].items()}).shapes
            all_costs = (costs.ungrouped_cost(grouped, given), *costs.group_costs(grouped, given).values())
            count = max(LEAST_OBSERVED, int(_OBSERVED_FLOPS / max(1.0, sum(cost.flops for cost in all_costs))))
            samples = replace(samples, samples=samples.samples[:count])
        observed, of_values, refined = observe_values(grouped, samples, precisions, stage or (lambda _: None))
        shapes = observed.shapes
    is_run = samples is not None

    # What is ruled out, and so pinned: in a search with FP16 alone, and where groups may be BF16, too.
    names = {group.id: group.name for group in groups}
    if refined:
        apart = [node for each in refined for node in each.nodes]
        grouped = grouping.GroupedModel(model, grouping.set_apart(model, groups, apart))
    every = find.find_hazards(grouped, observed)
    hazards = hazard.worst_first([each for each in every if each.precision is Precision.FP16])
    space = make_space(grouped, named, hazards)
    no_bf16 = {
        **find.pinned_by_hazards(every, Precision.BF16, is_measured=True),
        **unsupported(value_types(grouped), Precision.BF16),
        **{group.id: group.pinned for group in grouped.groups if group.pinned is not None},
    }
    of_three = make_space(grouped, named, hazards, {Precision.BF16: no_bf16}, precisions)
    only_bf16 = space.pinned.keys() & set(of_three.free)
    about = (
        *target_findings.nothing_to_tune(grouped, "inspect"),
        *training_findings(model, "inspect", is_run=is_run),
        *(replace(finding, origin="inspect") for finding in (samples.findings if samples else ())),
        *of_values,
        *target_findings.already_mixed_findings(grouped, shapes, "inspect"),
        *target_findings.quantised_findings(grouped, shapes, "inspect"),
        *target_findings.out_of_reach_findings(grouped, shapes, "inspect"),
        *static.interface_findings(model, "inspect"),
    )
    group_cost, repeats = costs.group_costs(grouped, shapes), Counter(group.pattern for group in grouped.groups)
    floats = [t for t in tensors.all_tensors(model.proto.graph) if t.data_type in _WEIGHTS]
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    return Inspection(
        model=model,
        parameters=sum(math.prod(t.dims) for t in floats),
        weight_bytes=sum(map(tensors.tensor_nbytes, floats)),
        memory=costs.memory_need(model, shapes),
        granularity=granularity,
        space=named.name,
        groups=tuple(
            InspectedGroup(
                g, group_cost[g.id], space.pinned.get(g.id), repeats[g.pattern], no_bf16.get(g.id), g.id in only_bf16
            )
            for g in grouped.groups
        ),
        operators=_operators(grouped, costs.ShapeTable(model, shapes)),
        rest=costs.ungrouped_cost(grouped, shapes),
        hazards=tuple(
            replace(h, severity="warning") if h.place.group and h.severity == "error" else h for h in hazards
        ),
        assumed=assumed,
        unknown_shapes=sum(name not in shapes and name not in model.initializers for name in computed),
        observed=None if samples is None else samples.source,
        samples=0 if samples is None else len(samples.samples),
        available=available,
        refined=tuple(each.text(names[each.group]) for each in refined),
        warnings=(*(samples.warnings if samples else ()), *space.warnings),
        about=without_repetition(about),
    )


def _operators(grouped: grouping.GroupedModel, shapes: costs.ShapeTable) -> tuple[OperatorSummary, ...]:
    """The operators of a model, by FLOPs, the most first; a ``Constant`` computes nothing and is none of them."""
    model, folded = grouped.model, facts_of(grouped.model).folded
    summaries: dict[str, OperatorSummary] = {}
    for node in model.nodes:
        if node.op_type == "Constant" and node.is_standard:
            continue
        name = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
        summary = summaries.setdefault(name, OperatorSummary(name))
        summary.nodes += 1
        if node.name in grouped.owners:
            summary.with_precision += 1
        else:
            summary.fixed = summary.fixed or node_rule(model, node).fixed or ""
        if not (node.has_subgraph or node.op_type in costs.VIEWS or costs.is_folded(node, folded)):
            summary.flops += costs.node_flops(node, shapes)[0]
    return tuple(sorted(summaries.values(), key=lambda each: (-each.flops, -each.nodes, each.name)))
