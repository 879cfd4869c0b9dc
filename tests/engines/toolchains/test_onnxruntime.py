"""ONNX Runtime's toolchain where there is a GPU."""

from __future__ import annotations

import pytest

from mptune.engines.base import Failure
from mptune.engines.toolchains.onnxruntime import OnnxRuntimeToolchain
from mptune.engines.workload import Workload
from mptune.graph.plan import Precision
from mptune.settings import SearchSettings
from mptune.targets.target import load_target


@pytest.mark.gpu
def test_many_measurements_on_a_gpu_crash_no_worker(mlp_workload: Workload, settings: SearchSettings) -> None:
    """Sessions that outlived their streams ended one of about twenty measurements in SIGSEGV on an H200."""
    target = load_target("h200")
    with OnnxRuntimeToolchain(target, mlp_workload, settings, "cuda") as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        plans = [mlp_workload.grouped.uniform(precision) for precision in (Precision.FP32, Precision.FP16)]
        pids = set()
        for number in range(150):
            result = toolchain.evaluate(plans[number % 2])
            assert not isinstance(result, Failure), result
            pids.add(toolchain._worker.pid)
    assert len(pids) == 1, "the worker died between two jobs"
