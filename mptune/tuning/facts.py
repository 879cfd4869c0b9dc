"""What the model in FP32 shows on the samples, and what its engine is known to lack: asked once, before the search.

All of it is kept in one file of the run directory, which is written last: a run that has it is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mptune.engines.base import Failure, MissingKernel, SampleSet
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_form, write_json
from mptune.finding import Finding, Where
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.observed_values import ObservedValues
from mptune.graph.loading.model import Model
from mptune.graph.ops import RECURRENT
from mptune.graph.plan import REDUCED, Precision
from mptune.json_form import JsonForm
from mptune.tuning.failures import did_not_run
from mptune.tuning.listener import Listener
from mptune.tuning.reasons.reference import training_findings, without_repetition
from mptune.tuning.steps.attempts import in_fresh_processes
from mptune.tuning.steps.baseline import check_ranges, check_reference, stop_at_errors


@dataclass(frozen=True)
class MissingKernels(JsonForm):
    """What an engine lacks kernels for, and what it computes as one.

    Attributes:
        nodes: precision -> the nodes that another execution provider, or none, runs in it.
        warnings: one line each.
        fused: nodes that it computes as one, with FP32 inside: values there are no reason to keep a group out of FP16.
        not_emulated: operators whose errors it is to be measured for, as emulation does not give them.
    """

    nodes: Mapping[Precision, tuple[MissingKernel, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    fused: tuple[FusedNodes, ...] = ()
    not_emulated: tuple[str, ...] = ()

    def pins(self, grouped: GroupedModel, precision: Precision = Precision.FP16) -> dict[str, str]:
        """Group id -> why it cannot have a reduced precision, of the groups that hold such a node."""
        reasons: dict[str, str] = {}
        for node in self.nodes.get(precision, ()):
            group = grouped.owners.get(node.node)
            if group is not None:
                runs = f": {node.actual} runs it" if node.actual else ""
                lacks = f"{node.wanted} has no {precision.name} kernel for {node.op_type}{runs}"
                reasons.setdefault(group, node.reason or lacks)
        return reasons

    def findings(self, grouped: GroupedModel) -> tuple[Finding, ...]:
        """One finding for each precision and operator."""
        lacking: dict[tuple[Precision, str], list[MissingKernel]] = {}
        for precision, nodes in self.nodes.items():
            for node in nodes:
                if node.node in grouped.owners:
                    lacking.setdefault((precision, node.op_type), []).append(node)
        findings = []
        for (precision, op_type), alike in lacking.items():
            first, groups = alike[0], tuple(dict.fromkeys(grouped.owners[node.node] for node in alike))
            finding = Finding.of(
                f"no-{precision}-kernel",
                "search",
                Where(nodes=tuple(node.node for node in alike), groups=groups),
                {
                    "operator": op_type,
                    "nodes": len(alike),
                    "fp32_provider": first.wanted,
                    f"{precision}_provider": first.actual or "none",
                },
                kind="stated" if first.reason else "elsewhere" if first.actual else "nowhere",
                reason=first.reason,
                precision=precision.name,
                provider=first.actual,
                groups=len(groups),
            )
            findings.append(finding)
        return tuple(findings)


def ask_for_kernels(toolchain: Toolchain, precisions: Sequence[str] = ("fp32", "fp16")) -> MissingKernels:
    """Ask the engine, in a fresh process where the first one fails; a second failure is a warning."""
    nodes: dict[Precision, tuple[MissingKernel, ...]] = {}
    warnings: list[str] = []
    for precision in REDUCED:
        # FP16's are told of groups that stay in FP32, whatever is searched; what is stored as FP32 has FP32's.
        is_wanted = precision in precisions and precision.stored is not Precision.FP32
        if precision is not Precision.FP16 and not is_wanted:
            continue
        answer = toolchain.missing_kernels(precision)
        if isinstance(answer, Failure):
            toolchain.restart()
            answer = toolchain.missing_kernels(precision)
        if isinstance(answer, Failure):
            warnings.append(
                f"operators without an {precision.name} kernel are not known, since the all-{precision.name} engine "
                f"does not open ({answer.kind.value}: {answer.message}): the search learns from builds alone"
            )
        elif answer:
            nodes[precision] = answer
    fused = toolchain.fused_nodes()
    if isinstance(fused, Failure):
        toolchain.restart()
        fused = ()
    # Their kernels approximate sigmoid and tanh (``benchmarks.roundings`` of commit 672f8217).
    is_measured = toolchain.error_source == "measured" and toolchain.emulation_holds
    return MissingKernels(nodes, tuple(warnings), fused, tuple(sorted(RECURRENT)) if is_measured else ())


@dataclass(frozen=True)
class Observations(JsonForm):
    """What the untouched model showed on the samples; kept in the run directory, so that it is looked at once.

    Attributes:
        observed: what the values were on the search samples.
        warnings: of the checks, one line each.
        optimisation_error: output -> how far ONNX Runtime's graph optimisations change it (``ReferenceReport``).
        findings: about the model in FP32, of the search samples and the held-out ones.
        kernels: what the engine lacks.
    """

    observed: ObservedValues
    warnings: tuple[str, ...] = ()
    optimisation_error: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    kernels: MissingKernels = MissingKernels()

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
        """Read what ``save`` wrote; None where there is no file."""
        return read_form(cls, path, "copy the run directory again, or delete it: the same `mptune search` makes it")


def observe(
    toolchain: Toolchain,
    listener: Listener,
    model: Model | None = None,
    indices: Mapping[SampleSet, Sequence[int]] = MappingProxyType({}),
    precisions: Sequence[str] = ("fp32", "fp16"),
    *,
    skip: bool = False,
) -> Observations:
    """Take the references, check them, ask for kernels, and observe the ranges of values.

    Args:
        indices: of the samples of each set in the user's data.
        skip: go on where a finding says that precision is not the problem.

    Raises:
        BaselineError: the model does not run, or is broken, in FP32.
    """
    findings = () if model is None else training_findings(model, "search", is_run=True)
    if not skip:
        stop_at_errors(findings)
    listener.stage("computing the reference outputs")
    reference = in_fresh_processes(lambda: toolchain.reference("search"), toolchain, listener, "taking the reference")
    findings += check_reference(reference, indices=indices.get("search", ()), skip=skip, model=model)
    held_out = in_fresh_processes(lambda: toolchain.reference("held_out"), toolchain, listener, "taking the reference")
    named = {(finding.code, finding.where.outputs) for finding in findings}
    for finding in check_reference(held_out, indices=indices.get("held_out", ()), skip=skip):
        if (finding.code, finding.where.outputs) not in named:
            findings += (finding.on_held_out_samples(),)
    kernels = ask_for_kernels(toolchain, precisions)  # on a GPU ranges are observed meanwhile
    listener.stage("observing the ranges of values")
    ranges = in_fresh_processes(lambda: toolchain.observe(listener.stage), toolchain, listener, "observing ranges")
    if isinstance(ranges, Failure):
        raise did_not_run("the model cannot be observed in FP32", ranges, model)
    return Observations(
        ObservedValues(ranges, tuple(indices.get("search", ()))),
        check_ranges(ranges),
        {} if isinstance(reference, Failure) else reference.optimisation_error,
        without_repetition(findings),
        kernels,
    )
