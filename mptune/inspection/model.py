"""What a model is made of, as a search would see it: groups, operators, FLOPs, bytes, values, hazards and pins."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnx import TensorProto

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.toolchains.reference import LEAST_OBSERVED
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.finding import Finding
from mptune.graph.facts import facts_of, node_rule
from mptune.graph.groups import GroupedModel, find_fitting_groups, find_groups
from mptune.graph.hazards import find, hazard
from mptune.graph.hazards.hazard import ObservedValues
from mptune.graph.hazards.static import interface_findings, state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.loading.tensors import all_tensors, tensor_nbytes
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, Precision
from mptune.graph.value_types import unsupported, value_types
from mptune.inspection.record import InspectedGroup, Inspection, OperatorSummary
from mptune.settings import DataSettings, InMemory, SearchSettings
from mptune.targets import costs
from mptune.targets import findings as target_findings
from mptune.targets import target as targets
from mptune.tuning.baseline import check_reference, optimisation_findings
from mptune.tuning.output_findings import training_findings, without_repetition
from mptune.tuning.space import NamedSpace, make_space

_OBSERVED_FLOPS = 1.5e11
"""What is computed to observe values, about; a few seconds of one core."""
_WEIGHTS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


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
        with Toolchain(None, targets.load_target("cpu"), context) as toolchain:
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
        granularity, groups = find_fitting_groups(model, budget or SearchSettings.budget)
    else:
        groups = find_groups(model, granularity)
    grouped = GroupedModel(model, groups)

    # Values are observed by running the model; without data, shapes come from the graph alone.
    samples: CalibrationSet | None = None
    assumed: Mapping[str, int] = {}
    observed, of_values, available = ObservedValues(), tuple[Finding, ...](), 0
    if data is None:
        static = static_shapes(model, batch)
        shapes, assumed = static.shapes, static.assumed
    else:
        samples = load_samples(model, data, batch)
        available = len(samples.samples)
        if not all_samples:  # a look at a large model takes fewer than a search
            given = static_shapes(model, given={n: array.shape for n, array in samples.samples[0].items()}).shapes
            all_costs = (costs.ungrouped_cost(grouped, given), *costs.group_costs(grouped, given).values())
            count = max(LEAST_OBSERVED, int(_OBSERVED_FLOPS / max(1.0, sum(cost.flops for cost in all_costs))))
            samples = replace(samples, samples=samples.samples[:count])
        observed, of_values = observe_values(grouped, samples, precisions, stage)
        shapes = observed.shapes
    is_run = samples is not None

    # What is ruled out, and so pinned: in a search with FP16 alone, and where groups may be BF16, too.
    grouped, every = find.find_split(grouped, observed)
    hazards = hazard.worst_first([hazard for hazard in every if hazard.precision is Precision.FP16])
    space = make_space(grouped, named, hazards, observed.absmax)
    no_bf16 = {
        **find.pinned_by_hazards(every, Precision.BF16, is_measured=True),
        **unsupported(value_types(grouped), Precision.BF16),
        **{group.id: group.pinned for group in grouped.groups if group.pinned is not None},
    }
    of_three = make_space(grouped, named, hazards, observed.absmax, {Precision.BF16: no_bf16}, precisions)
    only_bf16 = space.pinned.keys() & set(of_three.free)
    about = (
        *target_findings.nothing_to_tune(grouped, "inspect"),
        *training_findings(model, "inspect", is_run=is_run),
        *(replace(finding, origin="inspect") for finding in (samples.findings if samples else ())),
        *of_values,
        *target_findings.already_mixed_findings(grouped, shapes, "inspect"),
        *target_findings.quantised_findings(grouped, shapes, "inspect"),
        *target_findings.out_of_reach_findings(grouped, shapes, "inspect"),
        *interface_findings(model, "inspect"),
    )
    group_cost, repeats = costs.group_costs(grouped, shapes), Counter(group.pattern for group in grouped.groups)
    floats = [t for t in all_tensors(model.proto.graph) if t.data_type in _WEIGHTS]
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    return Inspection(
        model=model,
        parameters=sum(math.prod(t.dims) for t in floats),
        weight_bytes=sum(map(tensor_nbytes, floats)),
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
        warnings=(*(samples.warnings if samples else ()), *space.warnings),
        about=without_repetition(about),
    )


def _operators(grouped: GroupedModel, shapes: costs.ShapeTable) -> tuple[OperatorSummary, ...]:
    """The operators of a model, by FLOPs, the most first; a ``Constant`` computes nothing and is none of them."""
    model = grouped.model
    folded = facts_of(model).folded
    summaries: dict[str, OperatorSummary] = {}
    for node in model.nodes:
        if node.op_type == "Constant" and node.is_standard:
            continue
        name = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
        before = summaries.get(name, OperatorSummary(name, 0, 0, 0.0, ""))
        has_precision = node.name in grouped.owners
        fixed = before.fixed or ("" if has_precision else node_rule(model, node).fixed or "")
        is_free = node.has_subgraph or node.op_type in costs.VIEWS or costs.is_folded(node, folded)
        flops = before.flops + (0.0 if is_free else costs.node_flops(node, shapes)[0])
        summaries[name] = OperatorSummary(name, before.count + 1, before.grouped + has_precision, flops, fixed)
    return tuple(sorted(summaries.values(), key=lambda o: (-o.flops, -o.count, o.name)))
