"""Before the search: which operators the engine has no FP16 or BF16 kernel for, and the groups that it keeps out of it.

And which nodes it computes as one, with FP32 inside: values there are no reason to keep a group out of FP16.
Asked once, of the all-FP16 and the all-BF16 session, and kept in the run directory: a resumed run has the same search
space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mptune.engines.base import Failure, MissingKernel
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_form, write_json
from mptune.finding import Finding, Where
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.ops import RECURRENT
from mptune.graph.plan import REDUCED, Precision
from mptune.json_form import JsonForm

KERNELS_JSON = "kernels.json"
"""Name of the file in the run's data directory."""


@dataclass(frozen=True)
class MissingKernels(JsonForm):
    """What the engine said.

    Attributes:
        nodes: precision -> the nodes that another execution provider, or none, runs in it.
        warnings: one line each.
        fused: nodes that it computes as one.
        not_emulated: operators whose errors it is to be measured for, as emulation does not give them.
    """

    nodes: Mapping[Precision, tuple[MissingKernel, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    fused: tuple[FusedNodes, ...] = ()
    not_emulated: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> MissingKernels:
        """Read what ``save`` wrote; nothing where there is no file."""
        hint = f"copy the run directory again, or delete {path.parent}: the same `mptune search` prepares it again"
        return read_form(cls, path, hint) or cls()

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
        """One finding for each operator and precision."""
        findings = []
        for precision, nodes in self.nodes.items():
            by_operator: dict[str, list[MissingKernel]] = {}
            for node in nodes:
                if node.node in grouped.owners:
                    by_operator.setdefault(node.op_type, []).append(node)
            findings += [_finding(op_type, lacking, grouped, precision) for op_type, lacking in by_operator.items()]
        return tuple(findings)


def keep_kernels(toolchain: Toolchain, precisions: Sequence[str], data_dir: Path) -> None:
    """Write the answer of ``ask_for_kernels`` where ``MissingKernels.load`` reads it: ``KERNELS_JSON``."""
    ask_for_kernels(toolchain, precisions).save(data_dir / KERNELS_JSON)


def ask_for_kernels(toolchain: Toolchain, precisions: Sequence[str] = ("fp32", "fp16")) -> MissingKernels:
    """Ask the engine, in a fresh process where the first one fails; a second failure is a warning."""
    answers = {Precision.FP16: _ask(toolchain, Precision.FP16)}
    answer = toolchain.fused_nodes()
    if isinstance(answer, Failure):
        toolchain.restart()
    fused = () if isinstance(answer, Failure) else answer
    # A precision that is stored as FP32 takes FP32's kernels.
    others = (p for p in REDUCED if p in precisions and p not in answers and p.stored is not Precision.FP32)
    answers |= {precision: _ask(toolchain, precision) for precision in others}
    warnings = tuple(line for _, lines in answers.values() for line in lines)
    # Their kernels approximate sigmoid and tanh (``benchmarks.roundings`` of commit 672f8217).
    is_measured = toolchain.error_source == "measured" and toolchain.emulation_holds
    not_emulated = tuple(sorted(RECURRENT)) if is_measured else ()
    return MissingKernels({p: nodes for p, (nodes, _) in answers.items() if nodes}, warnings, fused, not_emulated)


def _ask(toolchain: Toolchain, precision: Precision) -> tuple[tuple[MissingKernel, ...], tuple[str, ...]]:
    answer = toolchain.missing_kernels(precision)
    if isinstance(answer, Failure):
        toolchain.restart()
        answer = toolchain.missing_kernels(precision)
    if not isinstance(answer, Failure):
        return answer, ()
    name = precision.name
    text = (
        f"operators without an {name} kernel are not known, since the all-{name} engine does not open"
        f" ({answer.kind.value}: {answer.message}): the search learns from builds alone"
    )
    return (), (text,)


def _finding(op_type: str, nodes: Sequence[MissingKernel], grouped: GroupedModel, precision: Precision) -> Finding:
    groups = tuple(dict.fromkeys(grouped.owners[node.node] for node in nodes))
    first = nodes[0]
    return Finding.of(
        f"no-{precision}-kernel",
        "search",
        Where(nodes=tuple(node.node for node in nodes), groups=groups),
        {
            "operator": op_type,
            "nodes": len(nodes),
            "fp32_provider": first.wanted,
            f"{precision}_provider": first.actual or "none",
        },
        kind="stated" if first.reason else "elsewhere" if first.actual else "nowhere",
        reason=first.reason,
        precision=precision.name,
        provider=first.actual,
        groups=len(groups),
    )
