"""What a model is made of, as a search would see it: groups, operators, FLOPs, bytes, values, hazards and pins."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import TensorProto

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.finding import Finding
from mptune.graph.casting.value_types import unsupported, value_types
from mptune.graph.facts import facts_of, node_rule
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_fitting_groups, find_groups
from mptune.graph.hazards.find import find_split, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard, worst_first
from mptune.graph.hazards.interface import interface_findings, state_inputs
from mptune.graph.hazards.observed_values import ObservedValues
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.loading.tensors import all_tensors, tensor_nbytes
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, Precision
from mptune.inspection.record import InspectedGroup, Inspection, OperatorSummary
from mptune.settings import DataSettings, Granularity, InMemory, SearchSettings
from mptune.targets.costs import VIEWS, ShapeTable, group_costs, is_folded, node_flops, ungrouped_cost
from mptune.targets.findings import already_mixed_findings, nothing_to_tune, out_of_reach_findings, quantised_findings
from mptune.targets.memory import memory_need
from mptune.targets.target import load_target
from mptune.tuning.reasons.reference import training_findings, without_repetition
from mptune.tuning.space import NamedSpace, SearchSpace, make_space
from mptune.tuning.steps.baseline import check_reference, optimisation_findings


def summarise_operators(grouped: GroupedModel, shapes: ShapeTable) -> tuple[OperatorSummary, ...]:
    """The operators of a model, by FLOPs, the most first; a ``Constant`` computes nothing and is none of them."""
    model = grouped.model
    folded = facts_of(model).folded
    summaries: dict[str, OperatorSummary] = {}
    for node in model.nodes:
        if node.op_type == "Constant" and node.is_standard:
            continue
        name = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
        before = summaries.get(name, OperatorSummary(name, 0, 0, 0.0, ""))
        fixed = before.fixed or ("" if node.name in grouped.owners else node_rule(model, node).fixed or "")
        is_free = node.has_subgraph or node.op_type in VIEWS or is_folded(node, folded)
        flops = 0.0 if is_free else node_flops(node, shapes)[0]
        here = node.name in grouped.owners
        summaries[name] = OperatorSummary(name, before.count + 1, before.grouped + here, before.flops + flops, fixed)
    return tuple(sorted(summaries.values(), key=lambda o: (-o.flops, -o.count, o.name)))


@dataclass(frozen=True)
class KnownValues:
    """What is known of a model's values.

    Attributes:
        shapes: name -> shape; a value whose shape is not known is absent.
        assumed: symbolic dimension -> the size that the shapes are taken for; empty where they were observed.
        samples: what the model was run on; None where it was not run.
        available: how many samples a search would run it on.
        observed: what the values were there; empty where it was not run.
    """

    shapes: Mapping[str, tuple[int, ...]]
    assumed: Mapping[str, int] = field(default_factory=dict)
    samples: CalibrationSet | None = None
    available: int = 0
    observed: ObservedValues = field(default_factory=ObservedValues)
    findings: tuple[Finding, ...] = ()


def known_values(
    grouped: GroupedModel,
    data: Path | InMemory | None,
    batch: int,
    stage: Callable[[str], object] | None = None,
    *,
    all_samples: bool = False,
) -> KnownValues:
    """Observe the values by running the model on the data; without data, take the shapes from the graph alone."""
    if data is None:
        static = static_shapes(grouped.model, batch)
        return KnownValues(static.shapes, static.assumed)
    every = load_samples(grouped.model, data, batch)
    samples = every
    if not all_samples:
        samples = replace(every, samples=every.samples[: _observed_count(grouped, every)])
    observed, findings = observe_values(grouped, samples, tuple(map(str, PRECISIONS)), stage)
    return KnownValues(observed.shapes, {}, samples, len(every.samples), observed, findings)


_OBSERVED_FLOPS = 1.5e11
"""What is computed to observe values, about; a few seconds of one core."""
_LEAST_OBSERVED = 4
"""Fewest samples, where there are as many, whatever they cost."""


def _observed_count(grouped: GroupedModel, samples: CalibrationSet) -> int:
    """On how many samples values are observed: a look at a large model takes fewer than a search."""
    shapes = static_shapes(grouped.model, given={n: array.shape for n, array in samples.samples[0].items()}).shapes
    costs = (ungrouped_cost(grouped, shapes), *group_costs(grouped, shapes).values())
    return max(_LEAST_OBSERVED, int(_OBSERVED_FLOPS / max(1.0, sum(cost.flops for cost in costs))))


def load_samples(model: Model, data: Path | InMemory, batch: int) -> CalibrationSet:
    """As many samples as a search would take."""
    settings = DataSettings(batch=batch)
    samples = load_calibration(data, model.inputs, settings, 0, state_inputs(model))
    return replace(samples, samples=samples.samples[: settings.max_search_samples])


def observe_values(
    grouped: GroupedModel,
    samples: CalibrationSet,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    stage: Callable[[str], object] | None = None,
) -> tuple[ObservedValues, tuple[Finding, ...]]:
    """Run the model over the samples in a worker: what its values are, and findings about the model."""
    with tempfile.TemporaryDirectory(prefix="mptune-inspect-") as folder:
        context = RunContext.in_folder(grouped, Path(folder), SearchSettings(precisions=tuple(precisions)))
        samples.save(context.samples("search"))
        with Toolchain(None, load_target("cpu"), context) as toolchain:
            ranges = toolchain.observe(stage)
            reference = ranges if isinstance(ranges, Failure) else toolchain.reference("search")
    if isinstance(ranges, Failure):
        gone = replace(ranges, log_path=None)
        raise did_not_run("the model cannot be observed in FP32", gone, grouped.model)
    if isinstance(reference, Failure):
        return ObservedValues(ranges), ()
    about = check_reference(reference, "inspect", skip=True)
    before = (*about, *training_findings(grouped.model, "inspect", is_run=True))
    optimised = optimisation_findings(reference.optimisation_error, grouped.model, "inspect", earlier=before)
    return ObservedValues(ranges), (*about, *optimised)


def model_findings(grouped: GroupedModel, values: KnownValues) -> tuple[Finding, ...]:
    """What is found about the model as a whole, of what is known of its values."""
    samples, shapes, model = values.samples, values.shapes, grouped.model
    return without_repetition(
        (
            *nothing_to_tune(grouped, "inspect"),
            *training_findings(model, "inspect", is_run=samples is not None),
            *(() if samples is None else (replace(finding, origin="inspect") for finding in samples.findings)),
            *values.findings,
            *already_mixed_findings(grouped, shapes, "inspect"),
            *quantised_findings(grouped, shapes, "inspect"),
            *out_of_reach_findings(grouped, shapes, "inspect"),
            *interface_findings(model, "inspect"),
        )
    )


_WEIGHTS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


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
    granularity: Granularity = named.file.granularity
    if granularity == "auto":
        granularity, groups = find_fitting_groups(model, budget or SearchSettings().budget)
    else:
        groups = find_groups(model, granularity)
    grouped = GroupedModel(model, groups)
    values = known_values(grouped, data, batch, stage, all_samples=all_samples)
    grouped, every = find_split(grouped, values.observed)
    of_fp16 = [hazard for hazard in every if hazard.precision is Precision.FP16]
    hazards = worst_first(of_fp16)
    space = make_space(grouped, named, hazards, values.observed.absmax)
    no_bf16 = _without_bf16(grouped, every)
    precisions = tuple(map(str, PRECISIONS))
    of_three = make_space(grouped, named, hazards, values.observed.absmax, {Precision.BF16: no_bf16}, precisions)
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
        hazards=tuple(
            replace(h, severity="warning") if h.place.group and h.severity == "error" else h for h in hazards
        ),
        assumed=values.assumed,
        unknown_shapes=_unknown(model, values.shapes),
        observed=None if samples is None else samples.source,
        samples=0 if samples is None else len(samples.samples),
        available=values.available,
        warnings=(*(samples.warnings if samples else ()), *space.warnings),
        about=model_findings(grouped, values),
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
    return {
        **pinned_by_hazards(hazards, Precision.BF16, is_measured=True),
        **unsupported(value_types(grouped), Precision.BF16),
        **{group.id: group.pinned for group in grouped.groups if group.pinned is not None},
    }


def _unknown(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    return sum(name not in shapes and name not in model.initializers for name in computed)
