"""What is known of the values of a model: shapes and, where it is run on samples in a worker, ranges."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mptune.data.calibration import CalibrationSet, load_calibration
from mptune.engines.base import Failure, Workspace
from mptune.engines.jobs.ranges import TensorRange
from mptune.engines.toolchains.predicted import PredictedToolchain
from mptune.engines.workload import Workload
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.interface import state_inputs
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.settings import DataSettings, InMemory, SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.failures import did_not_run
from mptune.tuning.reasons.reference import training_findings
from mptune.tuning.steps.baseline import check_reference, optimisation_findings


@dataclass(frozen=True)
class KnownValues:
    """What is known of a model's values.

    Attributes:
        shapes: name -> shape; a value whose shape is not known is absent.
        assumed: symbolic dimension -> the size that the shapes are taken for; empty where they were observed.
        samples: what the model was run on; None where it was not run.
        ranges: name -> what was observed of the value; empty where it was not run.
        findings: about the model in FP32, of that run.
    """

    shapes: Mapping[str, tuple[int, ...]]
    assumed: Mapping[str, int] = field(default_factory=dict)
    samples: CalibrationSet | None = None
    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def absmax(self) -> dict[str, float]:
        """Value -> its largest magnitude."""
        return {name: seen.absmax for name, seen in self.ranges.items()}


def known_values(grouped: GroupedModel, data: Path | InMemory | None, batch: int) -> KnownValues:
    """By a run on the data where there are any, else from the graph alone.

    Raises:
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    if data is None:
        static = static_shapes(grouped.model, batch)
        return KnownValues(static.shapes, static.assumed)
    settings = DataSettings(batch=batch)
    samples = load_calibration(data, grouped.model.inputs, settings, 0, state_inputs(grouped.model))
    samples = replace(samples, samples=samples.samples[: settings.max_search_samples])
    ranges, findings = observe_values(grouped, samples, tuple(map(str, Precision)))
    shapes = {name: seen.shape for name, seen in ranges.items()}
    return KnownValues(shapes, samples=samples, ranges=ranges, findings=findings)


def observe_values(
    grouped: GroupedModel, samples: CalibrationSet, precisions: Sequence[str] = DEFAULT_PRECISIONS
) -> tuple[dict[str, TensorRange], tuple[Finding, ...]]:
    """Run the model over the samples in a worker: the range and shape of every value, and findings about the model.

    Args:
        grouped: the model and its layer groups.
        samples: what it is run on.
        precisions: that probes of single nodes round to.

    Raises:
        BaselineError: it does not run on them.
    """
    with tempfile.TemporaryDirectory(prefix="mptune-inspect-") as folder:
        places = [Path(folder) / name for name in ("weights", "data", "engines", "logs")]
        for place in places:
            place.mkdir()
        workspace = Workspace(grouped.model.path.resolve(), *places)
        samples.save(workspace.samples("search"))
        workload = Workload(grouped, workspace, tuple(precisions))
        with PredictedToolchain(load_target("cpu"), workload, SearchSettings()) as toolchain:
            reference = toolchain.reference("search")
            ranges = toolchain.observe()
    if isinstance(ranges, Failure):
        gone = replace(ranges, log_path=None)
        raise did_not_run("the model cannot be observed in FP32", gone, grouped.model)
    if isinstance(reference, Failure):
        return dict(ranges), ()
    about = check_reference(reference, "inspect", skip=True)
    known = (*about, *training_findings(grouped.model, "inspect", is_run=True))
    optimised = optimisation_findings(reference.optimisation_error, grouped.model, "inspect", known=known)
    return dict(ranges), (*about, *optimised)
