"""Plans of a model through build, load, run and time, in this process, on a device in host memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

from mptune.engines import cuda
from mptune.engines.latency import Stopwatch
from mptune.engines.tensorrt import builder
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.library import load_library
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.device import program
from tests.device.blueprint import Blueprint
from tests.device.cuda import FakeCuda
from tests.device.machines import Machine
from tests.device.program import Program
from tests.device.tensorrt import make_module

EXECUTIONS = 3
SAME = 1e-5
"""Relative difference between an engine of this device and ONNX Runtime on the same typed model."""

Feeds = Mapping[str, np.ndarray]


class Bench:
    """One model on one machine, as the jobs of a worker treat it."""

    def __init__(self, machine: Machine, path: Path, folder: Path, granularity: str = "fusion") -> None:
        """Nothing is built yet.

        Args:
            machine: whose TensorRT builds and runs.
            path: of the model.
            folder: for the weight bank and the engines.
            granularity: of the groups.
        """
        self.cuda = FakeCuda(machine.memory_bytes, machine.cuda, is_unified=machine.is_jetson)
        self._module = make_module(machine.tensorrt, self.cuda, machine.capability)
        self.model = load_model(path)
        self.groups = find_groups(self.model, granularity)
        self._rewriter = Rewriter(GroupedModel(self.model, self.groups), WeightBank.write(self.model, folder))
        self._folder = folder
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Bench:
        self._patch.setitem(sys.modules, "tensorrt", self._module)
        self._patch.setattr(cuda, "runtime", lambda: self.cuda)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()

    def build(self, plan: PrecisionPlan, samples: Sequence[Feeds]) -> bytes:
        """A plan's engine."""
        typed = self._rewriter.write(plan, self._folder / "typed.onnx")
        engine, _ = builder.build_engine(load_library("tensorrt"), typed, BuildOptions("tensorrt"), samples)
        made = Blueprint.from_bytes(bytes(engine))
        assert (made.tf32, made.is_typed) == (False, True), "it would compute something else"
        return bytes(engine)

    def run(self, plan: PrecisionPlan, samples: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """Build a plan's engine for the shapes of samples, run and time it, and hold each step to what must be so."""
        path = self._folder / "plan.engine"
        path.write_bytes(self.build(plan, samples))
        wanted = Program(program.load_model(str(self._rewriter.write(plan, self._folder / "typed.onnx"))))
        session = TensorRtSession(path, EngineOptions("tensorrt"))
        try:
            found = []
            for feeds in (*samples, samples[0]):
                watch = session.stopwatch(feeds) if found else None  # before and after a run with these shapes
                found.append(self._run(session, wanted, feeds))
                self._time(watch or session.stopwatch(feeds))
            assert not any("another type" in warning for warning in session.warnings)
        finally:
            session.close()
        self.hold()
        return found[:-1]

    def hold(self) -> None:
        """Nothing was forbidden or refused, and nothing is left on the device."""
        rules = self.cuda.rules
        found = [*rules.forbidden, *rules.refused, *(f"{one} not freed" for one in self.cuda.leaks)]
        assert not found, "; ".join(found)

    def _run(self, session: TensorRtSession, wanted: Program, feeds: Feeds) -> dict[str, np.ndarray]:
        found = session.run(feeds)
        narrow = {n: v.astype(np.float32) if v.dtype == np.float64 else v for n, v in feeds.items()}
        for name, value in wanted.run(narrow).items():
            np.testing.assert_allclose(found[name], value, rtol=SAME, atol=SAME * _largest(value), err_msg=name)
        return found

    def _time(self, watch: Stopwatch) -> None:
        before = self.cuda.executions
        watch.run_once()
        values = watch.value_ms(EXECUTIONS), watch.span_ms(EXECUTIONS) / EXECUTIONS
        assert values[0] > 0.0, "an execution takes no time"
        assert values[0] == pytest.approx(values[1]), f"latencies differ: {values}"
        count = self.cuda.executions - before
        assert count == 2 * EXECUTIONS + 2, f"{count} executions"  # once, and one ahead of those that are timed


def _largest(value: np.ndarray) -> float:
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    return float(np.abs(finite.astype(np.float64)).max()) if finite.size else 0.0
