"""What a model is made of, as a search would see it: groups, operators, FLOPs, bytes, hazards and pins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnx import TensorProto

from mptune.engines.jobs.ranges import seen_of
from mptune.graph.casting.support import unsupported
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_fitting_groups, find_groups
from mptune.graph.hazards.find import Hazard, find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import worst_first
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import all_tensors, tensor_nbytes
from mptune.graph.plan import Precision
from mptune.inspection.findings import model_findings
from mptune.inspection.observing import known_values
from mptune.inspection.operators import summarise_operators
from mptune.inspection.record import InspectedGroup, Inspection
from mptune.settings import Granularity, InMemory, SearchSettings
from mptune.targets.costs import group_costs, ungrouped_cost
from mptune.targets.flops import ShapeTable
from mptune.targets.memory import memory_need
from mptune.targets.unsearched.nothing import nothing_to_tune
from mptune.tuning.space import NamedSpace, SearchSpace, make_space
from mptune.tuning.steps.baseline import check_ranges

_WEIGHTS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


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
    values = known_values(grouped, data, batch)
    every = find_hazards(grouped, values.absmax, seen=seen_of(values.ranges))
    of_fp16 = [hazard for hazard in every if hazard.precision is Precision.FP16]
    about = model_findings(grouped, values)
    hazards = worst_first([*of_fp16, *about.as_hazards()])
    space = make_space(grouped, named, hazards, values.absmax)
    no_bf16 = _without_bf16(grouped, every)
    precisions = tuple(map(str, Precision))
    of_three = make_space(grouped, named, hazards, values.absmax, precisions=precisions, without_bf16=no_bf16)
    floats = [t for t in all_tensors(model.proto.graph) if t.data_type in _WEIGHTS]
    samples = values.samples
    return Inspection(
        model=model,
        parameters=sum(math.prod(t.dims) for t in floats),
        weight_bytes=sum(map(tensor_nbytes, floats)),
        memory=memory_need(model, values.shapes),
        granularity=granularity,
        space=named.name,
        groups=_inspected_groups(grouped, values.shapes, space, no_bf16, of_three.free),
        operators=summarise_operators(grouped, ShapeTable(model, values.shapes)),
        rest=ungrouped_cost(grouped, values.shapes),
        hazards=tuple(replace(h, severity="warning") if h.group and h.severity == "error" else h for h in hazards),
        assumed=values.assumed,
        unknown_shapes=_unknown(model, values.shapes),
        observed=None if samples is None else samples.source,
        samples=0 if samples is None else len(samples.samples),
        warnings=(
            *nothing_to_tune(grouped),
            *(samples.warnings if samples else ()),
            *check_ranges(values.ranges),
            *space.warnings,
        ),
        findings=about.with_hazards(of_fp16),
    )


def _inspected_groups(
    grouped: GroupedModel,
    shapes: Mapping[str, tuple[int, ...]],
    space: SearchSpace,
    no_bf16: Mapping[str, str],
    free_of_three: Collection[str],
) -> tuple[InspectedGroup, ...]:
    """Each group with its cost and its pin; ``free_of_three`` are free where groups may be BF16, too."""
    costs = group_costs(grouped, shapes)
    repeats = Counter(group.pattern for group in grouped.groups)
    only_bf16 = space.pinned.keys() & set(free_of_three)
    return tuple(
        InspectedGroup(
            group,
            costs[group.id],
            space.pinned.get(group.id),
            repeats[group.pattern],
            no_bf16.get(group.id),
            group.id in only_bf16,
        )
        for group in grouped.groups
    )


def _without_bf16(grouped: GroupedModel, hazards: Sequence[Hazard]) -> dict[str, str]:
    """Why groups cannot be BF16 whatever the engine: themselves, their operators at this opset, their values."""
    lacking = unsupported(ValueTypes(grouped), Precision.BF16)
    return {
        **pinned_by_hazards(hazards, Precision.BF16, is_measured=True),
        **{group: lacking.reason(ops) for group, ops in lacking.groups.items()},
        **{group.id: group.pinned for group in grouped.groups if group.pinned is not None},
    }


def _unknown(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    return sum(name not in shapes and name not in model.initializers for name in computed)
