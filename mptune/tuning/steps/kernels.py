"""Before the search: which operators the engine has no FP16 kernel for, and the groups that stay in FP32 for it.

Asked once, of the all-FP16 session, and kept in the run directory: a resumed run has the same search space.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mptune.engines.base import Failure, MissingKernel, Toolchain
from mptune.errors import RunError
from mptune.files import write_json
from mptune.finding import Finding, Where
from mptune.graph.grouping.grouped import GroupedModel

KERNELS_JSON = "kernels.json"
"""Name of the file in the run's data directory."""

CODE = "no-fp16-kernel"


@dataclass(frozen=True)
class MissingKernels:
    """What the engine said.

    Attributes:
        nodes: that another execution provider runs in FP16.
        warnings: one line each.
    """

    nodes: tuple[MissingKernel, ...] = ()
    warnings: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads.

        Raises:
            RunError: the disk is full, or the place cannot be written.
        """
        write_json(path, {"nodes": [asdict(node) for node in self.nodes], "warnings": list(self.warnings)})

    @classmethod
    def load(cls, path: Path) -> MissingKernels:
        """Read what ``save`` wrote; nothing where there is no file: a run of mptune 0.1.0 did not ask.

        Raises:
            RunError: the file cannot be read. Whether it is gone, or holds something else, its hash says.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(tuple(MissingKernel(**node) for node in document["nodes"]), tuple(document["warnings"]))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(
                f"{path} cannot be read: {type(error).__name__}: {error}",
                "copy the run directory again; where the search ran, the same `mptune search` asks the engine again",
            ) from None

    def pins(self, grouped: GroupedModel) -> dict[str, str]:
        """Group id -> why it stays in FP32, of the groups that hold such a node."""
        found: dict[str, str] = {}
        for node in self.nodes:
            group = grouped.owners.get(node.node)
            if group is not None:
                found.setdefault(group, f"{node.wanted} has no FP16 kernel for {node.op_type}: {node.actual} runs it")
        return found

    def findings(self, grouped: GroupedModel) -> tuple[Finding, ...]:
        """One finding for each operator whose groups stay in FP32."""
        by_operator: dict[str, list[MissingKernel]] = {}
        for node in self.nodes:
            if node.node in grouped.owners:
                by_operator.setdefault(node.op_type, []).append(node)
        return tuple(_finding(op_type, nodes, grouped) for op_type, nodes in by_operator.items())


def ask_for_kernels(toolchain: Toolchain) -> MissingKernels:
    """Ask the engine, in a fresh process where the first one fails; a second failure is a warning."""
    answer = toolchain.missing_fp16_kernels()
    if isinstance(answer, Failure):
        toolchain.restart()
        answer = toolchain.missing_fp16_kernels()
    if not isinstance(answer, Failure):
        return MissingKernels(answer)
    text = (
        f"operators without an FP16 kernel are not known, since the all-FP16 engine does not open ({answer.kind.value}:"
        f" {answer.message}): the search learns from builds alone"
    )
    return MissingKernels(warnings=(text,))


def _finding(op_type: str, nodes: Sequence[MissingKernel], grouped: GroupedModel) -> Finding:
    groups = tuple(dict.fromkeys(grouped.owners[node.node] for node in nodes))
    first, count = nodes[0], len(nodes)
    many = f"{count} nodes run" if count > 1 else "1 node runs"
    return Finding(
        code=CODE,
        severity="info",
        origin="search",
        where=Where(nodes=tuple(node.node for node in nodes), groups=groups),
        evidence={"operator": op_type, "nodes": count, "fp32_provider": first.wanted, "fp16_provider": first.actual},
        text=f"{first.wanted} has no FP16 kernel for {op_type}: in FP16 {many} on {first.actual}, with copies between",
        cure=f"{'its group is' if len(groups) == 1 else f'its {len(groups)} groups are'} kept in FP32",
    )
