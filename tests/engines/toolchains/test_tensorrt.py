"""The toolchains with TensorRT: which one a target gets, and TensorRT-RTX ahead of time, whose builder needs no GPU."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import save_samples
from mptune.engines.base import Failure, FailureKind, Measurement, Progress, Stage
from mptune.engines.context import RunContext
from mptune.engines.tensorrt.backend import TENSORRT
from mptune.engines.tensorrt.builder import BuildJob, BuildOptions, ParseJob
from mptune.engines.tensorrt.library import LibraryReport, exports_creators, load_library
from mptune.engines.toolchains import choose as toolchain
from mptune.engines.toolchains.choose import open_toolchain
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.parent import Worker
from mptune.settings import TensorRtSettings, WorkerSettings
from mptune.targets.detect import Gpu, detect_gpus
from mptune.targets.target import load_target
from mptune.tuning.facts import MissingKernels
from tests.device.machines import become
from tests.engines.engine_support import QUICK, install, make_context
from tests.graph import rtx
from tests.reporting import trtexec

NO_GPU = not toolchain.detect_gpus()
PLENTY_S = 120.0
FAILURE = Failure(Stage.BUILD, FailureKind.DEVICE_LOST, "gone")

without_gpu = pytest.mark.skipif(not NO_GPU, reason="needs a machine without a GPU")


def failed(result: object) -> Failure:
    assert isinstance(result, Failure), result
    return result


@pytest.mark.tensorrt_rtx
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
            found = ahead.evaluate(plan)
            assert isinstance(found, Measurement), found
            assert found.build_s > 0
            assert rtx.engine_faults(library, found.engine_path.read_bytes()) == ()
        assert len(list(engines.iterdir())) == 2
        assert heard
        shutil.rmtree(engines)
        failure = failed(ahead.evaluate(fp16))
        assert failure.stage is Stage.BUILD
        assert str(engines) in failure.message
        engines.mkdir()
        assert isinstance(ahead.evaluate(fp16), Measurement)


@pytest.mark.tensorrt_rtx
def test_a_build_past_its_deadline_is_cancelled_then_killed(mlp_path: Path, mlp_context: RunContext) -> None:
    engine = mlp_context.engines_dir / "x.engine"
    options = BuildOptions("tensorrt-rtx", capabilities=((8, 9),))
    samples = (mlp_context.samples("search"),)
    with Worker(mlp_context.logs_dir, WorkerSettings()) as worker:
        cancelled = worker.call(BuildJob(mlp_path, engine, options, samples, timeout_s=0.0), PLENTY_S)
        assert failed(cancelled).kind is FailureKind.TIMEOUT
        assert "was cancelled" in cancelled.message
        pid = worker.pid
        killed = worker.call(BuildJob(mlp_path, engine, options, samples, timeout_s=PLENTY_S), 0.0)
        assert (failed(killed).kind, killed.message) == (FailureKind.TIMEOUT, "no result after 0 s")
        built = worker.call(BuildJob(mlp_path, engine, options, samples, timeout_s=PLENTY_S), PLENTY_S)
        assert not isinstance(built, Failure)
        assert worker.pid != pid


@pytest.mark.tensorrt_rtx
@without_gpu
def test_turing_has_no_fp32_engine(mlp_context: RunContext, fp32: PrecisionPlan) -> None:
    """The reason why 7.5 is not among ``RTX_CAPABILITIES``."""
    with open_toolchain(load_target("t4"), mlp_context.with_settings(engine="tensorrt-rtx")) as tools:
        failure = failed(tools.evaluate(fp32))
    assert failure.kind is FailureKind.UNSUPPORTED
    assert "Turing (SM75): FP32 GEMM is not supported" in failure.message


@pytest.mark.tensorrt_rtx
@without_gpu
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
        assert not any("seldom faster on a CPU" in warning for warning in tools.environment().warnings)
        assert not isinstance(tools.reference("search"), Failure)
        failure, again = failed(tools.evaluate(fp16)), failed(tools.reopen(fp16, 2))
    assert again.kind is failure.kind
    assert failure.is_machine_fault
    assert "cudaSetDevice" in failure.message or "cuda-python" in failure.message
    assert len(list(mlp_context.engines_dir.glob(f"{fp16.fingerprint}*"))) == 1


@pytest.mark.tensorrt_rtx
@without_gpu
def test_a_damaged_engine_is_a_failure_and_not_found_again(
    tmp_path: Path, mlp_context: RunContext, fp32: PrecisionPlan, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with become("ada", tmp_path / "machine", is_alone=True) as here:
        with open_toolchain(load_target("rtx-4500-ada"), mlp_context.with_settings(engine="tensorrt")) as tools:
            assert not isinstance(tools.reference("search"), Failure)
            measured = tools.evaluate(fp16)
            assert isinstance(measured, Measurement)
            measured.engine_path.write_bytes(measured.engine_path.read_bytes()[:-1])
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
            assert isinstance(tools.evaluate(fp16), Measurement)
            baseline.write_bytes(baseline.read_bytes()[:-1])
            assert f"{baseline.name} cannot be loaded" in failed(tools.evaluate(fp16)).message
            assert not isinstance(tools.evaluate(fp32), Measurement), "which deletes it, as the engine of its plan"
            assert isinstance(tools.evaluate(fp16), Measurement)
            monkeypatch.setattr(tools.builder, "layer_times", lambda built: FAILURE)
            assert tools.profiling == "along"
            for is_first in (True, False):  # a profile that fails is a warning, and is not tried again
                measured = tools.evaluate(fp16, profile=True)
                assert isinstance(measured, Measurement)
                assert measured.group_times_ms is None
                assert any("could not be profiled" in text for text in measured.warnings) is is_first
                assert tools.profiling == "none"
        assert here.broken() == []


@without_gpu
@pytest.mark.parametrize(("is_jetson", "given", "wanted"), [(False, None, None), (True, None, 1859), (True, 64, 64)])
def test_builds_on_a_jetson_are_alone_and_limited(
    is_jetson: bool, given: int | None, wanted: int | None, mlp_context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA Jetson Orin Nano", (8, 7), 7.8, "L4T 36.4.3", is_jetson=is_jetson)
    target = load_target("jetson-orin-nano-8gb")
    limited = mlp_context.with_settings(tensorrt=TensorRtSettings(workspace_mb=given))
    install(monkeypatch, tensorrt=LibraryReport("10.3.0"))
    jobs: list[object] = []
    with Toolchain(TENSORRT, target, limited, gpu=gpu) as tools:
        monkeypatch.setattr(tools.worker, "call", lambda job, timeout_s: jobs.append(job) or FAILURE)
        assert tools.evaluate(mlp_context.grouped.uniform(Precision.FP16)) is FAILURE
    (job,) = jobs
    assert isinstance(job, BuildJob)
    assert (job.alone, job.options.settings.workspace_mb) == (is_jetson, wanted)


def refused_alone(grouped: GroupedModel, pins: Mapping[str, str], folder: Path) -> str:
    """What TensorRT-RTX's parser says of the model in BF16, which it takes with those groups in FP32."""
    bf16, typed = grouped.uniform(Precision.BF16), folder / "typed.onnx"
    kept = bf16.replace(dict.fromkeys(pins, Precision.FP32))
    assert rtx.refusal(rtx.library(), Rewriter(grouped).export(kept, typed), build=False) is None
    return str(rtx.refusal(rtx.library(), Rewriter(grouped).export(bf16, typed), build=False))


@pytest.mark.tensorrt_rtx
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
    assert "must have same input types" in refused_alone(context.grouped, pins, tmp_path)


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
