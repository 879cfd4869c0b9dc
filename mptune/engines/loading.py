"""Loading a model with ONNX Runtime's help, and whether ONNX Runtime loads it; each in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import EngineError, FailureKind
from mptune.errors import ModelError
from mptune.graph.loading.model import Model, RuntimeTypes, load_model
from mptune.processes.parent import Worker, run_once

if TYPE_CHECKING:
    import onnx

    from mptune.processes.child import WorkerState

_TIMEOUT_S = 300.0
_OF_THE_MODEL = frozenset({FailureKind.INVALID_MODEL, FailureKind.ERROR, FailureKind.CRASH})


def load_typed_model(path: str | Path, *, any_precision: bool = False, opset: int | None = None) -> Model:
    """As ``load_model``, with the help of ONNX Runtime where ONNX's own inference does not do."""

    def ask(slim: onnx.ModelProto, values: Sequence[str]) -> RuntimeTypes:
        from mptune.engines.ort.fusions import OperatorTypesJob

        answer = run_once(OperatorTypesJob(slim.SerializeToString(), tuple(values)), _TIMEOUT_S)
        return RuntimeTypes(failure=answer) if isinstance(answer, str) else answer

    return load_model(path, ask, any_precision=any_precision, opset=opset)


@dataclass(frozen=True)
class OpenJob:
    """Open a model as a user would: its own bytes, from its own folder, in a default session on the CPU."""

    model: Path
    optimise: bool = True

    def run(self, state: WorkerState) -> None:
        """Raises EngineError: it does not load. Where only a kernel is missing on a CPU, the model itself is valid."""
        import onnxruntime

        from mptune.engines.ort.session import PROVIDERS, translated

        options = onnxruntime.SessionOptions()
        if not self.optimise:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            translated(partial(onnxruntime.InferenceSession, str(self.model), options, providers=[PROVIDERS["cpu"]]))
        except EngineError as error:
            # ONNX Runtime writes out an operator without a BF16 kernel with others, which may admit no BF16.
            if error.kind is not FailureKind.UNSUPPORTED and "bfloat16" not in error.message:
                raise


def check_loads(path: Path, name: str, worker: Worker | None = None) -> tuple[str, ...]:
    """Open a model once as a user would, in a worker of its own where none is given; ModelError: it does not load.

    Returns a warning where it loads without ONNX Runtime's graph optimisations only.
    """
    with Worker() if worker is None else nullcontext(worker) as opening:
        failure = opening.call(OpenJob(path), _TIMEOUT_S)
        if failure is None or failure.kind not in _OF_THE_MODEL:
            return ()
        plain = opening.call(OpenJob(path, optimise=False), _TIMEOUT_S)
    if plain is None:
        return (f"{name} loads in ONNX Runtime without graph optimisations only: {failure.message}",)
    if plain.kind not in _OF_THE_MODEL:
        return ()
    hint = f"onnxruntime.InferenceSession({str(path)!r}) says the same: convert or export it again"
    raise ModelError(f"{name} does not load: {plain.message.rstrip('.')}", hint)


def check_written(path: Path, name: str, source: Path, worker: Worker | None = None) -> tuple[str, ...]:
    """Open a model that mptune wrote, as ``check_loads``; ModelError: it does not load, and its source does.

    Where the source, which it was made from, does not load either, a warning says so.
    """
    try:
        return check_loads(path, name, worker)
    except ModelError as error:
        fault = error.message
    try:
        check_loads(source, str(source), worker)
    except ModelError:
        return (f"{fault}; nor does {source}, so it is not shown that the rewritten model is sound",)
    raise ModelError(fault, f"{source} loads, so this is a fault of mptune: report it with the model and the plan")
