"""Jobs of a comparison with an engine file: its outputs on samples, again, and in several sessions at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.jobs.outputs import OutputsJob, RepeatJob, Run
from mptune.engines.jobs.samples import Feed, Outputs
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.engines.worker.child import WorkerState


@dataclass(frozen=True)
class ModelNames:
    """How a model calls what goes into an engine and comes out of it.

    Attributes:
        inputs: of the model, in its order.
        outputs: of the model, in its order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class EngineOutputsJob(OutputsJob):
    """``OutputsJob`` with an engine file as ``model``.

    Attributes:
        kind: whose engine it is.
        names: of the ONNX model's inputs and outputs; the samples have those inputs, the file gets those outputs.
    """

    kind: Kind = "tensorrt"
    names: ModelNames = ModelNames((), (), ())

    def _open(self, state: WorkerState) -> Run:
        return state.transient(lambda: _Sessions(self.model, self.kind, self.names, 1)).runs[0]


@dataclass(frozen=True)
class EngineRepeatJob(RepeatJob):
    """``RepeatJob`` with an engine file as ``model``: each thread has a session with its own context and stream.

    Attributes:
        kind: whose engine it is.
    """

    kind: Kind = "tensorrt"
    names: ModelNames = ModelNames((), (), ())

    def _open(self, state: WorkerState) -> list[Run]:
        return state.transient(lambda: _Sessions(self.model, self.kind, self.names, self.threads)).runs


class _Sessions:
    """Sessions of one engine file, under the names of the model."""

    def __init__(self, path: Path, kind: Kind, names: ModelNames, count: int) -> None:
        self._opened: list[TensorRtSession] = []
        self.runs: list[Run] = []
        try:
            for _ in range(count):
                session = TensorRtSession(path, EngineOptions(kind))
                self._opened.append(session)
                self.runs.append(_Renamed(session, names))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close them all. Idempotent."""
        while self._opened:
            self._opened.pop().close()


class _Renamed:
    """Runs a session on a model's feeds: inputs and outputs correspond by name, else by position."""

    def __init__(self, session: TensorRtSession, names: ModelNames) -> None:
        mode = session.library.trt.TensorIOMode
        self._session = session
        theirs = session.tensor_names(mode.INPUT)
        self._inputs = _pairs("inputs", theirs, theirs, names.inputs)
        self._types = {name: session.tensor_type(name) for name in theirs}
        self._outputs = _pairs("outputs", names.wanted, names.outputs, session.tensor_names(mode.OUTPUT))

    def __call__(self, feed: Feed) -> Outputs:
        found = self._session.run(
            {name: _cast(feed[ours], name, self._types[name]) for name, ours in self._inputs.items()}
        )
        return {ours: found[name] for ours, name in self._outputs.items()}


def _pairs(what: str, wanted: Sequence[str], names: Sequence[str], others: Sequence[str]) -> Mapping[str, str]:
    """Each wanted name -> the other side's: the same, else the one at its place where there are as many.

    Raises:
        EngineError: neither is there.
    """
    if set(wanted) <= set(others):
        return {name: name for name in wanted}
    if len(names) != len(others):
        text = f"the {what} of the engine and of the model differ: {', '.join(names)} and {', '.join(others)}"
        raise EngineError(FailureKind.ERROR, text)
    by_place = dict(zip(names, others, strict=True))
    return {name: by_place[name] for name in wanted}


def _cast(array: np.ndarray, name: str, dtype: np.dtype[np.generic]) -> np.ndarray:
    """A feed in the type of the engine's input: other widths of floats, and of integers that keep their values."""
    if array.dtype == dtype:
        return array
    if array.dtype.kind == dtype.kind == "f":
        return array.astype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        cast = array.astype(dtype)
        if np.array_equal(cast, array):
            return cast
        raise EngineError(FailureKind.ERROR, f"input {name!r} is of type {dtype}, which does not hold all its values")
    return array  # The session says what it wants.
