"""Where the device here is not the one that a profile describes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.targets.detect import JetsonState, PowerMode
from mptune.targets.findings import not_here_findings, not_measured
from mptune.targets.target import load_target, other_mode, profile_warnings
from tests.graph.test_corpus import CORPUS
from tests.targets.jetson_files import NANO

LOCKED = replace(NANO, gpu_min_mhz=1020.0, gpu_mhz=1020.0)


def test_the_profile_of_the_device_and_what_is_unknown_are_no_warning_a_floating_clock_is() -> None:
    assert profile_warnings(load_target("jetson-orin-nano-8gb-super"), LOCKED) == ()
    assert profile_warnings(load_target("jetson-orin-nano-4gb"), JetsonState("NVIDIA Jetson Orin Nano")) == ()
    (text,) = profile_warnings(load_target("jetson-orin-nano-8gb-super"), NANO)
    assert re.search("between 306 and 1020 MHz.*jetson_clocks", text)


def test_another_clock_or_fewer_multiprocessors() -> None:
    capped = replace(NANO, mode=PowerMode("25W", 8, 408.0, 3199.0), gpu_min_mhz=408.0, part="p3767-0000")
    part = replace(LOCKED, part="p3767-0002", mode=PowerMode("15W", 4, 612.0, 3199.0), gpu_min_mhz=612.0)
    for name, state, has, assumes in (
        ("nano-8gb", LOCKED, "MAXN_SUPER has GPU 1020 MHz, memory 3199 MHz", "GPU 625 MHz, memory 2133 MHz (16.6"),
        ("nx-16gb-super", capped, "25W has GPU 408 MHz", "GPU 1173 MHz (6.7"),
        ("nx-16gb", part, "15W has 4 SMs, GPU 612 MHz", "8 SMs, GPU 918 MHz (5.0"),
    ):
        (text,) = profile_warnings(load_target(f"jetson-orin-{name}"), state)
        assert f"power mode {has}; the profile jetson-orin-{name} assumes {assumes} of " in text


@pytest.mark.parametrize(
    ("now", "is_told"),
    [
        (LOCKED.mode, False),
        (replace(LOCKED.mode, sm_count=None, memory_mhz=None), False),
        (replace(LOCKED.mode, name="15W"), True),
        (replace(LOCKED.mode, gpu_mhz=612.0), True),
        (replace(LOCKED.mode, memory_mhz=2133.0), True),
        (None, False),
    ],
    ids=["the same", "less is known", "name", "GPU", "memory", "no Jetson"],
)
def test_another_mode_than_before(now: PowerMode | None, is_told: bool) -> None:
    state = None if now is None else replace(LOCKED, mode=now)
    told = other_mode(LOCKED, state, "the search measured", "set the other")
    mode = r"MAXN_SUPER \(8 SMs, GPU up to 1020 MHz, memory up to 3199 MHz\)"
    pattern = f"the search measured in power mode {mode}, and this is .*: set the other$"
    assert [bool(re.match(pattern, text)) for text in told] == [True] * is_told


@pytest.mark.parametrize("part", [LOCKED.part, ""], ids=["by part", "by name and memory"])
@pytest.mark.parametrize("name", ["jetson-orin-nx-8gb-super", "jetson-orin-nano-4gb-super", "h200"])
def test_another_module(name: str, part: str) -> None:
    assert "another module" in profile_warnings(load_target(name), replace(LOCKED, part=part))[0]


@pytest.mark.parametrize(("name", "tf32_ms"), [("jetson-orin-nano-8gb", 0.362), ("t4", None), ("cpu", None)])
def test_a_device_is_not_measured_and_all_fp32_is_held_beside_tf32_where_the_device_has_it(
    name: str, tf32_ms: float | None
) -> None:
    model = load_model(Path(__file__).parents[2] / "benchmarks/models/digits_vit.onnx")
    grouped, target = GroupedModel(model, find_groups(model)), load_target(name)
    plain = not_measured("a device")
    assert plain.code == "target-not-here"
    assert plain.message.startswith("a device is not measured here: latency is predicted")
    (finding,) = not_here_findings(plain, grouped, target, {})
    assert (finding == plain) == (tf32_ms is None)
    if tf32_ms is not None:
        assert finding.evidence["target"] == "a device"
        assert finding.evidence["fp32_ms"] == pytest.approx(0.379, abs=1e-3)
        assert finding.evidence["tf32_ms"] == pytest.approx(tf32_ms, abs=1e-3)
        assert "true FP32, 0.379 ms: in TF32, TensorRT's own default, the model would take 0.362 ms" in finding.text
        (allowed,) = not_here_findings(plain, grouped, target, {}, tf32=True)
        assert allowed.text.endswith("emulated errors leave out what it rounds")
    # A finished search that is read again opens no target: what it said stays.
    assert not_here_findings(finding, grouped, None, {}) == (finding,)


@pytest.mark.parametrize(("name", "operator"), [("gru", "GRU"), ("lstm", "LSTM"), ("vit", "")])
def test_recurrent_layers_are_not_emulated(name: str, operator: str) -> None:
    model = load_model(CORPUS[0].parent / f"{name}.onnx")
    grouped = GroupedModel(model, find_groups(model))
    _, *findings = not_here_findings(not_measured("Jetson Orin Nano 8 GB"), grouped, None, {})
    assert [finding.code for finding in findings] == ["emulation-differs"] * bool(operator)
    for finding in findings:
        assert finding.text.startswith(f"the errors of {operator} are not emulated here")
        assert [group.id for group in grouped.groups if operator in group.ops] == list(finding.where.groups)
