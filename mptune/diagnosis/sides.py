"""The two sides of a comparison, in one layout, with what FP16 and TF32 make of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mptune.diagnosis.limits import Tolerance, default_limit, error_of
from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.rows import Layout
from mptune.diagnosis.runner import Outputs, Runner
from mptune.graph.plan import PrecisionPlan


@dataclass(frozen=True)
class Sides:
    """What is compared.

    Attributes:
        runner: runs the model.
        reference: left outputs, one dictionary per sample.
        candidate: right ones; the same names and samples.
        reference_name: what the left side is called.
        candidate_name: what the right side is called.
        layouts: output -> how it lies; only outputs that are compared.
        batch: rows that one run computes.
        plan: the candidate's precisions as far as they are known; else FP16 wherever FP16 can be right.
        origin: of the right side: recorded, another model, or the model itself.
        moved: output -> order of axes in the candidate's file.
        taken: output -> output whose recorded array has this one's shape.
        tolerances: output -> tolerance.
        max_error: limit of outputs without one; None for that of FP16.
    """

    runner: Runner
    reference: Outputs
    candidate: Outputs
    reference_name: str
    candidate_name: str
    layouts: Mapping[str, Layout]
    batch: int
    plan: PrecisionPlan
    origin: Literal["recorded", "model", "same"]
    moved: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    max_error: float | None = None

    def output(self, name: str) -> Side:
        """One output of both sides."""
        got, wanted = arrays_of(self.candidate, name), arrays_of(self.reference, name)
        emulated = error_of(arrays_of(self.emulated, name), arrays_of(self.runner.exact, name))
        return Side(self, name, got, wanted, error_of(got, wanted), emulated, self._tolerance(name, emulated))

    @property
    def emulated(self) -> Outputs:
        """The model with FP16 wherever FP16 can be right."""
        return self.runner.emulated(self.runner.all_fp16)

    def _tolerance(self, name: str, emulated: float) -> Tolerance:
        if name in self.tolerances:
            return self.tolerances[name]
        return Tolerance(default_limit(emulated) if self.max_error is None else self.max_error)


@dataclass(frozen=True)
class Side:
    """One output of both sides.

    Attributes:
        sides: all outputs.
        name: of the output.
        got: of the candidate, one array per sample.
        wanted: of the reference.
        error: of the candidate.
        emulated: error of the model with FP16 wherever FP16 can be right.
        tolerance: what is allowed.
    """

    sides: Sides
    name: str
    got: Sequence[np.ndarray]
    wanted: Sequence[np.ndarray]
    error: float
    emulated: float
    tolerance: Tolerance

    @property
    def judged(self) -> float:
        """The figure that the tolerance limits."""
        return self.largest if self.tolerance.absolute else self.error

    @property
    def largest(self) -> float:
        """Largest absolute difference; inf where shapes or finite values differ."""
        worst = 0.0
        for a, b in zip(self.got, self.wanted, strict=True):
            if a.shape != b.shape:
                return float("inf")
            known = np.isfinite(b)
            gap = np.abs(np.asarray(a, np.float64)[known] - np.asarray(b, np.float64)[known])
            worst = max(worst, float(gap.max(initial=0)) if np.isfinite(gap).all() else float("inf"))
        return worst

    @property
    def is_within(self) -> bool:
        """Whether it is within tolerance."""
        return self.judged <= self.tolerance.limit

    @property
    def row_count(self) -> int:
        """Rows of all samples."""
        return self.sides.layouts[self.name].shape[0]

    def samples_of(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The samples that these rows belong to."""
        layout = self.sides.layouts[self.name]
        ends = np.cumsum([1 if layout.stacked else shape[0] for shape in layout.shapes])
        return tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in rows}))

    def rows(self, outputs: Outputs) -> np.ndarray:
        """Rows of this output of any run on the same samples."""
        return self.sides.layouts[self.name].rows(arrays_of(outputs, self.name))

    def compared(self, candidate: Sequence[np.ndarray] | None = None) -> Compared | None:
        """Both sides as rows; None where rows differ in shape.

        Args:
            candidate: in place of the candidate's arrays.
        """
        layout = self.sides.layouts[self.name]
        got = self.got if candidate is None else candidate
        alike = all(a.shape == b.shape for a, b in zip(got, self.wanted, strict=True))
        if not layout.is_regular or not alike or any(array.dtype.kind not in "fiub" for array in self.wanted):
            return None
        emulated = arrays_of(self.sides.emulated, self.name)
        same = all(a.shape == b.shape for a, b in zip(emulated, self.wanted, strict=True))
        return Compared.of(layout.rows(got), layout.rows(self.wanted), layout.rows(emulated) if same else None)


def arrays_of(outputs: Outputs, name: str) -> list[np.ndarray]:
    """One output of all samples."""
    return [np.asarray(sample[name]) for sample in outputs]
