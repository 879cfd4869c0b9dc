"""Before the search: samples and reference outputs on disk, the baseline checked, the ranges observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from mptune.data.run_outputs import HELD_OUT_NAMES_JSON
from mptune.data.samples import CalibrationSet
from mptune.engines.base import Failure, ReferenceReport, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import READ_ERRORS, read_json, write_json
from mptune.finding import Finding
from mptune.graph.casting.value_types import unsupported, value_types
from mptune.graph.fused import of_model
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.find import find_split
from mptune.graph.hazards.hazard import Hazard, near_the_end
from mptune.graph.hazards.masks import masked_row_findings
from mptune.graph.hazards.observed_values import ObservedValues
from mptune.graph.loading.model import Model
from mptune.graph.plan import REDUCED, Precision
from mptune.json_form import JsonForm
from mptune.targets.memory import memory_need, memory_warnings
from mptune.targets.target import Target, profile_warnings
from mptune.tuning.failures import did_not_run
from mptune.tuning.listener import Listener
from mptune.tuning.reasons.reference import training_findings, without_repetition
from mptune.tuning.space import NamedSpace, SearchSpace, make_space
from mptune.tuning.steps.attempts import in_fresh_processes
from mptune.tuning.steps.baseline import check_ranges, check_reference, optimisation_findings, stop_at_errors
from mptune.tuning.steps.kernels import MissingKernels


def split_groups(
    context: RunContext, observations: Observations, kernels: MissingKernels
) -> tuple[GroupedModel, tuple[Hazard, ...]]:
    """The groups as they are searched (``find_split``), and their hazards."""
    fused = of_model(context.model, kernels.fused)
    return find_split(context.grouped, observations.observed, context.precisions, fused)


def search_space(
    context: RunContext,
    named: NamedSpace,
    hazards: Sequence[Hazard],
    observations: Observations,
    kernels: MissingKernels,
) -> SearchSpace:
    """What may be searched."""
    grouped, precisions = context.grouped, context.precisions
    asked = [precision for precision in REDUCED if precision in precisions]
    lacking = {p: unsupported(value_types(grouped), p) | kernels.pins(grouped, p) for p in asked}
    lacking.setdefault(Precision.FP16, kernels.pins(grouped))  # its reasons are told of groups that stay in FP32
    space = make_space(grouped, named, hazards, observations.absmax, lacking, precisions, kernels.not_emulated)
    return replace(space, warnings=(*space.warnings, *near_the_end(hazards)))


@dataclass(frozen=True)
class Observations(JsonForm):
    """What the untouched model showed on the samples; kept in the run directory, so that it is looked at once.

    Attributes:
        observed: what the values were on the search samples.
        warnings: of the checks, one line each.
        optimisation_error: output -> how far ONNX Runtime's graph optimisations change it (``ReferenceReport``).
        findings: about the model in FP32, of the search samples and the held-out ones.
    """

    observed: ObservedValues
    warnings: tuple[str, ...] = ()
    optimisation_error: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def absmax(self) -> Mapping[str, float]:
        """Tensor -> largest finite magnitude on the search samples."""
        return self.observed.absmax

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor -> concrete shape on the first search sample."""
        return self.observed.shapes

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Observations | None:
        """Read what ``save`` wrote; None where there is nothing that can be read."""
        try:
            return cls.from_json(read_json(path))
        except READ_ERRORS:
            return None


def save_samples(context: RunContext, search: CalibrationSet, held_out: CalibrationSet) -> None:
    """Write both sets of samples where jobs find them."""
    search.save(context.samples("search"))
    held_out.save(context.samples("held_out"))
    if held_out.names:
        write_json(context.data_dir / HELD_OUT_NAMES_JSON, list(held_out.names))


def observed_findings(
    observations: Observations, grouped: GroupedModel, indices: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """What the untouched model showed on the samples that has a code."""
    first = indices[0] if indices else 0
    return (
        *observations.findings,
        *optimisation_findings(observations.optimisation_error, grouped.model, "search", first, observations.findings),
        *masked_row_findings(grouped, observations.observed, "search", observations.findings),
    )


def observe(
    toolchain: Toolchain,
    listener: Listener,
    model: Model | None = None,
    indices: Mapping[SampleSet, Sequence[int]] = MappingProxyType({}),
    *,
    skip: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Observations:
    """Take the references, check them, and observe the ranges."""
    findings = () if model is None else training_findings(model, "search", is_run=True)
    if not skip:
        stop_at_errors(findings)
    listener.stage("computing the reference outputs")
    reference = _reference(toolchain, "search", listener)
    findings += check_reference(reference, indices=indices.get("search", ()), skip=skip, model=model)
    held_out = _reference(toolchain, "held_out", listener)
    others = check_reference(held_out, indices=indices.get("held_out", ()), skip=skip)
    codes = {(finding.code, finding.where.outputs) for finding in findings}
    findings += tuple(
        finding.on_held_out_samples() for finding in others if (finding.code, finding.where.outputs) not in codes
    )
    meanwhile()
    listener.stage("observing the ranges of values")
    ranges = in_fresh_processes(lambda: toolchain.observe(listener.stage), toolchain, listener, "observing ranges")
    if isinstance(ranges, Failure):
        raise did_not_run("the model cannot be observed in FP32", ranges, model)
    warnings = check_ranges(ranges)
    return Observations(
        ObservedValues(ranges, tuple(indices.get("search", ()))),
        tuple(dict.fromkeys(warnings)),
        {} if isinstance(reference, Failure) else reference.optimisation_error,
        without_repetition(findings),
    )


def _reference(toolchain: Toolchain, which: SampleSet, listener: Listener) -> ReferenceReport | Failure:
    return in_fresh_processes(lambda: toolchain.reference(which), toolchain, listener, "taking the reference")


def describe_device(toolchain: Toolchain, target: Target | None) -> Environment:
    """The machine, with warnings where it is measured and is not what the profile's figures hold for."""
    environment = toolchain.environment()
    if target is None or environment.jetson is None or toolchain.latency_source != "measured":
        return environment
    return environment.with_warnings(*profile_warnings(target, environment.jetson))


def check_memory(
    observations: Observations, model: Model, target: Target | None, *, measured: bool = False
) -> Observations:
    """The observations with a warning where the model will not fit the target's memory."""
    if target is None:
        return observations
    about_memory = memory_warnings(memory_need(model, observations.shapes), target, measured=measured)
    return replace(observations, warnings=(*observations.warnings, *about_memory))
