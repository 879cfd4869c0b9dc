"""What every backend must say of itself, and which target and backend a run gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mptune.engines.backend import Backend, Place
from mptune.engines.context import RunContext
from mptune.engines.tensorrt.library import LibraryReport, is_installed
from mptune.engines.toolchains import choose
from mptune.engines.toolchains.choose import choose_target, find_backends, list_toolchains, open_toolchain
from mptune.errors import TargetError
from mptune.targets.detect import Gpu
from mptune.targets.target import load_target
from tests.engines.engine_support import install
from tests.engines.evaluator.mptune_evaluator import EVALUATOR

WITHOUT_GPU = pytest.mark.skipif(bool(choose.detect_gpus()), reason="needs a machine without a GPU")
ORIN = Gpu("NVIDIA Jetson Orin Nano", (8, 7), 7.8, "L4T 36.4.3", is_jetson=True)
OLD_DRIVER = "the driver is older than the CUDA of cuda-python: pip install 'cuda-bindings<13', or update the driver"
BOTH = {"tensorrt": LibraryReport("10.16.2"), "tensorrt_rtx": LibraryReport("1.7.1")}
RTX = {"tensorrt_rtx": LibraryReport("1.7.1")}
BROKEN = {"tensorrt": "tensorrt is installed, but a library is missing"}
NO_BINDINGS = {"tensorrt": LibraryReport("10.3.0", ("typed in part: update",), "cuda-python is not usable")}


@pytest.mark.parametrize("backend", [*find_backends(), EVALUATOR], ids=lambda backend: backend.name)
def test_every_backend_says_how_it_stands(backend: Backend) -> None:
    for target in map(load_target, ("cpu", "jetson-orin-nano-8gb", "rtx-4500-ada")):
        answer = backend.available(Place(target))
        assert answer.ability or not answer.obstacle or answer.hint
        assert answer.title.startswith(backend.name) or answer.ability != "measures"
    for status in backend.statuses(choose.detect_gpus()):
        assert status.name.startswith(backend.name)
        assert status.reason
        assert status.available or status.install or "no GPU" in status.reason


def test_doctor_lists_every_backend() -> None:
    statuses = {status.name: status for status in list_toolchains()}
    assert statuses.keys() == {"onnxruntime-cuda", "onnxruntime-cpu", "tensorrt", "tensorrt-rtx"}
    assert statuses["onnxruntime-cpu"].available
    if not choose.detect_gpus() and is_installed("tensorrt-rtx"):
        assert "builds ahead of time for compute capability 7.5, 8.0, 8.6, 8.9" in statuses["tensorrt-rtx"].reason
    if not is_installed("tensorrt"):
        assert statuses["tensorrt"].reason == "tensorrt is not installed"
        assert "pip install tensorrt" in statuses["tensorrt"].install


def opened(target: str, context: RunContext) -> tuple[str, tuple[str, ...]]:
    """The name of what a target gets, and its warnings."""
    with open_toolchain(load_target(target), context) as tools:
        assert (tools.builder is None) is (tools.name == "emulation")
        assert tools.error_source == ("measured" if tools.latency_source == "measured" else "emulated")
        return tools.name, tools.environment().warnings


@WITHOUT_GPU
@pytest.mark.usefixtures("gpu_here")
@pytest.mark.parametrize(
    ("packages", "no_cuda", "engine", "expected"),
    [
        (BOTH, None, "auto", "tensorrt"),
        (BOTH, None, "tensorrt-rtx", "tensorrt-rtx"),
        (BOTH, None, "onnxruntime", "onnxruntime"),
        (RTX, None, "auto", "tensorrt-rtx"),
        (RTX, None, "tensorrt", "cannot be used for NVIDIA RTX 4500 Ada.*: tensorrt is not installed"),
        (BROKEN, None, "auto", "onnxruntime"),
        (NO_BINDINGS, None, "auto", "onnxruntime"),
        (NO_BINDINGS, None, "tensorrt", "cuda-python is not usable"),
        ({}, "no CUDA", "auto", "emulation"),
        ({}, "no CUDA", "onnxruntime", "cannot be used for NVIDIA RTX 4500 Ada"),
    ],
)
def test_a_gpu_here_is_measured_by_the_first_that_can(
    packages: Any, no_cuda: str | None, engine: Any, expected: str, monkeypatch: Any, mlp_context: RunContext
) -> None:
    install(monkeypatch, no_cuda, **packages)
    context = mlp_context.with_settings(engine=engine)
    if " " in expected:
        with pytest.raises(TargetError, match=expected):
            opened("rtx-4500-ada", context)
        return
    name, warnings = opened("rtx-4500-ada", context)
    assert name == expected
    passed_over = [text.split(" is passed over for NVIDIA RTX 4500 Ada")[0] for text in warnings if "passed" in text]
    assert passed_over == (["onnxruntime"] if no_cuda else ["tensorrt"] if packages in (BROKEN, NO_BINDINGS) else [])


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("target", "engine", "expected"),
    [
        ("cpu", "tensorrt", "--engine tensorrt cannot be used for .*: it is for NVIDIA GPUs"),
        ("cpu", "tensorrt-rtx", "--engine tensorrt-rtx cannot be used for .*: it is for NVIDIA GPUs"),
        ("jetson-orin-nano-8gb", "tensorrt", "TensorRT builds engines on the device"),
        ("jetson-orin-nano-8gb", "tensorrt-rtx", "it builds for compute capability"),
        ("rtx-4500-ada", "onnxruntime", "emulation"),
        ("t4", "auto", "emulation"),  # auto builds for RTX GPUs alone
        ("a100-40gb", "auto", "emulation"),
        ("h100", "auto", "emulation"),
    ],
)
def test_a_device_elsewhere_is_predicted_or_built_for(
    target: str, engine: Any, expected: str, mlp_context: RunContext
) -> None:
    context = mlp_context.with_settings(engine=engine)
    if " " not in expected:
        assert opened(target, context)[0] == expected
        return
    with pytest.raises(TargetError, match=expected) as caught:
        opened(target, context)
    assert caught.value.hint
    assert ("leave --engine at auto" in caught.value.hint) is expected.startswith("TensorRT builds")


@pytest.mark.parametrize("target", ["cpu", "jetson-orin-nano-8gb"])
def test_without_tensorrt_engines_plugins_are_refused(mlp_context: RunContext, target: str) -> None:
    """Nothing would load them: neither ONNX Runtime nor a prediction."""
    with pytest.raises(TargetError, match="is for engines of TensorRT"):
        opened(target, mlp_context.with_settings(plugins=(Path("a.so"),)))


def test_a_named_target_is_taken_at_its_word_and_without_a_gpu_auto_is_a_jetson() -> None:
    choice = choose_target("cpu")
    assert (choice.target.name, choice.why) == ("cpu", "")
    with pytest.raises(TargetError):
        choose_target("no-such-device")
    if not choose.detect_gpus():
        choice = choose_target("auto")
        assert choice.target.name == "jetson-orin-nano-8gb"
        assert "no GPU" in choice.why


def test_a_device_file_without_a_name_is_no_reason_to_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "detect_gpus", lambda: ())
    monkeypatch.setattr(choose, "hidden_gpu", lambda: Path("/dev/nvhost-gpu"))
    with pytest.raises(TargetError, match="/dev/nvhost-gpu shows an NVIDIA GPU") as caught:
        choose_target("auto")
    assert "NAME predicts" in caught.value.hint
    assert choose_target("jetson-orin-nano-8gb").target.kind == "jetson"


def test_what_keeps_tensorrt_from_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is not installed with CUDA on a Jetson: its reason alone would mislead."""
    monkeypatch.setattr(choose, "detect_gpus", lambda: (ORIN,))
    install(monkeypatch, "no CUDA provider", tensorrt=LibraryReport("10.3.0", (), OLD_DRIVER))
    why = choose_target("auto").why
    assert why.startswith(f"{ORIN.name} was found, but cannot be measured (")
    assert OLD_DRIVER in why
    assert OLD_DRIVER in {status.name: status for status in list_toolchains()}["tensorrt"].reason
