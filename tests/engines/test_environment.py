from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mptune.engines.environment import (
    Environment,
    GpuState,
    describe_environment,
    installed_versions,
    process_warnings,
    read_gpus,
)
from tests.targets.jetson_files import ORIN_NANO_SUPER, put_files

TWO_GPUS = """\
0, NVIDIA H200, 570.86.15, 143771, 1980, 1980, 700.00
1, NVIDIA H200, 570.86.15, 143771, 345, 1980, [Not Supported]
"""


def test_the_environment_names_what_is_here_and_survives_json(tmp_path: Path) -> None:
    environment = describe_environment()
    assert environment.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"numpy", "onnx"} <= environment.versions.keys()
    assert environment.cpu
    assert environment.cpu_count >= 1
    gpu = GpuState(1, "NVIDIA H200", throttle=("power cap",))
    with_gpus = Environment({"python": "3.12"}, "Linux", "a CPU", 2, (gpu,), ("a: b",))
    jetson = describe_environment(put_files(tmp_path, ORIN_NANO_SUPER))
    assert jetson.jetson.mode.name == "MAXN_SUPER"
    assert describe_environment(tmp_path / "elsewhere").jetson is None
    for each in (environment, with_gpus, jetson):
        assert Environment.from_json(json.loads(json.dumps(each.to_json()))) == each
    assert with_gpus.with_warnings("c: d").warnings == ("a: b", "c: d")


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of the driver's."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nimport sys\narguments = ' '.join(sys.argv[1:])\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
if 'clocks_throttle_reasons' in arguments:
    sys.exit('Field "clocks_throttle_reasons.active" is not a valid field to query.')
if 'clocks_event_reasons' in arguments:
    print('0x48'), print('0x1')
elif '--query-gpu' in arguments:
    print({TWO_GPUS!r}, end='')
elif '--query-compute-apps' in arguments:
    print('1, /sbin/init'), print('{os.getpid()}, python'), print('999999999, other')
else:
    print('| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8 |')
"""
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    gpus = read_gpus()
    assert [gpu.throttle for gpu in gpus] == [("hardware slowdown", "hardware thermal limit"), ()]
    first, second = gpus
    assert (first.index, first.name, first.driver, first.sm_clock_mhz) == (0, "NVIDIA H200", "570.86.15", 1980.0)
    assert (first.power_limit_w, second.power_limit_w) == (700.0, None)
    environment = describe_environment()
    assert environment.versions["cuda driver"] == "12.8"
    assert any("throttled" in warning for warning in environment.warnings)
    # Our own process and one that does not exist here are not foreign. In a container 1 may be a parent.
    assert process_warnings() in ((), ("other processes use the GPU and disturb the timing: stop init (1)",))
    fake_nvidia_smi(tmp_path, "sys.exit(9)", monkeypatch)
    assert read_gpus() == process_warnings() == ()


def test_who_uses_a_gpu_that_is_not_visible_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("mptune.engines.environment.ask_nvidia_smi", lambda *query: asked.extend(query))
    for visible in ("1", "GPU-3f", "", "MIG-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert process_warnings() == ()
    assert [option for option in asked if option.startswith("--id")] == ["--id=1", "--id=GPU-3f"]


@pytest.mark.parametrize("variant", ["tensorrt", "tensorrt-cu12"])
def test_tensorrt_is_found_under_each_name_of_its_package(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != variant:
            raise metadata.PackageNotFoundError(package)
        return "11.4.0"

    monkeypatch.setattr(metadata, "version", version)
    assert installed_versions() == {"tensorrt": "11.4.0"}
