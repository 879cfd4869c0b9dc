"""Runs a model in FP32 over samples in a worker, for ``inspect`` and ``apply``: what its values are, what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mptune.data.archive import save_samples
from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.failures import did_not_run
from mptune.engines.toolchains.choose import DEFAULT_TARGET
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.finding import Finding
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import ObservedValues
from mptune.graph.hazards.static import state_inputs
from mptune.graph.loading.model import Model
from mptune.graph.plan import DEFAULT_PRECISIONS
from mptune.settings import DataSettings, InMemory, SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.baseline import check_reference, optimisation_findings
from mptune.tuning.output_findings import training_findings
from mptune.tuning.refining import RefinedGroup, refine


def load_samples(model: Model, data: Path | InMemory, batch: int) -> CalibrationSet:
    """As many samples as a search would take."""
    settings = DataSettings(batch=batch)
    samples = load_calibration(data, model.inputs, settings, 0, state_inputs(model))
    return replace(samples, samples=samples.samples[: settings.max_search_samples])


def observe_values(
    grouped: GroupedModel,
    samples: CalibrationSet,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    stage: Callable[[str], object] | None = None,
) -> tuple[ObservedValues, tuple[Finding, ...], tuple[RefinedGroup, ...]]:
    """What the values of a model are on the samples, findings about the model, and the groups that a search splits.

    Groups are parted as for the default target; only where there is a ``stage`` to report to, as it takes time.
    """
    with tempfile.TemporaryDirectory(prefix="mptune-inspect-") as folder:
        context = RunContext.in_folder(grouped, Path(folder), SearchSettings(precisions=tuple(precisions)))
        save_samples(context.samples("search"), samples.samples)
        with Toolchain(None, load_target(DEFAULT_TARGET), context) as toolchain:
            ranges = toolchain.observe(stage)
            reference = ranges if isinstance(ranges, Failure) else toolchain.reference("search")
            refined: tuple[RefinedGroup, ...] = ()
            if not (isinstance(ranges, Failure) or isinstance(reference, Failure) or stage is None):
                hazards = find_hazards(grouped, ObservedValues(ranges), precisions)
                refined = refine(toolchain, grouped, hazards, context.settings, stage)
    if isinstance(ranges, Failure):
        gone = replace(ranges, log_path=None)
        raise did_not_run("the model cannot be observed in FP32", gone, grouped.model)
    if isinstance(reference, Failure):
        return ObservedValues(ranges), (), ()
    about = check_reference(reference, "inspect", skip=True)
    before = (*about, *training_findings(grouped.model, "inspect", is_run=True))
    optimised = optimisation_findings(reference.optimisation_error, grouped.model, "inspect", earlier=before)
    return ObservedValues(ranges), (*about, *optimised), refined
