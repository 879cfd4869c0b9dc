"""What ``inspect`` finds of a model in FP32, without a worker process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.calibration import load_calibration
from mptune.engines.context import RunContext
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.finding import Finding
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.processes.child import WorkerState
from mptune.settings import DataSettings, SearchSettings
from mptune.tuning.baseline import check_reference
from mptune.tuning.output_findings import training_findings, without_repetition
from tests.engines.engine_support import InProcess
from tests.graph.models import save
from tests.zoo.fp32 import Specimen


def place(specimen: Specimen, folder: Path) -> tuple[Path, Path]:
    np.savez(folder / "data.npz", **specimen.data)  # type: ignore[arg-type]
    return save(specimen.proto, folder), folder / "data.npz"


def in_process(specimen: Specimen, folder: Path) -> tuple[Finding, ...]:
    """What ``inspect`` finds of the model in FP32, without a worker process."""
    path, _ = place(specimen, folder)
    model = load_model(path)
    data = load_calibration(folder / "data.npz", model.inputs, DataSettings(), 0)
    context = RunContext(GroupedModel(model, find_groups(model)), SearchSettings(), *[folder] * 4)
    save_samples(context.samples("search"), data.samples)
    state = WorkerState()
    try:
        report = ReferenceModel(context, "cpu", InProcess(state)).reference("search")
    finally:
        state.close()
    findings = (*training_findings(model, "inspect", is_run=True), *check_reference(report, "inspect", skip=True))
    return without_repetition(findings)
