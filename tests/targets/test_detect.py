"""What is here: read from real programs and files that stand where the driver's and a Jetson's would."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.targets.detect import (
    Gpu,
    JetsonState,
    PowerMode,
    Throttling,
    detect_gpus,
    hidden_gpu,
    read_jetson,
    read_power_mode,
    read_throttling,
    throttling_warnings,
)
from mptune.targets.target import list_targets, match_target
from tests.targets.jetson_files import NANO, ORIN_NANO_SUPER, put_files

H200 = "0, GPU-aaaa, NVIDIA H200, 9.0, 143771, 570.124.06"
GPU_FOLDERS = ("gpu.0", "platform/gpu.0", "platform/17000000.gpu", "platform/bus@0/17000000.gpu")
L4 = "1, GPU-bbbb, NVIDIA L4, 8.9, 23034, 570.124.06"


@pytest.fixture(autouse=True)
def _only_what_the_test_puts_there(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def smi(tmp_path: Path):
    def write(body: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)

    return write


def prints(*lines: str) -> str:
    return "\n".join(f"echo '{line}'" for line in lines)


def test_rows_become_gpus(smi, tmp_path: Path) -> None:
    assert detect_gpus(tmp_path) == (), "no driver"
    smi(f'echo "$@" > "{tmp_path}/asked"\n' + prints(H200, L4, "2, GPU-c, NVIDIA GB10, [N/A], [N/A], 580.1"))
    assert detect_gpus(tmp_path) == (
        Gpu("NVIDIA H200", (9, 0), 150.8, "570.124.06", 0),
        Gpu("NVIDIA L4", (8, 9), 24.2, "570.124.06", 1),
        Gpu("NVIDIA GB10", None, None, "580.1", 2),
    )
    asked = (tmp_path / "asked").read_text()
    assert re.match("--query-gpu=index,uuid,name,compute_cap.* --format=csv,noheader,nounits$", asked)


TROUBLE = {
    "fails": "exit 9",
    "crashes": "kill -9 $$",
    "old driver": prints('Field "compute_cap" is not a valid field to query.') + "\nexit 2",
    "no devices": prints("No devices were found"),
    "hangs": "while :; do :; done",
    "garbage": "printf '\\377\\376\\000'",
    "no program": "",
}


@pytest.mark.parametrize("body", TROUBLE.values(), ids=TROUBLE)
def test_a_driver_in_trouble_is_no_gpu(smi, tmp_path: Path, body: str) -> None:
    smi(body)
    if not body:
        (tmp_path / "bin" / "nvidia-smi").write_bytes(b"\x7fELF broken")
    assert detect_gpus(tmp_path, timeout_s=0.5) == ()


VISIBLE = {
    "1,0": ["NVIDIA L4", "NVIDIA H200"],
    "GPU-bb": ["NVIDIA L4"],
    "0,7,1": ["NVIDIA H200"],
    "": [],
    "MIG-1234": ["NVIDIA H200", "NVIDIA L4"],
}


@pytest.mark.parametrize("visible", VISIBLE)
def test_cuda_visible_devices(smi, tmp_path: Path, monkeypatch, visible: str) -> None:
    smi(prints(H200, L4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(gpu.index, gpu.name) for gpu in detect_gpus(tmp_path)] == list(enumerate(VISIBLE[visible]))


def test_a_jetson_is_known_by_its_device_tree(smi, tmp_path: Path) -> None:
    next_one = put_files(tmp_path / "next", {"proc/device-tree/model": "NVIDIA Jetson Next"})
    assert detect_gpus(next_one) == (Gpu("NVIDIA Jetson Next", None, None, "", is_jetson=True),)
    assert detect_gpus(put_files(tmp_path / "pi", {"proc/device-tree/model": "Raspberry Pi 5 Model B"})) == ()
    put_files(tmp_path, ORIN_NANO_SUPER)
    smi(prints("0, [N/A], Orin (nvgpu), [N/A], [N/A], 540.4.0"))
    gpu = Gpu(NANO.model, (8, 7), 7.8, "L4T 36.4.3", is_jetson=True, part="p3767-0005", mode=NANO.mode)
    assert detect_gpus(tmp_path) == (gpu,)


@pytest.mark.parametrize("name", ["dev/nvidia0", "dev/nvhost-gpu", "dev/nvgpu/igpu0/ctrl"])
def test_a_gpu_that_nothing_names_is_not_overlooked(smi, name: str, tmp_path: Path, monkeypatch) -> None:
    assert hidden_gpu(tmp_path) is None
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()
    assert detect_gpus(tmp_path) == ()
    assert hidden_gpu(tmp_path) == tmp_path / name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert hidden_gpu(tmp_path) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi(prints(H200))  # found
    assert hidden_gpu(tmp_path) is None


def test_everything_is_read_and_a_jetson_may_tell_only_its_name(tmp_path: Path) -> None:
    assert read_power_mode(tmp_path) is read_jetson(tmp_path) is None
    assert read_jetson(put_files(tmp_path / "nano", ORIN_NANO_SUPER)) == NANO
    state = read_jetson(put_files(tmp_path / "next", {"proc/device-tree/model": "NVIDIA Jetson Next\0"}))
    assert state == JetsonState("NVIDIA Jetson Next")
    assert state.facts() == [("Jetson", "NVIDIA Jetson Next")]
    assert JetsonState.from_json(json.loads(json.dumps(NANO.to_json()))) == NANO
    wanted = {"JetPack": "6.2 (L4T 36.4.3)", "power mode": "MAXN_SUPER", "GPU clock": "306 of 1020 MHz"}
    assert wanted.items() <= dict(NANO.facts()).items()
    assert dict(NANO.facts())["Jetson"].endswith("Super (p3767-0005)")


@pytest.mark.parametrize(
    ("changed", "fact", "value"),
    [
        ({"device-tree_compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0"}, "part", "p3701-0005"),
        ({"device-tree_compatible": "acme,board\0nvidia,p3767-0003\0nvidia,tegra234\0"}, "part", "p3767-0003"),
        ({"device-tree_compatible": "acme,board\0nvidia,tegra234\0"}, "part", ""),
        ({"etc_nv_tegra_release": "# R35 (release), REVISION: 4.1, GCID: 1"}, "jetpack", "5"),
        ({"etc_nv_tegra_release": "# R39 (release), REVISION: 0, GCID: 1"}, "jetpack", "7"),
        ({"etc_nv_tegra_release": "# R99 (release), REVISION: 1.0, GCID: 1"}, "jetpack", ""),
        ({"etc_nv_tegra_release": "nonsense"}, "jetpack", ""),
    ],
)
def test_the_module_and_without_its_package_jetpack(tmp_path: Path, changed, fact: str, value: str) -> None:
    state = read_jetson(put_files(tmp_path, ORIN_NANO_SUPER, dpkg_status=None, **changed))
    assert getattr(state, fact) == value


def test_jetpack_5_calls_its_gpu_ga10b_and_a_mode_may_have_no_name(tmp_path: Path) -> None:
    files = {name.replace("17000000.gpu", "17000000.ga10b"): text for name, text in ORIN_NANO_SUPER.items()}
    state = read_jetson(put_files(tmp_path, files, nvpmodel_status="pmode:0009"))
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
    (gpu,) = detect_gpus(root)
    assert (gpu.name, gpu.compute_capability, gpu.memory_gb, gpu.is_jetson) == (model, (8, 7), 7.8, True)
    assert match_target(gpu).kind == "jetson"
    assert read_jetson(put_files(tmp_path / "no", {"tmp/nv_jetson_model": "Not a Jetson device\n"})) is None


NX, AGX = "NVIDIA Jetson Orin NX", "NVIDIA Jetson AGX Orin Developer Kit"
MASK, CAP = "devices/gpu.0/tpc_pg_mask", "kernel/nvpmodel_clk_cap/emc"


@pytest.mark.parametrize(
    ("model", "file", "text", "mode"),
    [  # masks by NVIDIA's nvpmodel files; Thor has other TPCs
        *((NX, MASK.replace("gpu.0", gpu), "252\n", PowerMode("", 4)) for gpu in GPU_FOLDERS),
        ("NVIDIA Jetson AGX Orin 32GB", MASK, "128\n", PowerMode("", 14)),
        (AGX, MASK, "248\n", PowerMode("", 6)),
        (AGX, "nothing", "", PowerMode()),
        ("NVIDIA Jetson AGX Thor Developer Kit", MASK, "252\n", PowerMode()),
        (NX, CAP, "2133000000\n", PowerMode("", None, None, 2133.0)),
        (NX, "kernel/nvpmodel_emc_cap/emc_iso_cap", "2133000000\n", PowerMode("", None, None, 2133.0)),
        (NX, CAP, "0\n", PowerMode()),
        (NX, CAP, "9223372036854775807\n", PowerMode()),
    ],
)
def test_the_multiprocessors_and_memory_clock_of_a_mode(
    model: str, file: str, text: str, mode: PowerMode, tmp_path: Path
) -> None:
    assert read_power_mode(put_files(tmp_path, {"proc/device-tree/model": model, f"sys/{file}": text})) == mode


COUNTS = {f"sys/class/hwmon/hwmon3/oc{k}_event_cnt": count for k, count in ((1, "0\n"), (2, "15\n"), (3, "37\n"))}
CLOCKS = {f"sys/class/devfreq/17000000.gpu/{name}_freq": "1020000000\n" for name in ("cur", "max")}
ORIN = {**CLOCKS, "sys/class/hwmon/hwmon3/name": "soctherm_oc\n", **COUNTS}
CALM = Throttling(1020.0, {"oc1": 0, "oc2": 15, "oc3": 37})


def test_clocks_and_counters_are_read(tmp_path: Path) -> None:
    assert read_throttling(put_files(tmp_path / "orin", ORIN)) == CALM
    assert throttling_warnings(CALM, CALM, CALM) == ()
    thor = put_files(tmp_path / "thor", {"sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000"})
    assert read_throttling(thor) == Throttling(1575.0, {})
    garbled = put_files(tmp_path / "garbled", {**ORIN, **dict.fromkeys(COUNTS, "not a number")})
    assert read_throttling(garbled) == replace(CALM, events={})
    assert read_throttling(put_files(tmp_path / "pc", COUNTS)) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hwmon3_oc1_event_cnt": "1"}, "over-current, oc1: 1 times"),
        ({"hwmon3_oc2_event_cnt": "18"}, "over-current, oc2: 3 times"),
        ({"hwmon3_oc3_event_cnt": "216"}, "over-current, oc3: 179 times"),
        ({"17000000_gpu_cur_freq": "612000000"}, "fell from 1020 to 612 MHz since the first timing"),
    ],
)
def test_what_lowers_the_clocks_is_a_warning(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    now = read_throttling(put_files(tmp_path, ORIN, **changed))
    assert now is not None
    (warning,) = throttling_warnings(now, CALM, CALM)
    assert words in warning
    later = throttling_warnings(now, now, CALM)
    assert (later == ()) is ("oc" in next(iter(changed)))  # events that happened before are none of this timing
