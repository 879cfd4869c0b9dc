"""The device against its profile, and the model against its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mptune
from mptune.engines.environment import Environment
from mptune.graph.hazards.observed_values import ObservedValues, TensorRange
from mptune.graph.loading.model import load_model
from mptune.targets.detect import JetsonState, PowerMode
from mptune.targets.target import load_target
from mptune.tuning.steps.prepare import Observations, check_memory, describe_device
from tests.fakes import Diary, FakeToolchain, Law


class OnJetson(FakeToolchain):
    """Its machine is an Orin Nano at a floating clock."""

    def environment(self) -> Environment:
        state = JetsonState("NVIDIA Jetson Orin Nano", "p3767-0003", mode=PowerMode(gpu_mhz=624.0), gpu_min_mhz=306.0)
        return replace(super().environment(), warnings=("own",), jetson=state)


def test_a_profile_that_the_device_belies_is_a_warning() -> None:
    toolchain = OnJetson(Law(["g000"]))
    own, floats = describe_device(toolchain, load_target("jetson-orin-nano-8gb")).warnings
    assert own == "own"
    assert "floats between 306 and 624 MHz" in floats
    assert any("another module" in w for w in describe_device(toolchain, load_target("jetson-orin-nx-8gb")).warnings)


def test_a_device_that_is_predicted_is_not_this_machine() -> None:
    toolchain = OnJetson(Law(["g000"]), latency_source="predicted")
    assert describe_device(toolchain, load_target("h200")).warnings == ("own",)
    assert describe_device(OnJetson(Law(["g000"])), None).warnings == ("own",)


@pytest.mark.parametrize(("gb", "count"), [(1.0, 0), (1e-5, 1)])
def test_a_model_that_does_not_fit_is_told(mlp_path: Path, gb: float, count: int) -> None:
    target = load_target("jetson-orin-nano-4gb").model_copy(update={"memory_gb": gb})
    observed = ObservedValues({"x": TensorRange(0.0, (1, 32))})
    seen = check_memory(Observations(observed, ("first",)), load_model(mlp_path), target)
    assert seen.warnings[0] == "first"
    assert len(seen.warnings) == 1 + count
    assert check_memory(seen, load_model(mlp_path), None) is seen


def test_a_search_warns_before_it_starts(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    """A board of the user's own with 10 kB of memory; the model has 34 kB of weights."""
    (tmp_path / "tiny.toml").write_text(
        'format = 1\ntitle = "Tiny board"\nkind = "jetson"\ncompute_capability = "8.7"\nfp16_tflops = 1\n'
        "fp32_tflops = 0.5\nbandwidth_gbps = 10\nlaunch_us = 4\nmemory_gb = 1e-5\n"
    )
    diary = Diary()
    settings = {"data": mlp_data, "target": str(tmp_path / "tiny.toml"), "out": tmp_path / "run.mptune"}
    front = mptune.search(mlp_path, listener=diary, budget=2, **settings)  # type: ignore[arg-type]
    (told,) = (text for text in diary.warnings if "all-FP32, the baseline, needs about" in text)
    assert "Tiny board has 1e-05 GB, which the system shares; all-FP16 does not fit either" in told
    assert told in front.warnings
    assert told in mptune.search(mlp_path, budget=2, **settings).warnings, "also when it is resumed"  # type: ignore[arg-type]
