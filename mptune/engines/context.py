"""What the engines of a run work on: the model with its layer groups, the settings, and where the run's files lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptune.engines.base import SKETCHES, SampleSet
from mptune.files import scratch_name
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:  # onnx is slow to import, and a run that is only read needs none
    from mptune.graph.facts import DependentOutput
    from mptune.graph.groups import GroupedModel
    from mptune.graph.hazards.hazard import TensorRange
    from mptune.graph.loading.model import Model
    from mptune.graph.writing.rewrite import Rewriter
    from mptune.graph.writing.weights import WeightBank


@dataclass(frozen=True, eq=False)
class RunContext:
    """See the module. Jobs get paths and figures of it, never tensors."""

    grouped: GroupedModel
    settings: SearchSettings
    weights_dir: Path  # the weight bank; typed and emulated models are written beside it
    data_dir: Path
    engines_dir: Path
    logs_dir: Path
    own_dir: Path | None = None
    """For notes about this device, where the data are those of another run directory; None for ``data_dir``."""
    ranges: Mapping[str, TensorRange] | None = None  # of the FP32 values, where they have been observed

    @classmethod
    def in_folder(cls, grouped: GroupedModel, folder: Path, settings: SearchSettings | None = None) -> RunContext:
        """A context outside of a run directory: its folders are made below one that exists."""
        weights, data, engines, logs = (folder / name for name in ("weights", "data", "engines", "logs"))
        for place in (weights, data, engines, logs):
            place.mkdir(exist_ok=True)
        return cls(grouped, settings or SearchSettings(), weights, data, engines, logs)

    def with_settings(self, **changes: Any) -> RunContext:
        """The same with some settings changed."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def model(self) -> Model:
        """The user's model."""
        return self.grouped.model

    @property
    def model_path(self) -> Path:
        """Its file, absolute."""
        return self.model.path.resolve()

    @property
    def precisions(self) -> tuple[str, ...]:
        """What groups may be."""
        return self.settings.precisions

    @cached_property
    def row_outputs(self) -> tuple[DependentOutput, ...]:
        """The model's outputs that are compared as sets of rows."""
        from mptune.graph.facts import facts_of

        return facts_of(self.model).row_outputs

    @cached_property
    def bank(self) -> WeightBank:
        """Its weights in each of its precisions, written when first asked for."""
        from mptune.graph.writing.weights import WeightBank

        return WeightBank.write(self.model, self.weights_dir, precisions=self.precisions)

    @cached_property
    def rewriter(self) -> Rewriter:
        """Writes the typed models of plans beside the weight bank; made when first asked for."""
        from mptune.graph.writing.rewrite import Rewriter

        return Rewriter(self.grouped, self.bank)

    @property
    def notes_dir(self) -> Path:
        """For notes about this device: how it is timed, and what the outputs of its engines look like."""
        return self.own_dir or self.data_dir

    def timing_record(self, toolchain: str) -> Path:
        """The file of the first timing with a toolchain, whose name has its device."""
        return self.notes_dir / f"timing-{re.sub(r'[^a-z0-9]+', '-', toolchain.lower()).strip('-')}.json"

    def samples(self, which: SampleSet) -> Path:
        """The file of a set of samples."""
        return self.data_dir / f"{which}.npz"

    def reference(self, which: SampleSet) -> Path:
        """The file of the reference outputs of a set of samples."""
        return self.data_dir / f"{which}_reference.npz"

    def sketches(self, plan: PrecisionPlan, which: SampleSet) -> Path | None:
        """Where the job that runs a plan writes what its held-out outputs look like; None for other samples."""
        return self.notes_dir / SKETCHES / f"{plan.fingerprint}.json" if which == "held_out" else None

    def scratch(self, name: str) -> Path:
        """A path for a model beside the weight bank, of this process alone: several may share a run directory."""
        return self.weights_dir / scratch_name(name, ".onnx")
