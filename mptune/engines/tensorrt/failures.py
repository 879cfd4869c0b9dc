"""What TensorRT's log and its parser say of a failure: the kind, and one line that informs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.session import classify as classify_cuda

T = TypeVar("T")

_KINDS = {
    FailureKind.OUT_OF_MEMORY: r"outofmemory|out of memory|cudaerrormemoryallocation|bad_alloc|failed_allocation"
    r"|mem_alloc_failed|insufficient memory|could not be allocated|memory allocation failed|exceeded mem budget",
    FailureKind.TIMEOUT: r"build ?canceled",
    FailureKind.NO_TACTIC: r"could not find any implementation|no runners that implement|no implementation of"
    r"|no tactics to implement|error during tactic selection|no valid tactic|no implementation obeys",
    # Logged where there is no device; they accompany other errors when building ahead of time.
    FailureKind.DRIVER: r"cudaError 35\b|CUDA initialization failure with error: 35\b",
    FailureKind.DEVICE_LOST: r"cudaError 100\b|CUDA initialization failure",
    FailureKind.UNSUPPORTED: r"plugin not found|could not find plugin|unsupported_node|unsupported_graph"
    r"|unsupported operator|no importer registered|is not supported|not supported by|does not support"
    r"|incompatible device|compute capabilit|target gpu sm|cannot compile for target",
}
"""The first that a logged error matches is its kind; others are classified as CUDA's."""
_RANKS = {FailureKind.OUT_OF_MEMORY: 0, FailureKind.ERROR: 2, FailureKind.DRIVER: 3, FailureKind.DEVICE_LOST: 4}
"""Of several errors that are logged, the one of the lowest rank is what failed; all other kinds have rank 1."""
_SHORT_OF_MEMORY = re.compile(
    r"insuff?i?cient memory|device memory is insufficient|could not be allocated", re.IGNORECASE
)

# "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (words In function at /src/file.cpp:12)" and
# "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (words)", some with "10: " before.
_ERROR = re.compile(
    r"^(?:\d+: )?(?:\[[^\]]*\] |[\w:]+: )?Error Code \d+: (?P<category>[\w ]+?) \((?P<body>.*)\)$", re.DOTALL
)
_ASSERTION = re.compile(
    r'^(?:Assertion failed: )?[^"]*?&& "(?P<quoted>[^"]*)"|^Assertion failed: .+?: (?P<after>[A-Z].*)$'
    r"|^Assertion .+? failed\. (?P<reason>.+)$",
    re.DOTALL,
)
_PLACE = re.compile(
    r"[\s.]*\bIn \w+ at \S+?:\d+\b|\[\w+\.(?:cpp|hpp|h):\d+: \w+\] |^\d+: |^\S+\.(?:cpp|hpp|h):\d+: "
    r"|^Serialization assertion .*? failed\.(?=\S)"
)
"""Function, error number, source file and line."""
_GENERAL = frozenset({"Internal Error", "API Usage Error"})  # categories that add nothing to a message


def construct(make: Callable[[], T], log: Any) -> T:
    """Call one of TensorRT's constructors, which give a null pointer where they fail: Python sees a TypeError."""
    try:
        return make()
    except (TypeError, RuntimeError) as error:
        raise build_failure(log, str(error)) from error


def build_failure(log: Any, otherwise: str = "") -> EngineError:
    """The error for what TensorRT failed, from what it logged; ``otherwise`` is the message where it logged none."""
    if not log.errors:
        return EngineError(FailureKind.ERROR, otherwise or "TensorRT failed without a message")
    errors = [(classify(text), clean(text)) for text in log.errors]
    kind, message = min(errors, key=lambda error: _RANKS.get(error[0], 1))
    # Too little memory is a warning only, and the layer is then without a kernel.
    if kind is FailureKind.NO_TACTIC and any(_SHORT_OF_MEMORY.search(text) for text in log.warnings):
        return EngineError(FailureKind.OUT_OF_MEMORY, f"{message}; tactics were skipped because of too little memory")
    return EngineError(kind, message)


def skipped_tactics(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warning for an engine whose build skipped tactics for want of memory, of which TensorRT logs two lines."""
    short = [text for text in warnings if _SHORT_OF_MEMORY.search(text)]
    count = sum("skipping tactic" in text.lower() for text in short) or len(short)
    text = (
        f"TensorRT skipped tactics ({count}) for want of memory, so that another build may choose other kernels: close"
        " other programs, or set --workspace below what is always free"
    )
    return (text,) if count else ()


def parser_failure(complaints: Sequence[tuple[str, str, str, str]], log: Any) -> EngineError:
    """The error for a model that TensorRT's parser rejects; a complaint is code, words, node and operator.

    The first about an operator, an attribute or a type that it does not support counts.
    """
    errors = []
    for code, words, node, operator in complaints:
        about = operator or ("data" in words and "type" in words)
        is_unsupported = (code.startswith("UNSUPPORTED") and about) or (operator and "Plugin not found" in words)
        kind = FailureKind.OUT_OF_MEMORY if code == "MEM_ALLOC_FAILED" else FailureKind.PARSER
        lines = [clean(line) for line in words.splitlines()]
        message = next((line for line in lines if line and not line.startswith("Invalid Node - ")), "")
        if message in ("false", ""):
            message = "TensorRT's parser does not support it"
        where = "" if not operator else f"{operator} node {node!r}: " if node else f"{operator}: "
        errors.append(EngineError(FailureKind.UNSUPPORTED if is_unsupported else kind, f"{where}{message}"))
    if not errors:
        return build_failure(log, "TensorRT's parser rejects the model without a message")
    return next((each for each in errors if each.kind is FailureKind.UNSUPPORTED), errors[0])


def classify(text: str) -> FailureKind:
    """Kind of failure by the text of one logged error."""
    kind = next((kind for kind, words in _KINDS.items() if re.search(words, text, re.IGNORECASE)), None)
    return kind or classify_cuda(text)


def clean(text: str) -> str:
    """The informative part of a logged error: without function, error number, source file and line."""
    text, category = text.strip(), ""
    match = _ERROR.match(text)
    if match:
        category, text = match["category"], match["body"]
    assertion = _ASSERTION.match(text)
    if assertion:
        text = assertion["quoted"] or assertion["after"] or assertion["reason"]
    text = " ".join(_PLACE.sub("", text).split())
    if text in ("", "no further information"):
        return category or text
    return text if not category or category in _GENERAL else f"{category}: {text}"
