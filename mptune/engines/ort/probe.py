"""The job that runs a tiny model, to see whether an execution provider of ONNX Runtime starts. Imports little."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from mptune.engines.base import Stage
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import Provider, SessionOptions
from mptune.engines.worker.child import WorkerState


@dataclass(frozen=True)
class ProbeReport:
    """The result of running a tiny model on a provider.

    Attributes:
        cuda_python: why CUDA events are not available; None where they are, or where the provider is the CPU's.
        cuda_versions: of driver and runtime as CUDA counts them (12060 is 12.6); None where unknown.
    """

    cuda_python: str | None = None
    cuda_versions: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProbeJob:
    """Check that a provider starts: ONNX Runtime lists providers whose libraries may be missing."""

    provider: Provider

    def run(self, state: WorkerState) -> ProbeReport:
        """See the class.

        Raises:
            EngineError: it does not.
        """
        from onnx import TensorProto, helper

        from mptune.engines.cuda import runtime as cuda

        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
        node = helper.make_node("MatMul", ["x", "x"], ["y"])
        graph = helper.make_graph([node], "probe", info[:1], info[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = SessionOptions(self.provider, timing=False)
        session = state.transient(partial(open_session, model.SerializeToString(), options))
        state.enter(Stage.RUN)
        session.run({"x": np.eye(2, dtype=np.float32)})
        if self.provider == "cpu":
            return ProbeReport()
        reason = cuda.unavailable_reason()
        return ProbeReport(reason, None if reason else cuda.versions())
