"""What is known of a model before any plan is evaluated, and the search space that follows from it.

What it shows in FP32 on the samples, and what its engine lacks, are asked once and kept in one file of the run
directory. It is written last: a run that has it is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mptune.engines.base import Failure, MissingKernel
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_form
from mptune.finding import Finding, Where
from mptune.graph.facts import FusedNodes
from mptune.graph.groups import GroupedModel, set_apart
from mptune.graph.hazards import find, hazard, static
from mptune.graph.loading.model import Model
from mptune.graph.ops import RECURRENT
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import unsupported, value_types
from mptune.json_form import JsonForm
from mptune.targets import costs, findings as about_target
from mptune.targets.target import Target
from mptune.tuning import baseline, space
from mptune.tuning.bench import Listener, Logged, run_job, run_needed_job
from mptune.tuning.output_findings import training_findings, without_repetition
from mptune.tuning.refining import RefinedGroup, refine
from mptune.tuning.texts import format_ms


@dataclass(frozen=True)
class MissingKernels(JsonForm):
    """What an engine lacks kernels for, and what it computes as one.

    Attributes:
        nodes: precision -> the nodes that another execution provider, or none, runs in it.
        warnings: one line each.
        fused: nodes that it computes as one, with FP32 inside: values there keep no group out of FP16.
        not_emulated: operators whose errors are to be measured, as emulation does not give them.
    """

    nodes: Mapping[Precision, tuple[MissingKernel, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    fused: tuple[FusedNodes, ...] = ()
    not_emulated: tuple[str, ...] = ()

    def pins(self, grouped: GroupedModel, precision: Precision = Precision.FP16) -> dict[str, str]:
        """Group id -> why it cannot have a reduced precision, of the groups that hold such a node."""
        reasons: dict[str, str] = {}
        for node in self.nodes.get(precision, ()):
            runs = f": {node.actual} runs it" if node.actual else ""
            lacks = f"{node.wanted} has no {precision.name} kernel for {node.op_type}{runs}"
            if node.node in grouped.owners:
                reasons.setdefault(grouped.owners[node.node], node.reason or lacks)
        return reasons

    def findings(self, grouped: GroupedModel) -> tuple[Finding, ...]:
        """One finding for each precision and operator."""
        findings = []
        for precision, nodes in self.nodes.items():
            inside = [node for node in nodes if node.node in grouped.owners]
            for op_type in dict.fromkeys(node.op_type for node in inside):
                alike = [node for node in inside if node.op_type == op_type]
                first, names = alike[0], tuple(node.node for node in alike)
                groups = tuple(dict.fromkeys(grouped.owners[name] for name in names))
                evidence: dict[str, int | float | str] = {"operator": op_type, "nodes": len(alike)}
                evidence |= {"fp32_provider": first.wanted, f"{precision}_provider": first.actual or "none"}
                finding = Finding.from_code(
                    f"no-{precision}-kernel",
                    "search",
                    Where(nodes=names, groups=groups),
                    evidence,
                    kind="stated" if first.reason else "elsewhere" if first.actual else "nowhere",
                    reason=first.reason,
                    precision=precision.name,
                    provider=first.actual,
                    groups=len(groups),
                )
                findings.append(finding)
        return tuple(findings)


def ask_for_kernels(
    toolchain: Toolchain, precisions: Sequence[str] = ("fp32", "fp16"), listener: Listener | None = None
) -> MissingKernels:
    """Ask the engine what it lacks and what it fuses; what it does not answer is a warning."""
    nodes: dict[Precision, tuple[MissingKernel, ...]] = {}
    warnings: list[str] = []
    for precision in REDUCED:
        # FP16's are told of groups that stay in FP32, whatever is searched; what is stored as FP32 has FP32's.
        is_searched = precision in precisions and precision.stored is not Precision.FP32
        if precision is not Precision.FP16 and not is_searched:
            continue
        job, what = lambda asked=precision: toolchain.missing_kernels(asked), "asking which operators the engine lacks"
        answer = run_job(job, toolchain, listener or Logged(), what)
        if isinstance(answer, Failure):
            warnings.append(
                f"operators without an {precision.name} kernel are not known, since the all-{precision.name} engine "
                f"does not open ({answer.kind.value}: {answer.message}): the search learns from builds alone"
            )
        elif answer:
            nodes[precision] = answer
    fused = toolchain.fused_nodes()
    # Kernels of recurrent operators approximate sigmoid and tanh (``benchmarks.roundings`` of commit 672f8217).
    is_measured = toolchain.error_source == "measured" and toolchain.emulation_holds
    not_emulated = tuple(sorted(RECURRENT)) if is_measured else ()
    return MissingKernels(nodes, tuple(warnings), () if isinstance(fused, Failure) else fused, not_emulated)


@dataclass(frozen=True)
class Observations(JsonForm):
    """What the untouched model showed on the samples.

    Attributes:
        observed: what the values were on the search samples.
        warnings: of the checks, one line each.
        findings: about the model in FP32, of the search samples and the held-out ones.
        kernels: what the engine lacks.
        refined: groups that are parted.
    """

    observed: hazard.ObservedValues
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    kernels: MissingKernels = MissingKernels()
    refined: tuple[RefinedGroup, ...] = ()

    @property
    def nodes_apart(self) -> tuple[str, ...]:
        """The nodes that have a group of their own for that."""
        return tuple(node for group in self.refined for node in group.nodes)

    @classmethod
    def load(cls, path: Path) -> Observations | None:
        """Read the file of a run; None where there is none."""
        return read_form(cls, path, "copy the run directory again, or delete it: the same `mptune search` makes it")


def observe(
    toolchain: Toolchain,
    listener: Listener,
    model: Model | None = None,
    target: Target | None = None,
    indices: tuple[Sequence[int], Sequence[int]] = ((), ()),
    precisions: Sequence[str] = ("fp32", "fp16"),
    *,
    skip: bool = False,
) -> Observations:
    """Take the references, check them, ask for kernels, and observe the ranges of values.

    Args:
        target: whose memory the model may not fit, which is a warning.
        indices: of the search samples and of the held-out ones in the user's data.
        skip: go on where a finding says that precision is not the problem.

    Raises:
        BaselineError: the model does not run, or is broken, in FP32.
    """
    findings = () if model is None else training_findings(model, "search", is_run=True)
    if not skip:
        baseline.stop_at_errors(findings)
    listener.stage("computing the reference outputs")
    toolchain.open_baselines()
    what = "taking the reference"
    reference = run_needed_job(lambda: toolchain.reference("search"), toolchain, listener, what)
    findings += baseline.check_reference(reference, indices=indices[0], skip=skip, model=model)
    toolchain.open_first()  # on a GPU ranges are observed meanwhile, too
    held_out = run_needed_job(lambda: toolchain.reference("held_out"), toolchain, listener, what)
    named = {(finding.code, finding.where.outputs) for finding in findings}
    new = baseline.check_reference(held_out, indices=indices[1], skip=skip)
    findings += tuple(f.on_held_out_samples() for f in new if (f.code, f.where.outputs) not in named)
    kernels = ask_for_kernels(toolchain, precisions, listener)
    listener.stage("observing the ranges of values")
    ranges = run_needed_job(lambda: toolchain.observe(listener.stage), toolchain, listener, "observing ranges")
    if isinstance(ranges, Failure):
        raise did_not_run("the model cannot be observed in FP32", ranges, model)
    if (first := toolchain.evaluate_first()) is not None:
        listener.stage(f"all-FP32 takes {format_ms(first.latency.median_ms)} ms")
    observed = hazard.ObservedValues(ranges, tuple(indices[0]))
    warnings: tuple[str, ...] = ()
    if model is not None and target is not None:
        need, is_measured = costs.memory_need(model, observed.shapes), toolchain.latency_source == "measured"
        warnings = costs.memory_warnings(need, target, measured=is_measured)
    findings = without_repetition(findings)
    if model is not None and not isinstance(reference, Failure):
        errors = reference.optimisation_error
        findings += baseline.optimisation_findings(errors, model, "search", indices[0][0], findings)
    return Observations(observed, warnings, findings, kernels)


def with_refined(
    observations: Observations, toolchain: Toolchain, listener: Listener, context: RunContext
) -> Observations:
    """With the groups that measurement says are to be parted."""
    fused, grouped = observations.kernels.fused, context.grouped
    hazards = find.find_hazards(grouped, observations.observed, context.precisions, fused)
    refined = refine(toolchain, grouped, hazards, context.settings, listener.stage)
    names = {group.id: group.name for group in grouped.groups}
    for each in refined:
        listener.stage(each.text(names[each.group]))
    return replace(observations, refined=refined)


def model_findings(
    context: RunContext,
    target: Target | None,
    observations: Observations,
    hazards: Sequence[hazard.Hazard],
    predicted: Finding | None,
) -> tuple[Finding, ...]:
    """What is known about the model and its target; ``predicted`` is the finding that the target is not here."""
    grouped, shapes, settings = context.grouped, observations.observed.shapes, context.settings
    not_here: tuple[Finding, ...] = ()
    if predicted is not None:
        not_here = about_target.not_here_findings(predicted, grouped, target, shapes, tf32=settings.tf32)
    fed = () if settings.rollout is None else tuple(settings.rollout.pairs)
    return (
        *not_here,
        *observations.kernels.findings(grouped),
        *about_target.already_mixed_findings(grouped, shapes, "search"),
        *about_target.quantised_findings(grouped, shapes, "search"),
        *static.interface_findings(context.model, "search", fed),
        *about_target.out_of_reach_findings(grouped, shapes, "search"),
        *hazard.hazard_findings(hazards, "search"),
    )


def find_space(
    context: RunContext, named: space.NamedSpace, observations: Observations
) -> tuple[GroupedModel, tuple[hazard.Hazard, ...], space.SearchSpace]:
    """The groups as they are searched, refined where that was found to be worth it, their hazards, and the pins."""
    kernels, observed, precisions, grouped = (
        observations.kernels,
        observations.observed,
        context.precisions,
        context.grouped,
    )
    if observations.refined:
        grouped = replace(grouped, groups=set_apart(grouped.model, grouped.groups, observations.nodes_apart))
    hazards = find.find_hazards(grouped, observed, precisions, kernels.fused)
    asked = [precision for precision in REDUCED if precision in precisions]
    lacking = {p: unsupported(value_types(grouped), p) | kernels.pins(grouped, p) for p in asked}
    lacking.setdefault(Precision.FP16, kernels.pins(grouped))  # its reasons are told of groups that stay in FP32
    free = space.make_space(grouped, named, hazards, lacking, precisions, kernels.not_emulated)
    return grouped, hazards, free
