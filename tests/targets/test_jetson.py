"""A Jetson's own files, under a root directory that holds such files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.targets.detect import Gpu, JetsonState, PowerMode, detect_gpus, read_jetson, read_power_mode
from mptune.targets.target import list_targets, match_target
from tests.targets.jetson_files import NANO, ORIN_NANO_SUPER, put_files


def test_everything_is_read_and_a_jetson_may_tell_only_its_name(tmp_path: Path) -> None:
    assert read_power_mode(tmp_path) is read_jetson(tmp_path) is None
    assert read_jetson(put_files(tmp_path / "nano", ORIN_NANO_SUPER)) == NANO
    state = read_jetson(put_files(tmp_path / "next", {"proc/device-tree/model": "NVIDIA Jetson Next\0"}))
    assert state == JetsonState("NVIDIA Jetson Next")
    assert state.facts() == [("Jetson", "NVIDIA Jetson Next")]
    assert JetsonState.from_json(json.loads(json.dumps(NANO.to_json()))) == NANO
    facts = dict(NANO.facts())
    assert facts["Jetson"].endswith("Super (p3767-0005)")
    assert (facts["JetPack"], facts["power mode"]) == ("6.2 (L4T 36.4.3)", "MAXN_SUPER")
    assert facts["GPU clock"] == "306 of 1020 MHz"


@pytest.mark.parametrize(
    ("compatible", "part"),
    [
        ("nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0", "p3701-0005"),
        ("acme,board\0nvidia,p3767-0003\0nvidia,tegra234\0", "p3767-0003"),
        ("acme,board\0nvidia,tegra234\0", ""),
    ],
)
def test_the_module_is_known_on_any_carrier_board(tmp_path: Path, compatible: str, part: str) -> None:
    state = read_jetson(put_files(tmp_path, ORIN_NANO_SUPER, **{"device-tree_compatible": compatible}))
    assert state is not None
    assert state.part == part


@pytest.mark.parametrize(
    ("release", "jetpack"),
    [
        ("# R36 (release), REVISION: 9.9, GCID: 1", "6"),
        ("# R35 (release), REVISION: 4.1, GCID: 1", "5"),
        ("# R39 (release), REVISION: 0, GCID: 1", "7"),
        ("# R99 (release), REVISION: 1.0, GCID: 1", ""),
        ("nonsense", ""),
    ],
)
def test_without_its_package_jetpack_follows_from_jetson_linux(tmp_path: Path, release: str, jetpack: str) -> None:
    state = read_jetson(put_files(tmp_path, ORIN_NANO_SUPER, dpkg_status=None, etc_nv_tegra_release=release))
    assert state is not None
    assert state.jetpack == jetpack


def test_jetpack_5_calls_its_gpu_ga10b_and_a_mode_may_have_no_name(tmp_path: Path) -> None:
    files = {name.replace("17000000.gpu", "17000000.ga10b"): text for name, text in ORIN_NANO_SUPER.items()}
    state = read_jetson(put_files(tmp_path, files, nvpmodel_status="pmode:0009"))
    assert state is not None
    assert (state.gpu_mhz, state.mode.gpu_mhz, state.mode.name) == (306.0, 1020.0, "")


class TestMatch:
    @pytest.mark.parametrize("target", [t for t in list_targets() if t.kind == "jetson"], ids=lambda t: t.name)
    def test_every_module_is_known_by_its_number_and_clock(self, target) -> None:
        for part in target.part_numbers:
            mode = PowerMode(gpu_mhz=target.gpu_mhz)
            gpu = Gpu("NVIDIA Jetson on a board of ours", target.compute_capability, None, "", 0, True, part, mode)
            assert match_target(gpu) == target

    def test_super_by_the_clock_that_the_power_mode_allows(self, tmp_path: Path) -> None:
        (gpu,) = detect_gpus(put_files(tmp_path, ORIN_NANO_SUPER))
        assert match_target(gpu).name == "jetson-orin-nano-8gb-super"
        assert match_target(replace(gpu, mode=PowerMode(gpu_mhz=612.0))).name == "jetson-orin-nano-8gb"
        assert match_target(replace(gpu, mode=PowerMode())).name == "jetson-orin-nano-8gb", "promises least"
        compatible = "nvidia,p9999-0000\0nvidia,tegra234\0"  # a new number: by name and memory
        (gpu,) = detect_gpus(put_files(tmp_path, ORIN_NANO_SUPER, **{"device-tree_compatible": compatible}))
        assert match_target(gpu).name == "jetson-orin-nano-8gb-super"


@pytest.mark.parametrize(
    ("name", "text", "model"),
    [
        ("tmp/nv_jetson_model", "NVIDIA Jetson AGX Orin Developer Kit\0", "NVIDIA Jetson AGX Orin Developer Kit"),
        ("sys/devices/soc0/machine", "NVIDIA Jetson Orin NX\n", "NVIDIA Jetson Orin NX"),
    ],
)
def test_in_a_container_the_device_tree_is_hidden(tmp_path: Path, name: str, text: str, model: str) -> None:
    root = put_files(tmp_path, {name: text, "proc/meminfo": ORIN_NANO_SUPER["proc/meminfo"]})
    state = read_jetson(root)
    assert state is not None
    assert (state.model, state.memory_gb) == (model, 7.8)
    (gpu,) = detect_gpus(root)
    assert gpu.is_jetson
    assert gpu.name == model
    assert gpu.compute_capability == (8, 7)
    assert match_target(gpu).kind == "jetson"
    assert read_jetson(put_files(tmp_path / "no", {"tmp/nv_jetson_model": "Not a Jetson device\n"})) is None


@pytest.mark.parametrize(
    ("model", "mask", "sms"),
    [
        ("NVIDIA Jetson Orin NX", "252\n", 4),
        ("NVIDIA Jetson AGX Orin 32GB", "128\n", 14),
        ("NVIDIA Jetson AGX Orin Developer Kit", "0\n", 16),
        ("NVIDIA Jetson AGX Orin Developer Kit", "248\n", 6),
        ("NVIDIA Jetson AGX Orin Developer Kit", None, None),
        ("NVIDIA Jetson AGX Thor Developer Kit", "252\n", None),
    ],
)
@pytest.mark.parametrize("place", ["gpu.0", "platform/gpu.0", "platform/17000000.gpu", "platform/bus@0/17000000.gpu"])
def test_the_multiprocessors_that_a_mode_leaves(
    model: str, mask: str | None, sms: int | None, place: str, tmp_path: Path
) -> None:
    """Masks by NVIDIA's nvpmodel files; Thor has other TPCs, so that its mask says nothing here."""
    files = {"proc/device-tree/model": model, f"sys/devices/{place}/tpc_pg_mask": mask or ""}
    mode = read_power_mode(put_files(tmp_path, {name: text for name, text in files.items() if text}))
    assert mode == PowerMode("", sms)


@pytest.mark.parametrize(
    ("place", "text", "mhz"),
    [
        ("nvpmodel_clk_cap/emc", "2133000000\n", 2133.0),
        ("nvpmodel_emc_cap/emc_iso_cap", "2133000000\n", 2133.0),
        ("nvpmodel_clk_cap/emc", "0\n", None),
        ("nvpmodel_clk_cap/emc", "2147483647\n", None),
        ("nvpmodel_clk_cap/emc", "9223372036854775807\n", None),
    ],
)
def test_the_cap_of_the_memory(place: str, text: str, mhz: float | None, tmp_path: Path) -> None:
    files = {"proc/device-tree/model": "NVIDIA Jetson Orin NX", f"sys/kernel/{place}": text}
    assert read_power_mode(put_files(tmp_path, files)) == PowerMode("", None, None, mhz)
