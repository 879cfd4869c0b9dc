"""What follows from the facts before any plan is evaluated: findings about the model, and the space that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mptune.engines.context import RunContext
from mptune.finding import Finding
from mptune.graph.casting.value_types import unsupported, value_types
from mptune.graph.fused import of_model
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.find import find_split
from mptune.graph.hazards.hazard import Hazard, hazard_findings, near_the_end
from mptune.graph.hazards.interface import interface_findings
from mptune.graph.hazards.masks import masked_row_findings
from mptune.graph.loading.model import Model
from mptune.graph.plan import REDUCED, Precision
from mptune.targets import findings as about_target
from mptune.targets.memory import memory_need, memory_warnings
from mptune.targets.target import Target
from mptune.tuning.facts import Observations
from mptune.tuning.space import NamedSpace, SearchSpace, make_space
from mptune.tuning.steps.baseline import optimisation_findings


def check_memory(
    observations: Observations, model: Model, target: Target | None, *, measured: bool = False
) -> Observations:
    """The observations with a warning where the model will not fit the target's memory."""
    if target is None:
        return observations
    about_memory = memory_warnings(memory_need(model, observations.shapes), target, measured=measured)
    return replace(observations, warnings=(*observations.warnings, *about_memory))


def observed_findings(
    observations: Observations, grouped: GroupedModel, indices: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """What the untouched model showed on the samples that has a code."""
    errors, first = observations.optimisation_error, indices[0] if indices else 0
    return (
        *observations.findings,
        *optimisation_findings(errors, grouped.model, "search", first, observations.findings),
        *masked_row_findings(grouped, observations.observed, "search", observations.findings),
    )


def model_findings(
    context: RunContext,
    target: Target | None,
    observations: Observations,
    hazards: Sequence[Hazard],
    predicted: Finding | None,
) -> tuple[Finding, ...]:
    """What is known about the model and its target before the search; ``predicted``: the target is not here."""
    grouped, shapes, settings = context.grouped, observations.shapes, context.settings
    not_here: tuple[Finding, ...] = ()
    if predicted is not None:
        not_here = about_target.not_here_findings(predicted, grouped, target, shapes, tf32=settings.tf32)
    fed = () if settings.rollout is None else tuple(settings.rollout.pairs)
    return (
        *not_here,
        *observations.kernels.findings(grouped),
        *about_target.already_mixed_findings(grouped, shapes, "search"),
        *about_target.quantised_findings(grouped, shapes, "search"),
        *interface_findings(context.model, "search", fed),
        *about_target.out_of_reach_findings(grouped, shapes, "search"),
        *hazard_findings(hazards, "search"),
    )


@dataclass(frozen=True)
class Searched:
    """The groups as they are searched, their hazards, and which of them may be what."""

    grouped: GroupedModel
    hazards: tuple[Hazard, ...]
    space: SearchSpace


def search_space(context: RunContext, named: NamedSpace, observations: Observations) -> Searched:
    """What may be searched: nodes that hold values beyond FP16 are set apart (``find_split``), then groups pinned."""
    kernels, precisions = observations.kernels, context.precisions
    fused = of_model(context.model, kernels.fused)
    grouped, hazards = find_split(context.grouped, observations.observed, precisions, fused)
    asked = [precision for precision in REDUCED if precision in precisions]
    lacking = {p: unsupported(value_types(grouped), p) | kernels.pins(grouped, p) for p in asked}
    lacking.setdefault(Precision.FP16, kernels.pins(grouped))  # its reasons are told of groups that stay in FP32
    space = make_space(grouped, named, hazards, observations.absmax, lacking, precisions, kernels.not_emulated)
    return Searched(grouped, hazards, replace(space, warnings=(*space.warnings, *near_the_end(hazards))))
