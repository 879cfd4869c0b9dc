"""The third baseline: the engine whose precisions TensorRT 10's builder chooses itself, measured once.

It is what people go back to for speed (``trtexec --fp16``): FP16 and TF32 wherever a kernel is faster. It is no plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mptune.engines.base import Failure, MeasuresFreeEngine, Toolchain
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import BuildersChoice, Evaluation, Origin
from mptune.tuning.failures import describe
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.sessions import Sessions, anchored

_NOTE = "builder's choice"
_FAILED = "failed"


def measure_builders_choice(
    record: StudyRecord, toolchain: Toolchain, settings: SearchSettings, listener: Listener
) -> None:
    """Measure it, unless that is recorded. A failure is recorded, too; one of the machine is tried again later."""
    baseline = record.baseline()
    if baseline is None or record.note(_NOTE) is not None or not isinstance(toolchain, MeasuresFreeEngine):
        return
    result = toolchain.measure_free_engine()
    if isinstance(result, Failure):
        listener.warning(f"the engine of the builder's own choice was not measured: {describe(result)}")
        if not result.is_machine_fault:
            record.set_note(_NOTE, {_FAILED: describe(result)})
    elif result is not None:
        measurement = anchored(record, result)
        evaluation = Evaluation.from_measurement(
            PrecisionPlan(baseline.plan.model_sha256, {}),
            replace(measurement, latency=Sessions(record).corrected(measurement.latency)),
            number=-1,
            origin=Origin("seed", _NOTE),
            metric=settings.metric,
            baseline_ms=baseline.latency.median_ms,
        )
        record.set_note(_NOTE, evaluation.to_json())


def read_builders_choice(record: StudyRecord, fp32: Evaluation) -> BuildersChoice | None:
    """What is recorded of it, against the all-FP32 baseline of the front; None where it was not measured."""
    note: dict[str, Any] | None = record.note(_NOTE)
    if note is None:
        return None
    if _FAILED in note:
        return BuildersChoice(None, note[_FAILED])
    evaluation = Evaluation.from_json(note).with_metric(record.metric).ignoring(fp32.ignored)
    return BuildersChoice(evaluation.with_baseline(fp32.latency.median_ms))
