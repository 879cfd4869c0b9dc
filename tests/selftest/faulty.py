"""Engines with a planted fault, opened in a real worker where a search opens its candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from mptune.engines.base import Engine, EngineSession
from mptune.engines.ort import session as ort_session
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.timing.latency import HostStopwatch, monotonic_ms
from mptune.graph.plan import PrecisionPlan
from mptune.selftest.cases import FP16, FP32, Case
from mptune.selftest.run import EngineTest

FAULTS = ("slow clock", "fast clock", "all-fp32", "all-fp16", "tf32", "stale", "frozen", "off", "slightly off")


@dataclass(frozen=True)
class FaultyEngine(OrtEngine):
    """Opens with a fault in the code that serves it."""

    fault: str = ""

    def open(self) -> EngineSession:
        factor = {"slow clock": 0.5, "fast clock": 2.0}.get(self.fault)
        if factor is not None:
            ort_session.HostStopwatch = lambda run: HostStopwatch(run, lambda: factor * monotonic_ms())
        path = _with_tf32(self.path) if self.fault == "tf32" else self.path
        session = OrtEngine(path, self.options).open()
        if self.fault in ("stale", "frozen", "off", "slightly off"):
            session.run = _Wrong(self.fault, session.run)
        return session


class _Wrong:
    def __init__(self, fault: str, run) -> None:
        self.fault, self.run, self.kept = fault, run, None

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self.run(feeds)
        if self.fault in ("stale", "frozen"):
            given = outputs if self.kept is None else self.kept
            self.kept = outputs if self.fault == "stale" or self.kept is None else self.kept
            return given
        size = 0.02 if self.fault == "off" else 5e-4
        noise = np.random.default_rng(0)
        return {n: (x * (1 + size * noise.standard_normal(x.shape))).astype(x.dtype) for n, x in outputs.items()}


def _with_tf32(model: Path) -> Path:
    """Round what FP32 products read to ten bits of mantissa, as TF32 does, by Casts to FP16 and back."""
    proto = onnx.load(model)
    nodes = []
    for node in proto.graph.node:
        if node.op_type in ("MatMul", "Conv"):
            for slot in range(2):
                name = node.input[slot]
                half, back = (f"{node.name}.{slot}.{kind}" for kind in ("tf32", "back"))
                like = helper.make_node("CastLike", [back, name], [f"{back}.like"])
                nodes.append(helper.make_node("Cast", [name], [half], to=TensorProto.FLOAT16))
                nodes += [helper.make_node("Cast", [half], [back], to=TensorProto.FLOAT), like]
                node.input[slot] = f"{back}.like"
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    path = model.with_name("tf32.onnx")
    onnx.save(proto, path)
    return path


class FaultyTest(EngineTest):
    """The self-test of ONNX Runtime's CPU provider with a fault."""

    fault = ""

    def engine(self, case: Case, engine: Engine, plan: str) -> Engine:
        assert isinstance(engine, OrtEngine)
        other: PrecisionPlan | None = None
        if self.fault == "all-fp32":
            other = case.plans[FP32]
        elif self.fault == "all-fp16" and plan != FP32:
            other = case.plans[FP16]
        path = engine.path
        if other is not None:  # The engine is built from another plan than the one that it is for.
            path = case.workload.rewriter.write(other, case.workload.workspace.scratch("other"))
        return FaultyEngine(path, engine.options, self.fault)
