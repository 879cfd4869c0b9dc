from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.tensorrt import library as tensorrt
from mptune.engines.tensorrt.library import LibraryJob, check_version, is_installed, load_library, open_log
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


def refused(kind: tensorrt.Kind = "tensorrt") -> str:
    with pytest.raises(EngineError) as caught:
        load_library(kind)
    assert caught.value.kind is FailureKind.UNSUPPORTED
    return caught.value.message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('libnvinfer.so.10: no such file')", "is installed, but does not load: libnvinfer.so"),
        ("raise RuntimeError('libnvinfer.so.10: no such file')", "is installed, but does not load: libnvinfer"),
        ("import tensorrt_bindings_of_nobody", "No module named 'tensorrt_bindings_of_nobody'"),
        ("", "reports its version as '': install it again"),
    ],
)
def test_a_package_that_does_not_load_or_is_missing(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, code)
    assert is_installed("tensorrt")
    assert words in refused()
    monkeypatch.setitem(tensorrt.MODULES, "tensorrt", "no_such_tensorrt")  # type: ignore[misc]
    assert not is_installed("tensorrt")
    assert refused() == "tensorrt is not installed"


def test_plugins_are_registered_once_and_with_the_process_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, PACKAGE)
    first, again = load_library("tensorrt"), load_library("tensorrt")
    assert (first.kind, first.version, first.is_rtx) == ("tensorrt", "10.3.0", False)
    assert first.trt.registered == [""]
    assert first.warnings == again.warnings != ()


@pytest.mark.parametrize(
    ("kind", "version", "words"),
    [
        (
            "tensorrt",
            "8.6.2.3",
            r"8\.6\.2\.3 has no strongly typed.*JetPack 6\.1.*`mptune export RUN --for tensorrt-8`$",
        ),
        ("tensorrt", "9.1.0", r"no strongly typed networks.*JetPack 6\.1 \(TensorRT 10\.3\) or later"),
        ("tensorrt-rtx", "1.2.0.54", "pip install --upgrade tensorrt-rtx"),
    ],
)
def test_versions_that_are_refused(kind: tensorrt.Kind, version: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check_version(kind, version)


def test_versions_that_warn() -> None:
    for version, words in (("10.0.1", "fully available from 10.12"), ("12.0.0", "upgrade mptune")):
        (warning,) = check_version("tensorrt", version)
        assert words in warning
    assert len(check_version("tensorrt", "10.11.0.33")) == 1
    assert check_version("tensorrt", "10.12.0") == check_version("tensorrt", "11.4.1.5") == ()
    assert check_version("tensorrt-rtx", "1.7.1.116") == ()


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


WITH_BUILDER = (
    PACKAGE
    + """
class Severity(int):
    name = 'ERROR'
ILogger.ERROR, ILogger.WARNING, ILogger.INFO = map(Severity, (1, 2, 3))
class Builder:
    def __init__(self, logger):
        for words in {errors}:
            logger.log(ILogger.ERROR, words)
            raise TypeError('pybind11::init(): factory function returned nullptr')
"""
)


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([], ""),
        (
            ["CUDA initialization failure with error: 35"],
            r"it makes no builder \(CUDA init.*: pip install tensorrt-cu12",
        ),
        (["Error Code 6: API Usage Error (no)"], r"it makes no builder \(no\)"),
    ],
)
def test_a_library_is_ready_only_if_it_makes_a_builder(
    errors: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the constructor and its argument are in the recorded APIs (``test_api.py``)."""
    install(tmp_path, monkeypatch, WITH_BUILDER.replace("{errors}", repr(errors)))
    monkeypatch.setattr(tensorrt.cuda, "unavailable_reason", lambda: None)
    monkeypatch.setattr(tensorrt, "detect_gpus", lambda: [Gpu("NVIDIA H200", (9, 0), 150.8, "570.86")])
    report = LibraryJob("tensorrt").run(WorkerState())
    obstacle = report.cuda_obstacle or ""
    assert bool(obstacle) == bool(errors)
    assert re.match(words, obstacle)
