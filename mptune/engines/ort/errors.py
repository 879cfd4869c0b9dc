"""ONNX Runtime's exceptions as a kind of failure and one informative line."""

from __future__ import annotations

import re

from mptune.engines.base import EngineError, FailureKind

_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ", re.DOTALL)
# "/onnxruntime_src/.../graph.cc:1423 void ns::Class::method(args) const [with T = x] condition was false. words": a
# source position, a C++ signature, the message.
_POSITION = re.compile(r"\S+\.(?:cc|cpp|cuh|cu|h|hpp):\d+ ")
_SIGNATURE = re.compile(
    r"^(?:[\w:&*<>~,\[\]\s]|::)*?[\w~>]+\([^()]*(?:\([^()]*\)[^()]*)*\)(?: const)?(?: \[with [^\]]*\])? "
)
_LOAD = re.compile(r"Load model from .+? failed:\s*", re.DOTALL)
_NODE = re.compile(
    r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)' Status Message: ", re.DOTALL
)

_OUT_OF_MEMORY = (
    "out of memory",
    "failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudaerrormemoryallocation",
    "available memory of",
)
_DISK_FULL = ("no space left on device", "disk quota exceeded")
# The device is lost or refuses work: the machine's fault. CUDA numbers from driver_types.h.
_DEVICE_LOST = re.compile(
    r"cuda (?:failure|error) (?:3|35|46|100|101|214|220|714|802|803|804|999)\b|no cuda-capable device"
    r"|devices? unavailable|uncorrectable ecc|busy or unavailable|driver version is insufficient|fallen off the bus",
    re.IGNORECASE,
)
# A kernel failed and with it the CUDA context: the plan's fault, and the process cannot be used again.
_CRASHED = re.compile(
    r"cuda (?:failure|error) (?:700|702|710|715|716|717|718|719)\b|illegal memory access|unspecified launch failure"
    r"|misaligned address|device-side assert|illegal instruction",
    re.IGNORECASE,
)
_INVALID = ("type error", "shapeinferenceerror", "typeinferenceerror", "bound to different types", "invalid model")


def translate(error: BaseException) -> EngineError:
    """The ``EngineError`` for anything that ONNX Runtime raised."""
    text = str(error).strip()
    return EngineError(classify(text), first_words(text) or type(error).__name__)


def classify(text: str) -> FailureKind:
    """Kind of failure by ONNX Runtime's error code and message."""
    lower = text.lower()
    match = _CODE.match(text)
    code = match.group(1) if match else ""
    if any(words in lower for words in _OUT_OF_MEMORY):
        return FailureKind.OUT_OF_MEMORY
    if any(words in lower for words in _DISK_FULL):
        return FailureKind.DISK_FULL
    if _DEVICE_LOST.search(text):
        return FailureKind.DEVICE_LOST
    if _CRASHED.search(text):
        return FailureKind.CRASH
    if code == "NOT_IMPLEMENTED":
        return FailureKind.UNSUPPORTED
    if code in {"INVALID_GRAPH", "INVALID_PROTOBUF", "NO_MODEL"} or any(words in lower for words in _INVALID):
        return FailureKind.INVALID_MODEL
    return FailureKind.ERROR


def first_words(text: str) -> str:
    """The first informative line: without error codes, paths, source positions and C++ signatures."""
    text = _CODE.sub("", text.strip())
    text = _LOAD.sub("", text)
    node = _NODE.search(text)
    where = ""
    if node:
        where = f"{node.group(1)} node {node.group(2)!r}: "
        text = text[node.end() :]
    while position := _POSITION.search(text):
        text = _SIGNATURE.sub("", text[position.end() :], count=1)
    # CUDA failures go on with the host's name, file and expression.
    text = re.split(r"\s*;\s*(?:GPU|hostname|file)\s*=", text)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return where + (lines[0] if lines else "")
