"""Which nodes another execution provider runs in FP16 than in FP32: the provider has no FP16 kernel for them.

On an H200 torchvision's RAFT takes 45 ms in FP16 and 4.0 ms in FP32: its 72 GridSample nodes run on the CPU in FP16,
with copies to the host and back (ONNX Runtime 1.31.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mptune.engines.base import MissingKernel
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, Placed, Provider, SessionOptions
from mptune.engines.worker.child import WorkerState


@dataclass(frozen=True)
class PlacementJob:
    """Open two typed models as a search opens them, and compare where their nodes run."""

    fp16: Path
    fp32: Path
    provider: Provider

    def run(self, state: WorkerState) -> tuple[MissingKernel, ...]:
        """See the class."""
        return missing_kernels(self._place(state, self.fp16), self._place(state, self.fp32), PROVIDERS[self.provider])

    def _place(self, state: WorkerState, model: Path) -> tuple[Placed, ...]:
        options = SessionOptions(self.provider, timing=False, record_placement=True)
        return state.transient(partial(open_session, model, options)).placement()


def missing_kernels(fp16: Sequence[Placed], fp32: Sequence[Placed], wanted: str) -> tuple[MissingKernel, ...]:
    """The nodes that the wanted provider runs in FP32, and another one in FP16, by name.

    Nodes that are elsewhere in FP32 as well (the arithmetic of shapes) are there for another reason. Fused nodes have
    names of their own, and are left out.
    """
    at_home = {node.name for node in fp32 if node.provider == wanted}
    return tuple(
        MissingKernel(node.name, node.op_type, wanted, node.provider)
        for node in fp16
        if node.provider != wanted and node.name in at_home
    )
