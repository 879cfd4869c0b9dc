"""Profiles: complete, with sources, and matched to GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.errors import TargetError
from mptune.targets.detect import Gpu, PowerMode
from mptune.targets.target import FIGURES, Target, in_power_mode, list_targets, load_target, match_target

MINE = """
format = 1
title = "My board"
kind = "jetson"
compute_capability = "8.7"
fp16_tflops = 10
fp32_tflops = 1.5
bandwidth_gbps = 50
launch_us = 4
"""


def write(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return str(folder / "mine.toml")


@pytest.mark.parametrize("target", list_targets(), ids=lambda target: target.name)
def test_what_every_target_needs(target: Target) -> None:
    given = {figure for figure in FIGURES if getattr(target, figure)}
    assert set(target.sources) == given, "every figure has a source"
    assert "not stated" not in target.sources.values()
    assert load_target(target.name) == target
    needed = ["title", "note"]
    needed += ["compute_capability", "sm_count", "memory_gb", "gpu_names"] if target.kind != "cpu" else []
    needed += ["part_numbers", "memory_mhz"] if target.kind == "jetson" else []
    assert [name for name in needed if not getattr(target, name)] == []
    assert target.kind == "cpu" or target.fp16_tflops > target.fp32_tflops
    if target.kind == "jetson":  # its peaks follow from multiprocessors and clock
        assert target.sources["fp16_tflops"].endswith(f" {target.gpu_mhz:g} MHz")
        sm_ghz = target.sm_count * target.gpu_mhz / 1000
        per_sm = 2048 if target.compute_capability == (8, 7) else 8192
        assert target.fp16_tflops == pytest.approx(per_sm * sm_ghz / 1000, rel=0.02)
        assert target.fp32_tflops == pytest.approx(256 * sm_ghz / 1000, rel=0.05)


def test_the_profiles_that_are_promised() -> None:
    kinds = {t.name: t.kind for t in list_targets()}
    modules = {"agx-orin-64gb", "agx-orin-32gb", "agx-orin-devkit-32gb", "agx-orin-industrial", "agx-thor"}
    modules |= {f"orin-{m}{s}" for m in ("nx-16gb", "nx-8gb", "nano-8gb", "nano-4gb") for s in ("", "-super")}
    assert {f"jetson-{m}" for m in modules} == {name for name, kind in kinds.items() if kind == "jetson"}
    assert {"t4", "a100-40gb", "l4", "rtx-4090", "rtx-4500-ada", "h100", "h200"} <= set(kinds)
    assert (kinds["cpu"], kinds["h200"], load_target("h200").compute_capability) == ("cpu", "gpu", (9, 0))


class TestFileOfTheUser:
    def test_only_the_figures_of_the_roofline_are_needed(self, tmp_path: Path) -> None:
        got = load_target(write(tmp_path, MINE + '[sources]\nbandwidth_gbps = "measured"\n'))
        assert (got.name, got.title, got.compute_capability, got.bandwidth_gbps) == ("mine", "My board", (8, 7), 50.0)
        assert (got.sources["bandwidth_gbps"], got.sources["fp16_tflops"]) == ("measured", "not stated")
        assert (got.memory_gb, "memory_gb" in got.sources) == (None, False)

    @pytest.mark.parametrize(
        ("old", "new", "match"),
        [
            ("format = 1", "format = 2", "format: Input should be 1"),
            ("bandwidth_gbps = 50", "bandwidth_gbps = 0", "bandwidth_gbps: Input should be greater than 0"),
            ("bandwidth_gbps = 50", "", "bandwidth_gbps: Field required"),
            ('kind = "jetson"', 'kind = "tpu"', "kind: Input should be 'jetson', 'gpu' or 'cpu'"),
            ('"8.7"', '"87"', "compute_capability: String should match"),
            ('compute_capability = "8.7"', "", "compute_capability is missing"),
            ("launch_us = 4", "launch_us = 4\nlaunch_ms = 4", "launch_ms: Extra inputs"),
            ("launch_us = 4", 'launch_us = 4\npart_numbers = ["Orin"]', "part_numbers.0: String should match"),
            ("launch_us = 4", 'launch_us = 4\n[sources]\nspeed = "x"', "sources names 'speed'"),
        ],
    )
    def test_misfit(self, tmp_path: Path, old: str, new: str, match: str) -> None:
        path = write(tmp_path, MINE.replace(old, new))
        with pytest.raises(TargetError, match=match) as caught:
            load_target(path)
        assert "mine.toml" in caught.value.message
        assert caught.value.hint


class TestMatch:
    @pytest.mark.parametrize(
        ("gpu", "name"),
        [
            (Gpu("NVIDIA H200", (9, 0), 150.8, "570"), "h200"),
            (Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85.5, "570"), "h100"),
            (Gpu("Tesla T4", (7, 5), 16.1, "570"), "t4"),
            (Gpu("NVIDIA GeForce RTX 4090", None, 25.8, "470"), "rtx-4090"),
            (Gpu("NVIDIA Jetson AGX Orin Developer Kit", (8, 7), 65.9, "L4T 36.4"), "jetson-agx-orin-64gb"),
            (Gpu("NVIDIA Jetson AGX Orin Developer Kit", (8, 7), 32.1, "L4T 36.4"), "jetson-agx-orin-devkit-32gb"),
            (Gpu("NVIDIA Jetson AGX Thor Developer Kit", (11, 0), 131.9, "L4T 38.2.1"), "jetson-agx-thor"),
            (Gpu("NVIDIA Jetson Orin Nano Developer Kit", (8, 7), 7.99, "L4T 36.4"), "jetson-orin-nano-8gb"),
            (Gpu("NVIDIA Jetson Orin Nano Developer Kit", (8, 7), None, "L4T 36.4"), "jetson-orin-nano-4gb"),
        ],
    )
    def test_by_name_and_memory(self, gpu: Gpu, name: str) -> None:
        assert match_target(gpu) == load_target(name)

    def test_a_sibling_with_other_memory_is_another_device(self) -> None:
        got = match_target(Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85.9, "570"))
        assert (got.name, got.memory_gb) == ("a100-sxm4-80gb", 85.9)
        assert got.fp16_tflops == load_target("a100-40gb").fp16_tflops

    def test_a_gpu_without_a_profile_gets_a_stand_in_that_says_so(self) -> None:
        got = match_target(Gpu("NVIDIA GeForce RTX 3090", (8, 6), 25.8, "550"))
        assert (got.name, got.kind, got.compute_capability) == ("geforce-rtx-3090", "gpu", (8, 6))
        assert got.sources["compute_capability"] == got.sources["memory_gb"] == "reported by the driver"
        assert got.sources["fp16_tflops"].startswith("‡ inferred")
        assert got.note.startswith("no profile of its own")
        thor = match_target(Gpu("NVIDIA Jetson AGX Thor Developer Kit", (11, 0), 131.0, "L4T 38.2", is_jetson=True))
        assert (thor.kind, thor.compute_capability) == ("jetson", (11, 0)), "an unknown Jetson takes after a Jetson"
        assert match_target(Gpu("???", None, None, "")).name == "gpu"

    @pytest.mark.parametrize(
        ("gpu", "has_bf16"),
        [
            (Gpu("NVIDIA GeForce RTX 3090", (8, 6), 25.8, "550"), True),
            (Gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11.8, "550"), False),
            (Gpu("NVIDIA Jetson AGX Xavier", (7, 2), 33.0, "L4T 35.4", is_jetson=True), False),
            (Gpu("NVIDIA Jetson Orin Nano Developer Kit", (8, 7), 7.99, "L4T 36.4"), True),
        ],
    )
    def test_bf16_is_there_from_ampere_on(self, gpu: Gpu, has_bf16: bool) -> None:
        got = match_target(gpu)
        assert got.bf16_tflops == (got.fp16_tflops if has_bf16 else None)
        assert (got.tf32_tflops is not None) == ({"bf16_tflops", "tf32_tflops"} <= got.sources.keys()) == has_bf16


@pytest.mark.parametrize(
    ("name", "mode", "sms", "tflops", "gbps"),
    [  # NVIDIA's nvpmodel files, as in LineageOS/android_device_nvidia_concord
        ("jetson-orin-nx-16gb", PowerMode("15W", 4, 612.0, None), 4, 5.0, 102.4),
        ("jetson-orin-nx-16gb", PowerMode("10W", 4, 612.0, 2133.0), 4, 5.0, 68.3),
        ("jetson-orin-nx-16gb", PowerMode("25W", 8, 408.0, None), 8, 6.7, 102.4),
        ("jetson-agx-orin-64gb", PowerMode("30W", 8, 612.0, 3199.0), 8, 10.0, 204.8),
        ("jetson-agx-orin-32gb", PowerMode("MAXN", 16, None, None), 14, 26.7, 204.8),
        ("jetson-agx-orin-64gb", PowerMode(), 16, 42.6, 204.8),
        ("h200", PowerMode("15W", None, 612.0, 2133.0), 132, 989.5, 4800),  # a device without power modes
    ],
)
def test_a_profile_in_a_power_mode(name: str, mode: PowerMode, sms: int, tflops: float, gbps: float) -> None:
    target = load_target(name)
    got = in_power_mode(target, mode)
    assert got.sm_count == sms
    assert got.fp16_tflops == pytest.approx(tflops, rel=0.01)
    assert got.fp32_tflops / target.fp32_tflops == pytest.approx(got.fp16_tflops / target.fp16_tflops)
    assert got.bandwidth_gbps == pytest.approx(gbps, rel=0.01)
    changed = {figure for figure in FIGURES if getattr(got, figure) != getattr(target, figure)}
    assert changed == {f for f, source in got.sources.items() if source.endswith(f"scaled to power mode {mode}")}
    assert (got.figures_sha256 == target.figures_sha256) == (not changed)
