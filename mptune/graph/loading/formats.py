"""What a file is that is no ONNX model, by its name and its first bytes, and how it becomes one."""

from __future__ import annotations

from pathlib import Path

_TORCH = ("a PyTorch file", "load it in Python and export it: torch.onnx.export(model, inputs, 'model.onnx')")
_ENGINE = ("a TensorRT engine", "give the ONNX model that it was built from")
_TENSORFLOW = ("a TensorFlow model", "export it: python -m tf2onnx.convert --help")
_OTHERS = {
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt"), _TORCH),
    ".safetensors": ("a file of weights", "export the model that has them to ONNX, such as with torch.onnx.export"),
    **dict.fromkeys((".engine", ".plan", ".trt"), _ENGINE),
    **dict.fromkeys((".pb", ".h5", ".keras", ".tflite"), _TENSORFLOW),
    ".ort": ("ONNX Runtime's own format", "give the .onnx file that it was made from"),
}
_AGAIN = "export it again, or check that the copy is complete (compare its size or sha256 with the original)"


def no_model(path: Path, data: bytes) -> tuple[str, str]:
    """What is wrong with a file that does not parse as ONNX, and what to do about it."""
    explanation = _OTHERS.get(path.suffix.lower())
    if explanation is None and data[:2] == b"PK" and b"data.pkl" in data[:4096]:
        explanation = _TORCH
    if explanation is None:
        return f"{path} is not an ONNX model, or it is truncated", _AGAIN
    what, hint = explanation
    return f"{path} is not an ONNX model: {what}", hint


def no_graph(path: Path, data: bytes) -> tuple[str, str]:
    """The same for a file that parses, as short and random bytes may, and holds no graph."""
    text, hint = no_model(path, data)
    return (f"{path} holds no ONNX graph", hint) if hint == _AGAIN else (text, hint)
