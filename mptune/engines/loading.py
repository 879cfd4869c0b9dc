"""Loading a model whose operators ONNX does not all define: what they are is asked of ONNX Runtime, in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.graph.loading.foreign import RuntimeTypes
from mptune.graph.loading.model import Model, load_model

if TYPE_CHECKING:
    import onnx

_TIMEOUT_S = 300.0


def load_typed_model(path: str | Path, *, any_precision: bool = False, opset: int | None = None) -> Model:
    """Load, check and type a model, with the help of ONNX Runtime where ONNX's own inference does not do.

    Raises:
        ModelError: as ``load_model``.
    """
    return load_model(path, _ask, any_precision=any_precision, opset=opset)


def _ask(slim: onnx.ModelProto, values: Sequence[str]) -> RuntimeTypes:
    from mptune.engines.jobs.operator_types import OperatorTypesJob
    from mptune.engines.worker.once import run_once

    answer = run_once(OperatorTypesJob(slim.SerializeToString(), tuple(values), "cpu"), _TIMEOUT_S)
    return RuntimeTypes(failure=answer) if isinstance(answer, str) else answer
