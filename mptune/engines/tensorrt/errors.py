"""TensorRT's log of a failure as a kind and one informative line.

TensorRT returns None for a failed build and logs why, in several lines of which one has the cause. The
patterns come from messages of TensorRT 8.5 to 10.15 in NVIDIA's issues and from TensorRT-RTX 1.7 itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.errors import classify as classify_cuda

# "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (words In function at /src/file.cpp:12)" and
# "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (words)", some with "10: " before.
_ERROR = re.compile(
    r"^(?:\d+: )?(?:\[[^\]]*\] |[\w:]+: )?Error Code \d+: (?P<category>[\w ]+?) \((?P<body>.*)\)$", re.DOTALL
)
_PLACE = re.compile(r"[\s.]*\bIn \w+ at \S+?:\d+\b|\[\w+\.(?:cpp|hpp|h):\d+: \w+\] ")
_NUMBER = re.compile(r"^\d+: ")
_SOURCE = re.compile(r"^\S+\.(?:cpp|hpp|h):\d+: ")
_ASSERTION = re.compile(
    r'^(?:Assertion failed: )?[^"]*?&& "(?P<quoted>[^"]*)"|^Assertion failed: .+?: (?P<after>[A-Z].*)$'
    r"|^Assertion .+? failed\. (?P<reason>.+)$",
    re.DOTALL,
)
_SERIALIZATION = re.compile(r"^Serialization assertion .*? failed\.(?=\S)")
_DULL = frozenset({"", "no further information"})
_GENERAL = frozenset({"Internal Error", "API Usage Error"})

_OUT_OF_MEMORY = re.compile(
    r"outofmemory|out of memory|cudaerrormemoryallocation|bad_alloc|failed_allocation|mem_alloc_failed"
    r"|insufficient memory|could not be allocated|memory allocation failed|exceeded mem budget"
)
_SHORT_OF_MEMORY = re.compile(r"insuff?i?cient memory|device memory is insufficient|could not be allocated")
_CANCELLED = re.compile(r"buildcanceled|build canceled")
_NO_TACTIC = re.compile(
    r"could not find any implementation|no runners that implement|no implementation of|no tactics to implement"
    r"|error during tactic selection|no valid tactic|no implementation obeys"
)
_UNSUPPORTED = re.compile(
    r"plugin not found|could not find plugin|unsupported_node|unsupported_graph|unsupported operator"
    r"|no importer registered|is not supported|not supported by|does not support|incompatible device"
    r"|compute capabilit|target gpu sm|cannot compile for target"
)
# Logged where there is no device; it accompanies other errors when building ahead of time.
_NO_DEVICE = re.compile(r"cudaError (?:35|100)\b|CUDA initialization failure")

T = TypeVar("T")

_BY_PRIORITY = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.TIMEOUT,
    FailureKind.UNSUPPORTED,
    FailureKind.NO_TACTIC,
    FailureKind.CRASH,
    FailureKind.DISK_FULL,
    FailureKind.INVALID_MODEL,
    FailureKind.ERROR,
    FailureKind.DEVICE_LOST,
)


@dataclass(frozen=True)
class ParserComplaint:
    """One error of the ONNX parser.

    Attributes:
        code: name of its ``ErrorCode``, such as ``UNSUPPORTED_NODE``.
        node: name of the node; empty where the error is about none, or the parser does not say.
    """

    code: str
    words: str
    node: str = ""
    operator: str = ""

    @property
    def kind(self) -> FailureKind:
        """``UNSUPPORTED`` for an unknown operator, attribute or type, else what the code says."""
        if self.operator and (self.code.startswith("UNSUPPORTED") or "Plugin not found" in self.words):
            return FailureKind.UNSUPPORTED
        if self.code.startswith("UNSUPPORTED") and "data" in self.words and "type" in self.words:
            return FailureKind.UNSUPPORTED
        return FailureKind.OUT_OF_MEMORY if self.code == "MEM_ALLOC_FAILED" else FailureKind.PARSER

    @property
    def line(self) -> str:
        """One line, with the node."""
        lines = [clean(line) for line in self.words.splitlines()]
        informative = [line for line in lines if line and not line.startswith("Invalid Node - ")]
        message = informative[0] if informative else clean(self.words)
        if message in ("false", ""):
            message = "TensorRT's parser does not support it"
        node = f" node {self.node!r}" if self.node else ""
        where = f"{self.operator}{node}: " if self.operator else ""
        return where + message


def made(make: Callable[[], T], log: Any) -> T:
    """Call one of TensorRT's constructors, which give a null pointer where they fail: Python sees a TypeError.

    Raises:
        EngineError: it failed.
    """
    try:
        return make()
    except (TypeError, RuntimeError) as error:
        raise build_failure(log.errors, log.warnings, str(error)) from error


def build_failure(errors: Sequence[str], warnings: Sequence[str] = (), otherwise: str = "") -> EngineError:
    """The error for a build, a load or an execution that TensorRT failed.

    Args:
        warnings: what it logged as warnings; too little memory is one, although a layer then has no kernel.
        otherwise: the message where it logged nothing.
    """
    kinds = [classify(text) for text in errors]
    for kind in _BY_PRIORITY:
        if kind not in kinds:
            continue
        message = clean(errors[kinds.index(kind)])
        if kind is FailureKind.NO_TACTIC and any(_SHORT_OF_MEMORY.search(text.lower()) for text in warnings):
            return EngineError(
                FailureKind.OUT_OF_MEMORY, f"{message}; tactics were skipped because of too little memory"
            )
        return EngineError(kind, message)
    return EngineError(FailureKind.ERROR, otherwise or "TensorRT failed without a message")


def skipped_tactics(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warning for an engine that was built although tactics were skipped for want of memory.

    Such an engine depends on what was free: another build may choose other, faster kernels.

    Args:
        warnings: what TensorRT logged as warnings during the build. It logs two lines for a tactic, of which the second
            says that it is skipped.
    """
    short = [text.lower() for text in warnings if _SHORT_OF_MEMORY.search(text.lower())]
    count = sum("skipping tactic" in text for text in short) or len(short)
    if not count:
        return ()
    tactics = "1 tactic" if count == 1 else f"{count} tactics"
    return (
        f"TensorRT skipped {tactics} for want of memory, so that another build may choose other kernels: close other"
        " programs, or set --workspace below what is always free",
    )


def parser_failure(complaints: Sequence[ParserComplaint], errors: Sequence[str] = ()) -> EngineError:
    """The error for a model that TensorRT's parser rejects.

    Args:
        complaints: the parser's errors; the first about an unsupported operator counts.
    """
    if not complaints:
        return build_failure(errors, otherwise="TensorRT's parser rejects the model without a message")
    first = next((one for one in complaints if one.kind is FailureKind.UNSUPPORTED and one.operator), complaints[0])
    file = next((text for text in errors if "Failed to open file" in text), None)
    if file is not None and first.kind is FailureKind.PARSER:
        return EngineError(FailureKind.PARSER, clean(file))
    return EngineError(first.kind, first.line)


def classify(text: str) -> FailureKind:
    """Kind of failure by the text of one logged error."""
    lower = text.lower()
    if _OUT_OF_MEMORY.search(lower):
        return FailureKind.OUT_OF_MEMORY
    if _CANCELLED.search(lower):
        return FailureKind.TIMEOUT
    if _NO_TACTIC.search(lower):
        return FailureKind.NO_TACTIC
    if _NO_DEVICE.search(text):
        return FailureKind.DEVICE_LOST
    if _UNSUPPORTED.search(lower):
        return FailureKind.UNSUPPORTED
    return classify_cuda(text)


def clean(text: str) -> str:
    """The informative part of a logged error: without function, error number, source file and line."""
    text = text.strip()
    match = _ERROR.match(text)
    category = ""
    if match:
        category, text = match["category"], match["body"]
    assertion = _ASSERTION.match(text)
    if assertion:
        text = assertion["quoted"] or assertion["after"] or assertion["reason"]
    for rest in (_PLACE, _NUMBER, _SOURCE, _SERIALIZATION):
        text = rest.sub("", text)
    text = " ".join(text.split())
    if text in _DULL:
        return category or text
    return text if not category or category in _GENERAL else f"{category}: {text}"
