"""The job that lets ONNX Runtime fold a model's shape arithmetic once for all plans (``mptune.graph.folded``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mptune.engines.ort.session import PROVIDERS, translated
from mptune.engines.worker.child import WorkerState

_RENAMING = [
    *("ConstantSharing", "CommonSubexpressionElimination", "ReshapeFusion", "UnsqueezeElimination", "CastElimination"),
    *("EliminateSlice", "EliminateIdentity", "ExpandElimination", "CastChainElimination", "NoopElimination"),
    *("PreShapeNodeElimination", "MatMulAddFusion", "MatmulTransposeFusion"),
]
"""Optimisers of ONNX Runtime that would put another name in place of a folded value's."""


@dataclass(frozen=True)
class FoldJob:
    """Have ONNX Runtime write a model with its constants folded; no session ever runs it.

    Folding is the same for every provider: it uses the CPU's kernels, before nodes are given to providers.

    Attributes:
        model: as ``write_without_weights`` has written it.
    """

    model: Path
    folded: Path

    def run(self, state: WorkerState) -> None:
        """See the class.

        Raises:
            EngineError: ONNX Runtime refuses the model.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: that a kernel to fold with is missing is no fault
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.enable_mem_reuse = False  # to plan buffers takes longest
        options.optimized_model_filepath = str(self.folded)
        providers = [PROVIDERS["cpu"]]
        translated(
            lambda: onnxruntime.InferenceSession(
                str(self.model), options, providers=providers, disabled_optimizers=_RENAMING
            )
        )
