"""The toolchains with TensorRT: which one a target gets, and TensorRT-RTX ahead of time, whose builder needs no GPU."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import save_samples
from mptune.engines.base import Failure, FailureKind, Progress, Stage
from mptune.engines.context import RunContext
from mptune.engines.tensorrt.builder import BuildJob, BuildOptions, ParseJob
from mptune.engines.tensorrt.library import LibraryReport, exports_creators, load_library
from mptune.engines.toolchains.choose import open_toolchain
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.parent import Worker
from mptune.settings import WorkerSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.target import load_target
from mptune.tuning.facts import MissingKernels
from tests.device.machines import become
from tests.engines.engine_support import QUICK, failed, install, make_context, measured
from tests.graph import rtx
from tests.reporting import trtexec

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU"),
]
PLENTY_S = 120.0
FAILURE = Failure(Stage.BUILD, FailureKind.DEVICE_LOST, "gone")


def test_engines_are_built_beside_predictions(
    fp32: PrecisionPlan, fp16: PrecisionPlan, mlp_context: RunContext
) -> None:
    """A folder that vanished is one clear failure."""
    library, engines = load_library("tensorrt-rtx"), mlp_context.engines_dir
    heard: list[Progress] = []
    with open_toolchain(load_target("rtx-4500-ada"), mlp_context) as ahead:
        assert (ahead.name, ahead.latency_source, ahead.error_source) == ("tensorrt-rtx", "predicted", "emulated")
        assert not isinstance(ahead.reference("search"), Failure)
        ahead.listen(heard.append)
        for plan in (fp32, fp16):
            measurement = measured(ahead.evaluate(plan))
            assert measurement.build_s > 0
            assert rtx.engine_faults(library, measurement.engine_path.read_bytes()) == ()
        assert len(list(engines.iterdir())) == 2
        assert heard
        shutil.rmtree(engines)
        failure = failed(ahead.evaluate(fp16))
        assert failure.stage is Stage.BUILD
        assert str(engines) in failure.message
        engines.mkdir()
        measured(ahead.evaluate(fp16))


def test_a_build_past_its_deadline_is_cancelled_then_killed(mlp_path: Path, mlp_context: RunContext) -> None:
    options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))
    engine, samples = mlp_context.engines_dir / "x.engine", (mlp_context.samples("search"),)
    job = BuildJob(mlp_path, engine, options, samples, timeout_s=PLENTY_S)
    with Worker(mlp_context.logs_dir, WorkerSettings()) as worker:
        cancelled = failed(worker.call(replace(job, timeout_s=0.0), PLENTY_S))
        assert cancelled.kind is FailureKind.TIMEOUT
        assert "was cancelled" in cancelled.message
        pid = worker.pid
        killed = failed(worker.call(job, 0.0))
        assert (killed.kind, killed.message) == (FailureKind.TIMEOUT, "no result after 0 s")
        assert not isinstance(worker.call(job, PLENTY_S), Failure)
        assert worker.pid != pid


@pytest.mark.usefixtures("gpu_here")
def test_a_fault_of_the_machine_costs_no_engine(
    monkeypatch: pytest.MonkeyPatch, mlp_context: RunContext, fp16: PrecisionPlan
) -> None:
    """TensorRT-RTX builds here, and there is no device to load the engine on."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    install(monkeypatch, "no CUDA", tensorrt_rtx=LibraryReport("1.7.1"))
    target = load_target("rtx-4500-ada")
    with open_toolchain(target, mlp_context.with_settings(engine="tensorrt-rtx")) as tools:
        assert tools.provider == "cpu"
        assert not any("rarely faster on a CPU" in warning for warning in tools.environment().warnings)
        assert not isinstance(tools.reference("search"), Failure)
        failure, again = (failed(tools.evaluate(fp16)) for _ in range(2))
    assert again.kind is failure.kind
    assert failure.is_machine_fault
    assert "cudaSetDevice" in failure.message or "cuda-python" in failure.message
    assert len(list(mlp_context.engines_dir.glob(f"{fp16.fingerprint}*"))) == 1


@pytest.fixture
def tools(tmp_path: Path, mlp_context: RunContext) -> Iterator[Toolchain]:
    """Of a machine with TensorRT, on which no rule is broken."""
    with become("ada", tmp_path / "machine", is_alone=True) as here:
        with open_toolchain(load_target("rtx-4500-ada"), mlp_context.with_settings(engine="tensorrt")) as tools:
            assert not isinstance(tools.reference("search"), Failure)
            yield tools
        assert here.broken() == []


def test_a_damaged_engine_is_a_failure_and_not_found_again(
    tools: Toolchain, mlp_context: RunContext, fp32: PrecisionPlan, fp16: PrecisionPlan
) -> None:
    engine = measured(tools.evaluate(fp16)).engine_path
    engine.write_bytes(engine.read_bytes()[:-1])
    failure = failed(tools.evaluate(fp16))
    assert failure.stage is Stage.BUILD
    assert "cannot be loaded: Serialization" in failure.message
    (baseline,) = mlp_context.engines_dir.glob("*.engine")  # another one would have other tactics
    assert baseline.name.startswith(fp32.fingerprint)
    tools.builder._timeout_s = 1e-3
    failure = failed(tools.evaluate(fp16))
    assert (failure.stage, failure.kind) == (Stage.BUILD, FailureKind.TIMEOUT)
    assert baseline.exists(), "the plan's own build failed"
    tools.builder._timeout_s = PLENTY_S
    measured(tools.evaluate(fp16))
    baseline.write_bytes(baseline.read_bytes()[:-1])
    assert f"{baseline.name} cannot be loaded" in failed(tools.evaluate(fp16)).message
    failed(tools.evaluate(fp32))  # which deletes it, as the engine of its plan
    measured(tools.evaluate(fp16))


def test_a_profile_that_fails_is_a_warning_and_not_tried_again(
    tools: Toolchain, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.builder, "layer_times", lambda built: FAILURE)
    assert tools.profiling == "along"
    for is_first in (True, False):
        measurement = measured(tools.evaluate(fp16, profile=True))
        assert measurement.group_times_ms is None
        assert any("could not be profiled" in text for text in measurement.warnings) is is_first
        assert tools.profiling == "none"


def test_a_gru_is_kept_out_of_bf16(tmp_path: Path) -> None:
    """The parser refuses it; where a later one no longer does, nothing is to be done."""
    path = tmp_path / "gru.onnx"
    shutil.copy(Path(__file__).parents[2] / "graph" / "corpus" / "gru.onnx", path)
    context = make_context(load_model(path, opset=22), tmp_path, {})
    with Toolchain(None, load_target("jetson-orin-nano-8gb"), context) as predicted:
        missing = predicted.missing_kernels(Precision.BF16)
    assert not isinstance(missing, Failure)
    assert {node.op_type for node in missing} == {"GRU"}
    kernels = MissingKernels({Precision.BF16: missing})
    assert MissingKernels.from_json(kernels.to_json()) == kernels
    pins = kernels.pins(context.grouped, Precision.BF16)
    text = "the ONNX parser of TensorRT-RTX 1.7 refuses GRU in BF16; TensorRT's own has not been tried"
    assert set(pins.values()) == {text}
    assert [finding.text for finding in kernels.findings(context.grouped)] == [text]
    bf16 = context.grouped.uniform(Precision.BF16)
    pinned = bf16.replace(dict.fromkeys(pins, Precision.FP32))
    for plan, words in ((bf16, "must have same input types"), (pinned, "None")):
        typed = Rewriter(context.grouped).export(plan, tmp_path / "typed.onnx")
        assert words in str(rtx.refusal(rtx.library(), typed, build=False))


REGISTERS_ITSELF = """
#include <stdio.h>
__attribute__((constructor)) static void begin(void) { fclose(fopen("%s", "a")); }
"""
IS_ASKED = """
#include <stdio.h>
void setLoggerFinder(void* finder) {}
void* const* getCreators(int* count) { fclose(fopen("%s", "a")); *count = 0; return 0; }
"""


def compiled(code: str, folder: Path) -> Path:
    """A library of C code that writes the file ``loaded``."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (folder / "plugin.c").write_text(code % (folder / "loaded"))
    library = folder / "a plugin.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "plugin.c"], check=True)
    return library


@pytest.mark.parametrize("code", [REGISTERS_ITSELF, IS_ASKED])
def test_a_plugin_is_loaded_or_why_not_is_told(code: str, mlp_path: Path, tmp_path: Path) -> None:
    library, loaded = compiled(code, tmp_path), tmp_path / "loaded"
    assert exports_creators(library) is (code is IS_ASKED)
    save_samples(tmp_path / "samples.npz", [{"x": np.zeros((1, 32), np.float32)}])
    options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),), plugins=(library,))
    build = BuildJob(mlp_path, tmp_path / "m.engine", options, (tmp_path / "samples.npz",), 60.0)
    with Worker(tmp_path / "logs", WorkerSettings()) as worker:
        assert not isinstance(worker.call(build, 120.0), Failure)
        assert loaded.exists()
        loaded.unlink()
        worker.restart()
        assert worker.call(ParseJob("tensorrt-rtx", mlp_path, (library,)), 120.0) is None
        assert loaded.exists()
        library.write_bytes(b"no library")
        worker.restart()
        failure = failed(worker.call(ParseJob("tensorrt-rtx", mlp_path, (library,)), 120.0))
    assert failure.kind is FailureKind.UNSUPPORTED
    assert failure.message.startswith(f"the plugin {library} does not load: ")


def test_a_search_loads_them_and_build_sh_names_them(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    """On a machine with TensorRT: build and run; resumed without them, or with others, it is another run."""
    library, run = compiled(REGISTERS_ITSELF, tmp_path), tmp_path / "run"
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
