"""The lines that README and messages give to install something: for a Jetson's Pythons, and held by what doctor says.

Whether pip finds the packages takes a network: by hand, ``MPTUNE_TEST_NETWORK=1 pytest tests/test_install_lines.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.requirements import Requirement

from mptune.engines import cuda
from mptune.engines.ort import backend as onnxruntime
from mptune.engines.tensorrt.backend import TENSORRT
from mptune.engines.tensorrt.library import LibraryReport, check_version, install_line
from mptune.engines.toolchains import choose
from mptune.targets.detect import Gpu, JetsonState, cuda_series
from tests.engines.engine_support import install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs/guide/jetson.md").read_text(encoding="utf-8")
ON_A_JETSON = PAGE.partition("## Install on the Jetson\n")[2].partition("\n## ")[0]

with_network = pytest.mark.skipif(
    not os.environ.get("MPTUNE_TEST_NETWORK"), reason="asks a package index: set MPTUNE_TEST_NETWORK=1"
)


def commands() -> list[str]:
    """The lines of the section's shell block."""
    return re.findall(r"```bash\n(.*?)```", ON_A_JETSON, re.DOTALL)[0].splitlines()  # type: ignore[no-any-return]


def requirements(line: str, python: str) -> list[str]:
    """What a ``pip install`` line asks for on a Jetson; ``.`` stands for what pyproject.toml depends on."""
    machine = {"sys_platform": "linux", "platform_machine": "aarch64", "python_version": python}
    words: list[str] = []
    for word in shlex.split(line.partition(";")[0])[2:]:
        if (match := re.fullmatch(r"\.(?:\[(.*)\])?", word)) is None:
            words.append(word)
            continue
        names = (match[1] or "").split(",")
        extras = [text for name in names if name for text in PROJECT["optional-dependencies"][name]]
        depends = [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]
        words += [str(each).partition(";")[0] for each in depends if not each.marker or each.marker.evaluate(machine)]
    return words


def pip_lines() -> list[str]:
    """Those of the section, and those that messages give on a Jetson."""
    without_gpu = onnxruntime.INSTALL.rpartition(" ")[2].removesuffix("-gpu")
    lines = [line for line in commands() if line.startswith("pip install")]
    return [*lines, *cuda.INSTALL.values(), f"pip install {without_gpu}"]


@with_network
@pytest.mark.parametrize("python", ["3.10", "3.12"])
@pytest.mark.parametrize("line", pip_lines())
def test_pip_finds_it_for_a_jetson(line: str, python: str, tmp_path: Path) -> None:
    """For JetPack 6 (Python 3.10) and 7 (3.12), wheels only: nothing has to be compiled there."""
    # pip takes a wheel for one of the platforms that are named, not for older ones than these.
    glibc = range(17, 36 if python == "3.10" else 40)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in glibc] + ["--platform=manylinux2014_aarch64"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    command += [*platforms, f"--python-version={python}", "--implementation=cp", f"--target={tmp_path}"]
    done = subprocess.run([*command, *requirements(line, python)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Would install" in done.stdout


def test_the_section_goes_the_whole_way() -> None:
    lines = commands()
    assert any(line.startswith("sudo apt install") and "python3-libnvinfer" in line for line in lines)
    assert any("-m venv --system-site-packages" in line for line in lines)
    assert lines[-1] == "mptune doctor"
    assert not any("onnxruntime-gpu" in line for line in lines)


def test_no_message_names_a_package_that_no_index_has() -> None:
    """mptune itself is installed from its folder."""
    named = re.compile(r"pip install [^;&`\"\n]*\bmptune\b")
    files = [*ROOT.glob("mptune/**/*.py"), *ROOT.glob("mptune/**/*.in"), ROOT / "README.md"]
    assert [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))] == []


def old_driver() -> str:
    """What is said where the driver refuses cuda-python."""
    refused = SimpleNamespace(name="cudaErrorInsufficientDriver")
    module = SimpleNamespace(cudaGetDeviceCount=lambda: (refused, 0), cudaDriverGetVersion=lambda: (0, 12060))
    with mock.patch.object(cuda, "runtime", return_value=module):
        return cuda.unavailable_reason() or ""


def orin(l4t: str = "L4T 36.4.3") -> Gpu:
    return Gpu(NAME, (8, 7), 7.8, l4t, is_jetson=True, part="p3767-0005")


NAME = "NVIDIA Jetson Orin Nano Developer Kit"


def test_what_doctor_says_is_what_the_section_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = " ".join(ON_A_JETSON.split())
    for report, words in (
        (LibraryReport("10.3.0", check_version("tensorrt", "10.3.0")), f": builds and measures on {NAME}"),
        ("tensorrt is not installed", "tensorrt is not installed"),
        (LibraryReport("10.3.0", (), "no CUDA device is visible"), "no CUDA device is visible"),
        (LibraryReport("10.3.0", (), old_driver()), "the driver is older than the CUDA of cuda-python"),
    ):
        install(monkeypatch, "no CUDA provider", tensorrt=report)
        (status,) = TENSORRT.statuses([orin()])
        assert words in status.reason
        assert words in page
    first = check_version("tensorrt", "10.3.0")[0].partition(",")[0].partition(" by NVIDIA")[0]
    assert cuda.INSTALL[12] in page
    assert f"10.3.0 ({first}" in page
    for fact, value in JetsonState(NAME, "p3767-0005", l4t="36.4.3", jetpack="6.2").facts():
        assert f"{fact:<16}{value}" in ON_A_JETSON
    assert "--system-site-packages" in install_line("tensorrt", [orin()])


@pytest.mark.parametrize(("driver", "series"), [("535.183", 12), ("570.86.10", 12), ("580.65.06", 13), ("", 12)])
@pytest.mark.parametrize("has_bindings", [False, True])
def test_the_packages_are_those_for_the_driver_and_nothing_installed_is_changed(
    driver: str, series: int, has_bindings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's installation guide: packages for CUDA 12 from driver 535 on, for CUDA 13 from 580 on."""

    def version(package: str) -> str:
        if not has_bindings:
            raise metadata.PackageNotFoundError(package)
        return "13.0"

    monkeypatch.setattr(metadata, "version", version)
    gpus = [Gpu("NVIDIA H200", (9, 0), 150.8, driver)] if driver else []
    bindings = "" if has_bindings else {12: " 'cuda-bindings<13'", 13: " cuda-bindings"}[series]
    for kind in ("tensorrt", "tensorrt-rtx"):
        assert install_line(kind, gpus) == f"pip install {kind}-cu{series}{bindings}"


@pytest.mark.parametrize(("l4t", "series"), [("L4T 36.4.3", 12), ("L4T 38.2.1", 13), ("", 12)])
def test_a_jetson_has_the_cuda_of_its_jetson_linux(l4t: str, series: int) -> None:
    assert cuda_series([orin(l4t)]) == series
    assert "pip" not in install_line("tensorrt", [orin(l4t)])


def test_the_extras_are_those_that_the_lines_name() -> None:
    for kind in ("tensorrt", "tensorrt-rtx"):
        for series, bindings in cuda.INSTALL.items():
            extra = PROJECT["optional-dependencies"][f"{kind}-cu{series}"]
            assert {Requirement(text).name for text in extra} == {f"{kind}-cu{series}", "cuda-bindings"}
            assert any("<13" in text for text in extra) == ("<13" in bindings), "what torch brought is not made older"


def test_doctor_asks_for_no_gpu_package_of_onnx_runtime_on_a_jetson(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "no CUDA provider")
    for gpu, command in ((orin(), ""), (Gpu("NVIDIA H200", (9, 0), 150.8, "570"), onnxruntime.CUDA_INSTALL)):
        monkeypatch.setattr(choose, "detect_gpus", lambda gpu=gpu: (gpu,))
        (status,) = [one for one in choose.list_toolchains() if one.name == "onnxruntime-cuda"]
        assert status.install == command
