"""What is here: read from real programs and files that stand where the driver's would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mptune.targets.detect import Gpu, detect_gpus, hidden_gpu
from tests.targets.jetson_files import NANO, ORIN_NANO_SUPER, put_files

H200 = "0, GPU-aaaa, NVIDIA H200, 9.0, 143771, 570.124.06"
L4 = "1, GPU-bbbb, NVIDIA L4, 8.9, 23034, 570.124.06"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")


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
    smi(prints(H200, L4, "2, GPU-c, NVIDIA GB10, [N/A], [N/A], 580.1"))
    assert detect_gpus(tmp_path) == (
        Gpu("NVIDIA H200", (9, 0), 150.8, "570.124.06", 0),
        Gpu("NVIDIA L4", (8, 9), 24.2, "570.124.06", 1),
        Gpu("NVIDIA GB10", None, None, "580.1", 2),
    )


def test_it_is_asked_for_plain_csv(smi, tmp_path: Path) -> None:
    smi(f'echo "$@" > "{tmp_path}/asked"')
    detect_gpus(tmp_path)
    query, form = (tmp_path / "asked").read_text().split()
    assert query.startswith("--query-gpu=index,uuid,name,compute_cap")
    assert form == "--format=csv,noheader,nounits"


@pytest.mark.parametrize(
    "body",
    [
        "exit 9",
        "kill -9 $$",
        prints('Field "compute_cap" is not a valid field to query.') + "\nexit 2",
        prints("No devices were found"),
        "while :; do :; done",
        "printf '\\377\\376\\000'",
        "",
    ],
    ids=["fails", "crashes", "old driver", "no devices", "hangs", "garbage", "no program"],
)
def test_a_driver_in_trouble_is_no_gpu(smi, tmp_path: Path, body: str) -> None:
    smi(body)
    if not body:
        (tmp_path / "bin" / "nvidia-smi").write_bytes(b"\x7fELF broken")
    assert detect_gpus(tmp_path, timeout_s=0.5) == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA L4"]),
        ("1,0", ["NVIDIA L4", "NVIDIA H200"]),
        ("GPU-bb", ["NVIDIA L4"]),
        ("0,7,1", ["NVIDIA H200"]),
        ("", []),
        ("-1", []),
        ("MIG-1234", ["NVIDIA H200", "NVIDIA L4"]),
    ],
)
def test_cuda_visible_devices(smi, tmp_path: Path, monkeypatch, visible: str, names: list[str]) -> None:
    smi(prints(H200, L4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = detect_gpus(tmp_path)
    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))


def test_a_jetson_is_known_by_its_device_tree(smi, tmp_path: Path) -> None:
    smi(prints("0, [N/A], Orin (nvgpu), [N/A], [N/A], 540.4.0"))
    put_files(tmp_path, ORIN_NANO_SUPER)
    name = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    gpu = Gpu(name, (8, 7), 7.8, "L4T 36.4.3", is_jetson=True, part="p3767-0005", mode=NANO.mode)
    assert detect_gpus(tmp_path) == (gpu,)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("NVIDIA Jetson Next", (Gpu("NVIDIA Jetson Next", None, None, "", is_jetson=True),)),
        ("Raspberry Pi 5 Model B", ()),
    ],
)
def test_a_board_that_tells_only_its_name(tmp_path: Path, model: str, gpus: tuple[Gpu, ...]) -> None:
    assert detect_gpus(put_files(tmp_path, {"proc/device-tree/model": model})) == gpus


@pytest.mark.parametrize("name", ["dev/nvidia0", "dev/nvhost-gpu", "dev/nvgpu/igpu0/ctrl"])
def test_a_gpu_that_nothing_names_is_not_overlooked(smi, name: str, tmp_path: Path, monkeypatch) -> None:
    """In a container nvidia-smi may be missing where the GPU is there."""
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
