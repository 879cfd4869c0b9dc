from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError
from mptune.engines.latency import Repetitions
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.toolchains import measuring as measure
from mptune.engines.toolchains.measuring import STATE_AGE_S, MeasureJob, ReopenJob
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.child import WorkerState
from mptune.targets.detect import PowerMode
from mptune.tuning.evaluation import ORIGIN_FP16, Evaluation
from tests.engines.conftest import QUICK
from tests.engines.engine_support import save_graph


def prepare(folder: Path, shift: float = 0.0) -> tuple[Path, Path, Path]:
    """A model, samples, and reference outputs that are off by a shift."""
    model = save_graph(folder / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 2])
    feeds = [np.array([[3, 4]], np.float32), np.array([[6, 8]], np.float32)]
    save_samples(folder / "s.npz", [{"x": feed} for feed in feeds])
    save_samples(folder / "r.npz", [{"y": feed + np.float32(shift)} for feed in feeds])
    return model, folder / "s.npz", folder / "r.npz"


def job_of(folder: Path) -> MeasureJob:
    """The same model as candidate and baseline."""
    model, samples, reference = prepare(folder)
    engine = OrtEngine(model, SessionOptions(preset="timed"))
    return MeasureJob(engine, engine, Scoring(samples, reference), samples, latency=QUICK)


def test_a_measurement_keeps_the_baselines_session_open(tmp_path: Path) -> None:
    state = WorkerState()
    job = job_of(tmp_path)
    first = job.run(state)
    ((_, baseline),) = [entry for slot, entry in state._cache.items() if slot == "baseline"]
    assert first.repetitions.iterations * first.repetitions.executions_per_value >= 10
    assert len(first.measurement.latency.raw_ms) == first.repetitions.iterations
    assert len(first.measurement.baseline.raw_ms) == first.repetitions.iterations
    assert first.measurement.error.value("max_abs") == 0.0
    frozen = replace(job, repetitions=Repetitions(12, 2))
    second, third = frozen.run(state), frozen.run(state)
    assert second.repetitions == third.repetitions == Repetitions(12, 2)
    assert len(third.measurement.latency.raw_ms) == 12
    assert state._cache["baseline"][1] is baseline
    state.close()
    with pytest.raises(EngineError, match="closed"):
        baseline.session.run({"x": np.zeros((1, 2), np.float32)})


def test_sessions_opened_anew_are_timed_beside_the_same_baseline(tmp_path: Path) -> None:
    state = WorkerState()
    job = job_of(tmp_path)
    result = job.run(state)
    first = result.measurement
    expected = np.log(first.latency.median_ms / first.baseline.median_ms)
    assert first.latency.session.log_ratio == pytest.approx(expected, abs=1e-3)
    timings = ReopenJob(replace(job, repetitions=result.repetitions), 3).run(state)
    assert {timing.baseline for timing in timings} == {first.latency.session.baseline}
    assert len({timing.log_ratio for timing in timings}) == 3
    assert all(timing.sd > 0 for timing in timings)
    state.close()
    another = job.run(WorkerState()).measurement.latency.session
    assert another.baseline != timings[0].baseline


def test_the_state_of_the_gpus_is_read_again_once_it_is_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-smi is a script here that writes down how often it was asked; the second reading shows a fallen clock."""
    asked = tmp_path / "asked"
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
case "$*" in
  *--query-gpu=index*) echo . >> {asked}; [ $(wc -l < {asked}) -gt 1 ] && mhz=900 || mhz=1900
    echo "0, H200, 580, 143000, $mhz, 1980, 700";;
  *throttle*) echo 0x0;;
esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state, warnings = WorkerState(), []
    for now in (0.0, STATE_AGE_S / 2, 2 * STATE_AGE_S, 2.5 * STATE_AGE_S):
        monkeypatch.setattr(measure.time, "monotonic", lambda now=now: now)
        warnings.append(measure.gpu_warnings(state))
    assert warnings[:2] == [(), ()]
    assert "fell from 1900 to 900 MHz" in warnings[2][0]
    assert warnings[3] == warnings[2], "also for the plans that are timed until the next reading"
    assert len(asked.read_text().split()) == 2


@pytest.mark.parametrize(("by_cuda", "sms"), [(4, 4), (None, 8)])
def test_a_measurement_and_its_evaluation_keep_the_power_mode(
    by_cuda: int | None, sms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA reports counts; the mask of the TPCs stands in for it."""
    mode = PowerMode("15W", 8, 612.0, 2133.0)
    monkeypatch.setattr(measure, "read_power_mode", lambda: mode)
    monkeypatch.setattr(measure.cuda, "multiprocessors", lambda: by_cuda)
    measurement = replace(job_of(tmp_path), on_gpu=True).run(WorkerState()).measurement
    assert measurement.power_mode == replace(mode, sm_count=sms)
    plan = PrecisionPlan("0" * 64, {"g000": Precision.FP16})
    told = Evaluation.from_measurement(
        plan, measurement, number=0, origin=ORIGIN_FP16, metric="relative_l2", baseline_ms=None
    )
    kept = json.loads(json.dumps(told.to_json()))
    assert kept["power_mode"] == {"name": "15W", "sm_count": sms, "gpu_mhz": 612.0, "memory_mhz": 2133.0}
    assert job_of(tmp_path).run(WorkerState()).measurement.power_mode is None
