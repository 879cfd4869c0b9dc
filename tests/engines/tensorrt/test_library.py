"""TensorRT's package, versions and log, and what it says of a failure.

The messages are TensorRT's own: of TensorRT-RTX 1.7.1 as it printed them, and of 8.5 to 10.15 in public issues.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.tensorrt import library as tensorrt
from mptune.engines.tensorrt.library import (
    LibraryJob,
    build_failure,
    check_version,
    is_installed,
    load_library,
    open_log,
    parser_failure,
    skipped_tactics,
)
from mptune.processes.child import WorkerState
from mptune.targets.detect import Gpu

PACKAGE = """
__version__ = '10.3.0'
registered = []
class ILogger:
    INFO = ERROR = WARNING = 0
def init_libnvinfer_plugins(logger, namespace):
    assert isinstance(logger, ILogger)
    registered.append(namespace)
    return True
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a package of the name ``tensorrt`` on the path, with this content."""
    package = folder / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('libnvinfer.so.10: no such file')", "is installed, but does not load: libnvinfer.so"),
        ("raise RuntimeError('libnvinfer.so.10: no such file')", "is installed, but does not load: libnvinfer"),
        ("import tensorrt_bindings_of_nobody", "No module named 'tensorrt_bindings_of_nobody'"),
        ("", "reports its version as '': install it again"),
        (None, "tensorrt is not installed"),
    ],
)
def test_a_package_that_does_not_load_or_is_missing(
    code: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, code or "")
    if code is None:
        monkeypatch.setitem(tensorrt.MODULES, "tensorrt", "no_such_tensorrt")  # type: ignore[misc]
    assert is_installed("tensorrt") is (code is not None)
    with pytest.raises(EngineError, match=words) as caught:
        load_library("tensorrt")
    assert caught.value.kind is FailureKind.UNSUPPORTED


def test_plugins_are_registered_once_and_with_the_process_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, PACKAGE)
    first, again = load_library("tensorrt"), load_library("tensorrt")
    assert (first.kind, first.version, first.is_rtx) == ("tensorrt", "10.3.0", False)
    assert first.trt.registered == [""]
    assert first.warnings == again.warnings != ()


@pytest.mark.parametrize(
    ("kind", "version", "refusal", "warning"),
    [
        ("tensorrt", "8.6.2.3", r"8\.6\.2\.3 has no strongly typed.*`mptune export RUN --for tensorrt-8`$", ""),
        ("tensorrt", "9.1.0", r"no strongly typed networks.*JetPack 6\.1 \(TensorRT 10\.3\) or later", ""),
        ("tensorrt-rtx", "1.2.0.54", "pip install --upgrade tensorrt-rtx", ""),
        ("tensorrt", "10.0.1", "", "fully available from 10.12"),
        ("tensorrt", "10.11.0.33", "", "fully available from 10.12"),
        ("tensorrt", "10.12.0", "", ""),
        ("tensorrt", "11.4.1.5", "", ""),
        ("tensorrt", "12.0.0", "", "upgrade mptune"),
        ("tensorrt-rtx", "1.7.1.116", "", ""),
    ],
)
def test_versions_that_are_refused_or_warn(kind: tensorrt.Kind, version: str, refusal: str, warning: str) -> None:
    if refusal:
        with pytest.raises(EngineError, match=refusal):
            check_version(kind, version)
        return
    warnings = check_version(kind, version)
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


@pytest.mark.tensorrt_rtx
def test_the_log_keeps_problems_and_prints_what_a_person_may_need(capsys: pytest.CaptureFixture[str]) -> None:
    library = load_library("tensorrt-rtx")
    log, severity = open_log(library.trt), library.trt.ILogger.Severity
    for name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
        log.log(getattr(severity, name), f"words of {name}")
    assert log.errors == ["words of INTERNAL_ERROR", "words of ERROR"]
    assert log.warnings == ["words of WARNING"]
    printed = capsys.readouterr().err.splitlines()
    assert printed[1] == "[TensorRT ERROR] words of ERROR"
    assert len(printed) == 4
    assert open_log(library.trt) is log  # TensorRT would ignore another one.
    assert log.errors == log.warnings == []


WITH_BUILDER = """
class Severity(int):
    name = 'ERROR'
ILogger.ERROR, ILogger.WARNING, ILogger.INFO = map(Severity, (1, 2, 3))
class Builder:
    def __init__(self, logger):
        for words in %r:
            if words:
                logger.log(ILogger.ERROR, words)
            raise TypeError('pybind11::init(): factory function returned nullptr')
"""


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([], "$"),
        (
            ["CUDA initialization failure with error: 35"],
            r"it makes no builder \(CUDA init.*: pip install tensorrt-cu12",
        ),
        (["Error Code 6: API Usage Error (no)"], r"it makes no builder \(no\)"),
        ([""], r"it makes no builder \(.*returned nullptr\)"),
    ],
)
def test_a_library_is_ready_only_if_it_makes_a_builder(
    errors: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the constructor and its argument are in the recorded APIs (``test_api.py``)."""
    install(tmp_path, monkeypatch, PACKAGE + WITH_BUILDER % errors)
    monkeypatch.setattr(tensorrt.cuda, "unavailable_reason", lambda: None)
    monkeypatch.setattr(tensorrt, "detect_gpus", lambda: [Gpu("NVIDIA H200", (9, 0), 150.8, "570.86")])
    assert re.match(words, LibraryJob("tensorrt").run(WorkerState()).cuda_obstacle or "")


def logged(*errors: str, warnings: Sequence[str] = ()) -> Any:
    return SimpleNamespace(errors=[*errors], warnings=[*warnings])


MYELIN = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection:"
    " no tactics to implement the operation within workspace limit. Consider increase the allowed workspace size if"
    " applicable.; [tactic.cpp:264: run] Error during tactic selection. In compileGraph at"
    " /_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
FOREIGN = (
    "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on an"
    " incompatible device, expecting compute 8.9 got compute 8.6, please rebuild.)"
)
NO_DEVICE = (
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at"
    " /_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient))"
)
USAGE = "IBuilder::x: Error Code 4: API Usage Error (Network has no outputs In validate at /_src/network.cpp:3)"
MISSING = (
    "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (Could not find any implementation for node"
    " {ForeignNode[(Unnamed Layer* 1247) [Shuffle].../layers.7/Transpose_2 + /layers.7/Reshape_4]}.)"
)
NO_MEMORY = "[x.cpp::y::1] Error Code 2: OutOfMemory (Requested size was 8 bytes.)"
SKIPPED = "Skipping tactic 0 due to insuffcient memory on requested size of 1179648 detected for tactic 60."


@pytest.mark.parametrize(
    ("errors", "warnings", "kind", "words"),
    [
        ([MYELIN], [], FailureKind.NO_TACTIC, "Myelin: Tactic Selection: no tactics to implement the operation"),
        ([FOREIGN], [], FailureKind.UNSUPPORTED, "The engine plan file is generated on an incompatible device,"),
        ([NO_DEVICE, USAGE, NO_DEVICE], [], FailureKind.ERROR, "Network has no outputs$"),
        ([NO_DEVICE], [], FailureKind.DRIVER, r"Cuda Runtime: \(cudaError 35"),
        ([NO_DEVICE.replace("35", "100")], [], FailureKind.DEVICE_LOST, ""),
        (["10: Could not find any implementation for node a.", NO_MEMORY], [], FailureKind.OUT_OF_MEMORY, ""),
        ([MISSING], [], FailureKind.NO_TACTIC, r".*\[Shuffle\].../layers.7/Transpose_2 \+ /layers.7/Reshape_4\]}.$"),
        ([MISSING], [SKIPPED], FailureKind.OUT_OF_MEMORY, ".*tactics were skipped because of too little memory$"),
    ],
)
def test_the_telling_error_is_taken_whatever_stands_around_it(
    errors: list[str], warnings: list[str], kind: FailureKind, words: str
) -> None:
    """Of tactics that it skips for want of memory TensorRT warns, then it misses an implementation."""
    failure = build_failure(logged(*errors, warnings=warnings))
    assert failure.kind is kind
    assert re.match(words, failure.message)
    assert "/_src/" not in failure.message


PLUGIN = 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
TYPES = (
    "Invalid Node - nn\nITensor::getDimensions: Error Code 4: API Usage Error (nn: ElementWiseOperation SUM must have"
    " same input types. But they are of types Float and Half. In validateTypes at /_src/x/node.cpp:40)\n"
)
UNSUPPORTED = ("UNSUPPORTED_NODE", f"Assertion failed: {PLUGIN}", "n", "Round")
INVALID = ("INVALID_NODE", TYPES, "nn", "Add")
FOLLOWS = ("INVALID_GRAPH", "something follows from it", "", "")
MISMATCH = "Add node 'nn': nn: ElementWiseOperation SUM must have same input types."


@pytest.mark.parametrize(
    ("complaints", "kind", "begins"),
    [
        ([UNSUPPORTED], FailureKind.UNSUPPORTED, "Round node 'n': Plugin not found, are"),
        ([FOLLOWS, UNSUPPORTED], FailureKind.UNSUPPORTED, "Round node 'n': Plugin not found, are"),
        ([INVALID], FailureKind.PARSER, MISMATCH),
        ([FOLLOWS, INVALID], FailureKind.PARSER, "something follows from it"),
        ([("MEM_ALLOC_FAILED", "words", "", "")], FailureKind.OUT_OF_MEMORY, "words"),
        ([], FailureKind.ERROR, ""),
    ],
)
def test_a_complaint_about_an_operator_counts_most(complaints: Any, kind: FailureKind, begins: str) -> None:
    error = parser_failure(complaints, logged())
    assert error.kind is kind
    assert error.message.startswith(begins)


def test_tactics_skipped_for_memory_are_a_warning_of_the_engine() -> None:
    request = "Tactic Device request: 4106MB Available: 2893MB. Device memory is insufficient to use tactic."
    for warning in (request, SKIPPED):
        (text,) = skipped_tactics(["Detected layernorm nodes.", warning])
        assert "--workspace" in text
    assert skipped_tactics(["Skipping tactic 5 due to x"]) == ()
