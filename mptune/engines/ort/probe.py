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
class ProbeJob:
    """Check that a provider starts: ONNX Runtime lists providers whose libraries may be missing."""

    provider: Provider

    def run(self, state: WorkerState) -> None:
        """Raise ``EngineError`` where it does not start."""
        from onnx import TensorProto, helper

        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
        node = helper.make_node("MatMul", ["x", "x"], ["y"])
        graph = helper.make_graph([node], "probe", info[:1], info[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = SessionOptions(self.provider, timing=False)
        session = state.transient(partial(open_session, model.SerializeToString(), options))
        state.enter(Stage.RUN)
        session.run({"x": np.eye(2, dtype=np.float32)})
