"""Libraries with plugins of the user's: compiled here, loaded by TensorRT-RTX in a worker, as trtexec loads them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import save_samples
from mptune.engines.base import Failure, FailureKind
from mptune.engines.context import RunContext
from mptune.engines.tensorrt.builder import BuildJob, BuildOptions, ParseJob
from mptune.engines.tensorrt.library import exports_creators
from mptune.engines.toolchains.choose import open_toolchain
from mptune.errors import RunError, TargetError
from mptune.processes.parent import Worker
from mptune.settings import WorkerSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.target import load_target
from tests.device.machines import become
from tests.engines.engine_support import QUICK
from tests.reporting import trtexec

REGISTERS_ITSELF = """
#include <stdio.h>
__attribute__((constructor)) static void begin(void) { fclose(fopen("%s", "a")); }
"""
IS_ASKED = """
#include <stdio.h>
void setLoggerFinder(void* finder) {}
void* const* getCreators(int* count) { fclose(fopen("%s", "a")); *count = 0; return 0; }
"""

Compile = Callable[[str], Path]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Makes a library of C code that writes the file ``loaded``."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def make(code: str) -> Path:
        (tmp_path / "plugin.c").write_text(code % (tmp_path / "loaded"))
        library = tmp_path / "a plugin.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "plugin.c"], check=True)
        return library

    return make


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("code", [REGISTERS_ITSELF, IS_ASKED])
def test_a_plugin_is_loaded_or_why_not_is_told(compiled: Compile, code: str, mlp_path: Path, tmp_path: Path) -> None:
    library, loaded = compiled(code), tmp_path / "loaded"
    assert exports_creators(library) is (code is IS_ASKED)
    save_samples(tmp_path / "samples.npz", [{"x": np.zeros((1, 32), np.float32)}])
    options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),), plugins=(library,))
    build = BuildJob(mlp_path, tmp_path / "m.engine", options, (tmp_path / "samples.npz",), 60.0)
    with Worker(tmp_path / "logs", WorkerSettings()) as worker:
        result = worker.call(build, 120.0)
        assert not isinstance(result, Failure), result
        assert loaded.exists()
        loaded.unlink()
        worker.restart()
        assert worker.call(ParseJob("tensorrt-rtx", mlp_path, (library,)), 120.0) is None
        assert loaded.exists()
        library.write_bytes(b"no library")
        worker.restart()
        failure = worker.call(ParseJob("tensorrt-rtx", mlp_path, (library,)), 120.0)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.UNSUPPORTED
    assert failure.message.startswith(f"the plugin {library} does not load: ")


@pytest.mark.parametrize("target", ["cpu", "jetson-orin-nano-8gb"])
def test_without_tensorrt_engines_plugins_are_refused(mlp_context: RunContext, target: str) -> None:
    """Nothing would load them: neither ONNX Runtime nor a prediction."""
    with pytest.raises(TargetError, match="is for engines of TensorRT"):
        open_toolchain(load_target(target), mlp_context.with_settings(plugins=(Path("a.so"),)))


@pytest.mark.tensorrt_rtx
@pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU")
def test_a_search_loads_them_and_build_sh_names_them(
    compiled: Compile, mlp_path: Path, mlp_data: Path, tmp_path: Path
) -> None:
    """On a machine with TensorRT: build and run; resumed without them, or with others, it is another run."""
    library, run = compiled(REGISTERS_ITSELF), tmp_path / "run"
    given = {"data": mlp_data, "out": run, "budget": 2, "confirm_rounds": 1, "latency": QUICK}
    with become("orin", tmp_path / "machine", is_alone=True) as here:
        mptune.search(mlp_path, plugins=library, **given)
        assert (tmp_path / "loaded").exists()
        command = (run / "chosen" / "build.sh").read_text().replace("\\\n", "").split("\nexec ")[1]
        options = trtexec.read_options(shlex.split(command)[1:-1])
        assert options["--staticPlugins"] == [str(library)]
        assert options["--timingCacheFile"] == ["timing.cache"]
        assert (run / "chosen" / "timing.cache").read_bytes() == (run / "engines" / "timing.cache").read_bytes()
        code = library.read_bytes()
        library.unlink()  # what is mapped may not be overwritten
        library.write_bytes(code + b"another")
        for other in (library, None):
            with pytest.raises(RunError, match="another version of the plugins"):
                mptune.search(mlp_path, plugins=other, **given)
        with pytest.raises(RunError, match="not loaded unless you name them"):
            mptune.confirm(run)
        assert here.broken() == []
