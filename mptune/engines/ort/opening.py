"""Opening a model as a user would: its own bytes, from its own folder, in a default session of ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx.checker

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.session import PROVIDERS, translated
from mptune.engines.worker.child import WorkerState


@dataclass(frozen=True)
class OpenJob:
    """Open a model with the CPU provider."""

    model: Path
    optimise: bool = True

    def run(self, state: WorkerState) -> None:
        """Raises EngineError: it does not load. Where only a kernel is missing on a CPU, the model itself is valid."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        if not self.optimise:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            opened = partial(onnxruntime.InferenceSession, str(self.model), options, providers=[PROVIDERS["cpu"]])
            translated(opened)
        except EngineError as error:
            if error.kind is not FailureKind.UNSUPPORTED and not self._is_written_out_in_bf16(error):
                raise

    def _is_written_out_in_bf16(self, error: EngineError) -> bool:
        """Whether ONNX Runtime writes out an operator without a BF16 kernel with others that admit no BF16."""
        if "bfloat16" not in error.message:
            return False
        try:
            onnx.checker.check_model(str(self.model), full_check=True)
        except Exception:  # onnx raises several kinds
            return False
        return True
