"""Opens sessions of ONNX Runtime on either provider."""

from __future__ import annotations

from pathlib import Path

from mptune.engines.ort.cuda_session import CudaSession
from mptune.engines.ort.session import CpuSession, OrtSession, SessionOptions


def open_session(model: Path | bytes, options: SessionOptions) -> OrtSession:
    """Open a session; building the engine happens here.

    Args:
        model: an ONNX file, or a serialised model without external data.
        options: see ``SessionOptions``.

    Raises:
        EngineError: ONNX Runtime refuses the model or the provider does not start.
    """
    return CudaSession(model, options) if options.provider == "cuda" else CpuSession(model, options)
