"""Three machines with TensorRT: whoever imports ``tensorrt`` or ``cuda.bindings.runtime`` finds the device here.

What mptune asks of a machine is there as the machine has it: versions of packages, nvidia-smi, a Jetson's files.
Nothing of mptune is replaced but the root of the file system in which it looks for a Jetson's files.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from mptune.diagnosis import engines as diagnosed_engines
from mptune.engines import cuda as runtime, environment
from mptune.engines.ort import cuda_session
from mptune.engines.tensorrt import backend as tensorrt_backend
from mptune.engines.toolchains import reference
from mptune.errors import MptuneError
from mptune.processes import child, parent
from mptune.processes.child import Failure, Progress, Stage, WorkerState
from mptune.targets import detect
from tests.device.cuda import FakeCuda, Rules
from tests.targets.jetson_files import ORIN_NANO_SUPER, put_files

_MACHINE, _FOLDER, _WAIT = "MPTUNE_TEST_MACHINE", "MPTUNE_TEST_FOLDER", "MPTUNE_TEST_WAIT"
_SHORT_WAIT_MS = 2.0
"""Longer than an execution, from which the number of executions is calibrated."""


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        tensorrt: version of TensorRT.
        gpu: name of the GPU.
        target: the profile that ``--target auto`` takes for it.
        capability: compute capability of the GPU.
        memory_bytes: of the device; of CPU and GPU together on a Jetson.
        cuda: version of CUDA, such as 12060.
        driver: version of the driver.
        architecture: of the CPU.
        files: of a Jetson.
    """

    tensorrt: str
    gpu: str
    target: str
    capability: tuple[int, int]
    memory_bytes: int
    cuda: int
    driver: str
    architecture: str = "x86_64"
    files: dict[str, str] = field(default_factory=dict)

    @property
    def is_jetson(self) -> bool:
        """Whether CPU and GPU share the memory."""
        return bool(self.files)

    @property
    def cuda_series(self) -> str:
        return f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"


ORIN = Machine(
    "10.3.0",
    "Orin (nvgpu)",
    "jetson-orin-nano-8gb-super",
    (8, 7),
    7650336 << 10,
    12060,
    "540.4.0",
    "aarch64",
    ORIN_NANO_SUPER,
)
"""JetPack 6.2 on an Orin Nano: TensorRT 10.3, CUDA 12.6, driver 540."""
ADA = Machine("10.16.2", "NVIDIA RTX 4500 Ada Generation", "rtx-4500-ada", (8, 9), 24564 << 20, 13000, "580.65.06")
HOPPER = Machine("11.4.0", "NVIDIA H200", "h200", (9, 0), 143771 << 20, 13000, "580.65.06")
MACHINES = {"orin": ORIN, "ada": ADA, "hopper": HOPPER}

_NVIDIA_SMI = """#!{python} -IS
import sys
asked = " ".join(sys.argv)
if "uuid" in asked:
    print("0, GPU-1, {gpu}, {capability}, {memory}, {driver}")
elif "clocks.sm" in asked:
    print("0, {gpu}, {driver}, {memory}, {used}, {clocks}")
elif "--query" not in asked:
    print("| NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: {cuda} |")
"""


@dataclass(frozen=True)
class Here:
    """The machine that this one has become; ``log`` has what was forbidden or refused in any process."""

    machine: Machine
    log: Path

    def broken(self) -> list[str]:
        """The rules that were broken, by any process, and what this one left on the device."""
        written = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return [*written, *(f"{leak} not freed" for leak in cuda_runtime().leaks)]


@contextmanager
def become(name: str, folder: Path, *, is_alone: bool = False) -> Iterator[Here]:
    """Make this process, and those that it starts, ones of a machine.

    Args:
        name: of ``MACHINES``.
        folder: for what the machine brings.
        is_alone: jobs run in this process, and the host waits for the device for moments only: workers that start, and
            a device that takes its time, take seconds.
    """
    machine, site = MACHINES[name], folder / "site"
    (folder / "root").mkdir(parents=True)
    put_files(folder / "root", machine.files)
    write_nvidia_smi(machine, folder / "bin" / "nvidia-smi")
    for package, version in (("tensorrt", machine.tensorrt), ("cuda_bindings", f"{machine.cuda_series}.0")):
        info = site / f"{package}-{version}.dist-info" / "METADATA"
        info.parent.mkdir(parents=True)
        info.write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n")
    for path, function in (("tensorrt/__init__.py", "tensorrt"), ("cuda/bindings/runtime.py", "cuda_runtime")):
        (site / path).parent.mkdir(parents=True)
        code = f"import sys\nfrom tests.device import machines\nsys.modules[__name__] = machines.{function}()\n"
        (site / path).write_text(code)
    (site / "cuda" / "bindings" / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        wait_ms = _SHORT_WAIT_MS if is_alone else math.inf
        for variable, value in ((_MACHINE, name), (_FOLDER, folder), (_WAIT, wait_ms)):
            patch.setenv(variable, str(value))
        patch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.syspath_prepend(str(site))
        patch.setattr("platform.machine", lambda: machine.architecture)
        _look_in(folder / "root", patch)
        _forget()
        if is_alone:
            patch.setitem(sys.modules, "tensorrt", tensorrt())
            patch.setattr(runtime, "runtime", cuda_runtime)
            for module in (parent, reference, diagnosed_engines):
                patch.setattr(module, "Worker", _WorkerHere)
        yield Here(machine, folder / "broken.log")
    _forget()


class _StateHere(WorkerState):
    """Of a job in this process."""

    def __init__(self, worker: parent.Worker) -> None:
        super().__init__()
        self._worker = worker

    def report(self, progress: Progress) -> None:
        self._worker.on_progress(progress)

    def ask(self, question: Any) -> Any:
        return self._worker.on_question(question)


class _WorkerHere(parent.Worker):
    """Runs its jobs in this process, encoded and decoded as for another one."""

    _state: WorkerState | None = None

    def call(self, job: Any, timeout_s: float | None = None) -> Any:
        self._state = self._state or _StateHere(self)
        self._state.enter(Stage.BUILD)
        try:
            return pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(job)).run(self._state)))
        except MptuneError:
            raise
        except Exception as error:
            return Failure(self._state.stage, *child.describe(error))
        finally:
            self._state.drop(child.TRANSIENT)

    def start_ahead(self, load: str) -> None:
        """There is no process."""

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None


def tensorrt() -> Any:
    """The module ``tensorrt`` of this process: a worker's, unless it was patched already."""
    from tests.device.tensorrt import make_module

    machine = MACHINES[os.environ[_MACHINE]]
    _look_in(Path(os.environ[_FOLDER], "root"), pytest.MonkeyPatch())
    return make_module(machine.tensorrt, cuda_runtime(), capability=machine.capability)


@cache
def cuda_runtime() -> FakeCuda:
    """The module ``cuda.bindings.runtime`` of this process: its device, too."""
    machine, log = MACHINES[os.environ[_MACHINE]], Path(os.environ[_FOLDER], "broken.log")
    return FakeCuda(machine.memory_bytes, machine.cuda, Rules(log), most_wait_ms=float(os.environ[_WAIT]))


def write_nvidia_smi(machine: Machine, path: Path) -> None:
    """On a Jetson it knows a name and nothing else (JetPack 6)."""
    path.parent.mkdir()
    path.write_text(
        _NVIDIA_SMI.format(
            python=sys.executable,
            gpu=machine.gpu,
            capability="[N/A]" if machine.is_jetson else ".".join(map(str, machine.capability)),
            memory="[N/A]" if machine.is_jetson else machine.memory_bytes >> 20,
            used="[N/A]" if machine.is_jetson else "400",
            driver=machine.driver,
            clocks=", ".join(["[N/A]"] * 6) if machine.is_jetson else "2100, 2520, 9001, 61.5, 210.0, 45",
            cuda=machine.cuda_series,
        )
    )
    path.chmod(0o755)


def _look_in(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Have the functions that look for a Jetson's files look there by default."""
    functions = {each for module in (environment, detect) for each in vars(module).values() if isfunction(each)}
    for function in functions:
        if Path("/") in (function.__defaults__ or ()):
            defaults = tuple(root if value == Path("/") else value for value in function.__defaults__)
            patch.setattr(function, "__defaults__", defaults)


def _forget() -> None:
    """Empty the caches of what was found on this machine."""
    importlib.invalidate_caches()
    for cached in (tensorrt_backend.find_library, runtime.runtime, cuda_runtime):
        cached.cache_clear()
    cuda_session._reasons.clear()
