"""The two sides of a comparison, in one layout, with what FP16 and TF32 make of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from mptune.data.metrics.parts import OutputParts, find_parts
from mptune.diagnosis.limits import Limit, columns_of, default_limit, error_of, largest_of, limits_of
from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.rows import Layout
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.jobs.samples import batch_sizes
from mptune.finding import OutputColumns
from mptune.graph.plan import PrecisionPlan
from mptune.settings import Tolerance

Origin = Literal["recorded", "model", "engine", "same"]


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
        origin: of the right side: recorded, another model, an engine file, or the model itself.
        moved: output -> order of axes in the candidate's file.
        taken: output -> output whose recorded array has this one's shape.
        tolerances: output -> those that name it or columns of it.
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
    origin: Origin
    moved: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, Sequence[Tolerance]] = field(default_factory=dict)
    max_error: float | None = None

    def output(self, name: str) -> Side:
        """One output of both sides, judged by the part of it that is worst against its limit."""
        got, wanted = arrays_of(self.candidate, name), arrays_of(self.reference, name)
        return self.worst(name, got, wanted)

    def worst(self, name: str, got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> Side:
        """The part of an output that is worst against its limit, of any two runs.

        Raises:
            SettingsError: a tolerance names columns that there are not.
        """
        emulated, exact = arrays_of(self.emulated, name), arrays_of(self.runner.exact, name)
        parts = self._parts.get(name)
        axis = None if parts is None else parts.axis
        sides = []
        for limit in limits_of(name, self.tolerances.get(name, ()), parts, self.max_error):
            columns = limit.columns if isinstance(limit, Limit) else limit
            a, b = columns_of(got, axis, columns), columns_of(wanted, axis, columns)
            of_fp16 = error_of(columns_of(emulated, axis, columns), columns_of(exact, axis, columns))
            allowed = limit if isinstance(limit, Limit) else Limit(default_limit(of_fp16), columns=columns)
            error = error_of(a, b)
            judged, judged_fp16 = error, of_fp16
            if allowed.is_absolute:
                judged = largest_of(a, b)
                judged_fp16 = largest_of(columns_of(emulated, axis, columns), columns_of(exact, axis, columns))
            sides.append(Side(self, name, got, wanted, error, of_fp16, allowed, judged, judged_fp16))
        return max(sides, key=lambda side: side.judged / side.limit.value)

    @property
    def emulated(self) -> Outputs:
        """The model with FP16 wherever FP16 can be right."""
        return self.runner.emulated(self.runner.all_fp16)

    @cached_property
    def _parts(self) -> Mapping[str, OutputParts]:
        shapes = [{name: array.shape for name, array in sample.items()} for sample in self.runner.samples]
        return find_parts(self.runner.exact, batch_sizes(shapes, len(self.runner.exact)))


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
        limit: of the part that is worst against its own; errors are of that part.
        judged: the figure that it limits.
        judged_fp16: the same figure of the model with FP16 wherever FP16 can be right.
    """

    sides: Sides
    name: str
    got: Sequence[np.ndarray]
    wanted: Sequence[np.ndarray]
    error: float
    emulated: float
    limit: Limit
    judged: float
    judged_fp16: float

    @property
    def where(self) -> OutputColumns:
        """The output, or the columns of it that are judged."""
        return OutputColumns(self.name, self.limit.columns)

    @property
    def is_within(self) -> bool:
        """Whether it is within tolerance."""
        return self.judged <= self.limit.value

    @property
    def evidence(self) -> dict[str, int | float | str]:
        """Its figures for a finding: the one that is limited, where that is not ``error``, too."""
        figures: dict[str, int | float | str] = {"error": self.error, "emulated_fp16": self.emulated}
        if self.limit.is_absolute:
            figures |= {"largest_difference": self.judged, "limit_of_difference": self.limit.value}
        else:
            figures["limit"] = self.limit.value
        return figures

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
