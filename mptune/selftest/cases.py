"""What the engines are held against: outputs in FP32 and as FP16 rounds, by onnx's reference evaluator (NumPy).

No engine takes part, ONNX Runtime included, so that its mistakes show like any other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import onnx

from mptune.data.archive import save_samples
from mptune.engines.base import Workspace
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rounding_steps import with_rounding_steps
from mptune.selftest.models import MODELS, samples_of

QUANTISED = "quantised"

FP32, FP16, FIRST, SECOND = "all-fp32", "all-fp16", "one half", "other half"
"""The plans: in the last two, every other group that may be FP16 is, and none of them is in both."""


@dataclass(frozen=True, eq=False)
class Case:
    """One tiny model.

    Attributes:
        workload: it, its groups and its files; the samples are written.
        reference: FP32 outputs of each sample.
    """

    name: str
    workload: Workload
    plans: Mapping[str, PrecisionPlan]
    reference: tuple[np.ndarray, ...]

    @property
    def quantised(self) -> bool:
        """Whether part of it is INT8, whose steps any rounding before them can change."""
        return self.name == QUANTISED

    @cached_property
    def fused(self) -> Mapping[str, np.ndarray]:
        """Outputs of the first sample by plan, as an engine rounds that fuses nodes."""
        return self._emulated(self.workload.grouped)

    @cached_property
    def unfused(self) -> Mapping[str, np.ndarray]:
        """The same for an engine with a kernel for each node (ONNX Runtime's CUDA provider)."""
        return self._emulated(with_rounding_steps(self.workload.grouped))

    def _emulated(self, grouped: GroupedModel) -> dict[str, np.ndarray]:
        emulator, outputs = Emulator(grouped), {}
        (sample,) = samples_of(self.workload.model.proto)[:1]
        for name, plan in self.plans.items():
            path = emulator.write(plan, self.workload.workspace.scratch("emulated"))
            outputs[name] = _evaluate(path, sample)
            path.unlink()
        return outputs


def make_cases(folder: Path) -> tuple[Case, ...]:
    """Write the tiny models and their samples, a folder for each, and compute their reference outputs."""
    return tuple(_case(name, folder / name) for name in MODELS)


def _case(name: str, folder: Path) -> Case:
    folders = {f"{what}_dir": folder / what for what in ("weights", "data", "engines", "logs")}
    for path in folders.values():
        path.mkdir(parents=True)
    workspace = Workspace(model_path=folder / "model.onnx", **folders)
    onnx.save(MODELS[name](), workspace.model_path)
    model = load_model(workspace.model_path)
    grouped = GroupedModel(model, find_groups(model))
    samples = samples_of(model.proto)
    save_samples(workspace.samples("search"), samples)
    fp32 = grouped.uniform(Precision.FP32)
    free = [group.id for group in grouped.groups if group.pinned is None]
    chosen = {FP32: [], FP16: free, FIRST: free[::2], SECOND: free[1::2]}
    plans = {plan: fp32.replace(dict.fromkeys(ids, Precision.FP16)) for plan, ids in chosen.items()}
    reference = tuple(_evaluate(workspace.model_path, sample) for sample in samples)
    return Case(name, Workload(grouped, workspace), plans, reference)


def _evaluate(path: Path, sample: Mapping[str, np.ndarray]) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    (output,) = cast("list[np.ndarray]", ReferenceEvaluator(str(path)).run(None, dict(sample)))
    return output
