"""ONNX's reference evaluator as a backend of mptune, as another package would bring one: nothing in mptune names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from mptune.engines.backend import Availability, BackendStatus, ModelBuilder, Place
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.latency import HostStopwatch
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.graph.plan import PrecisionPlan
from mptune.targets.detect import Gpu
from mptune.targets.target import Target


class Session:
    """A typed model in NumPy."""

    def __init__(self, path: Path) -> None:
        try:
            self._evaluator = ReferenceEvaluator(str(path))
        except Exception as error:
            raise EngineError(FailureKind.ERROR, str(error)) from error
        self.warnings: tuple[str, ...] = ()
        self.context_bytes = None

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self._evaluator.run(None, dict(feeds))
        return dict(zip(self._evaluator.output_names, outputs, strict=True))

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> HostStopwatch:
        return HostStopwatch(partial(self._evaluator.run, None, dict(feeds)))

    def close(self) -> None:
        """NumPy holds nothing."""


@dataclass(frozen=True)
class Engine:
    """A typed model; it is opened in the worker."""

    path: Path

    def open(self) -> Session:
        return Session(self.path)


class Evaluator:
    """Measures on a CPU."""

    name = "evaluator"

    def available(self, place: Place) -> Availability:
        if place.target.kind == "cpu":
            return Availability("measures", "evaluator")
        return Availability(obstacle="it runs on a CPU", hint="add --target cpu")

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        return (BackendStatus("evaluator", True, f"onnx {onnx.__version__}: measures with --target cpu"),)

    def builder(self, reference: ReferenceModel, target: Target, gpu: Gpu | None) -> ModelBuilder:
        return ModelBuilder(reference, self._engine)

    def _engine(self, path: Path, plan: PrecisionPlan) -> Engine:
        return Engine(path)


EVALUATOR = Evaluator()
