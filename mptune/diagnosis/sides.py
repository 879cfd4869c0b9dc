"""The two sides of a comparison, in one layout, with what FP16 and TF32 make of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from mptune.data.metrics.parts import OutputParts, find_parts
from mptune.data.metrics.row_sets import RowSet, aligned_rows, find_row_sets
from mptune.diagnosis.limits import Limit, columns_of, default_limit, error_of, largest_of, limits_of, rounded_error
from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.rows import Layout
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.jobs.samples import batch_sizes
from mptune.finding import OutputColumns
from mptune.graph.loading.shared_units import shared_units
from mptune.graph.loading.value_dependent import shape_facts
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
        return self.worst(name, self.candidate, self.reference)

    def worst(self, name: str, candidate: Outputs, reference: Outputs) -> Side:
        """The part of an output that is worst against its limit, of any two runs.

        Raises:
            SettingsError: a tolerance names columns that there are not.
        """
        return max(self.parts(name, candidate, reference), key=lambda side: side.judged / side.limit.value)

    def parts(self, name: str, candidate: Outputs, reference: Outputs) -> list[Side]:
        """Each part of an output that has a limit, of any two runs.

        Where the number of rows depends on values, rows are paired first (``mptune.data.metrics.row_sets``).

        Raises:
            SettingsError: a tolerance names columns that there are not.
        """
        got, wanted = self._paired(name, candidate, reference)
        emulated, exact = self._paired(name, self.emulated, self.runner.exact)
        parts, is_set = self._parts.get(name), self.has_row_set(name)
        axis = None if parts is None else parts.axis
        sides = []
        for limit in limits_of(name, self.tolerances.get(name, ()), parts, self.max_error):
            columns = limit.columns if isinstance(limit, Limit) else limit
            a, b = columns_of(got, axis, columns), columns_of(wanted, axis, columns)
            c, d = columns_of(emulated, axis, columns), columns_of(exact, axis, columns)
            least = 0.0 if parts is None or columns is None else parts.least_scale(columns)
            of_fp16 = error_of(c, d, about_zero=is_set, least=least)
            allowed = limit if isinstance(limit, Limit) else Limit(self._default_limit(name, columns), columns=columns)
            error = error_of(a, b, about_zero=is_set, least=least)
            judged, judged_fp16 = (largest_of(a, b), largest_of(c, d)) if allowed.is_absolute else (error, of_fp16)
            whole = arrays_of(candidate, name), arrays_of(reference, name)
            largest = largest_of(got, wanted)
            sides.append(Side(self, name, *whole, error, of_fp16, allowed, judged, judged_fp16, largest))
        return sides

    def _default_limit(self, name: str, columns: tuple[int, ...] | None) -> float:
        parts, exact = self._parts.get(name), self.runner.exact
        axis = None if parts is None else parts.axis
        least = 0.0 if parts is None or columns is None else parts.least_scale(columns)

        def of(outputs: Outputs) -> float:
            return self.error(name, columns, outputs, exact)

        last = rounded_error(
            columns_of(arrays_of(exact, name), axis, columns), about_zero=self.has_row_set(name), least=least
        )
        return default_limit(of(self.emulated), lambda: of(self.runner.emulated(self.runner.sound_fp16)), last)

    def error(self, name: str, columns: tuple[int, ...] | None, got: Outputs, wanted: Outputs) -> float:
        """The error of an output, or of columns of it, between any two runs."""
        parts = self._parts.get(name)
        axis = None if parts is None else parts.axis
        least = 0.0 if parts is None or columns is None else parts.least_scale(columns)
        pair = (columns_of(each, axis, columns) for each in self._paired(name, got, wanted))
        return error_of(*pair, about_zero=self.has_row_set(name), least=least)

    @property
    def emulated(self) -> Outputs:
        """The model in all-FP16, as a search plans it."""
        return self.runner.emulated(self.runner.planned_fp16)

    def has_row_set(self, name: str) -> bool:
        """Whether an output is compared as a set of rows."""
        return any(name in rows.names for rows in self._row_sets)

    def _paired(self, name: str, got: Outputs, wanted: Outputs) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """One output of all samples of two runs; rows of a set are brought together, in the axes that they have."""
        whole = arrays_of(got, name), arrays_of(wanted, name)
        row_sets = [rows for rows in self._row_sets if name in rows.names]
        if not row_sets:
            return whole
        aligned = [aligned_rows(row_sets, one, other).get(name) for one, other in zip(got, wanted, strict=True)]
        found = [rows for rows in aligned if rows is not None]
        if len(found) < len(aligned):
            return whole
        lead = (1,) * (whole[1][0].ndim - 2)
        return (
            [rows.output.reshape(lead + rows.output.shape) for rows in found],
            [rows.reference.reshape(lead + rows.reference.shape) for rows in found],
        )

    @cached_property
    def _row_sets(self) -> tuple[RowSet, ...]:
        dependent = [output for output in shape_facts(self.runner.model).outputs if output.name in self.layouts]
        return find_row_sets(dependent, self.runner.exact)

    @cached_property
    def _parts(self) -> Mapping[str, OutputParts]:
        shapes = [{name: array.shape for name, array in sample.items()} for sample in self.runner.samples]
        units = shared_units(self.runner.model, shapes[0])
        return find_parts(self.runner.exact, batch_sizes(shapes, len(self.runner.exact)), units)


@dataclass(frozen=True)
class Side:
    """One output of both sides.

    Attributes:
        sides: all outputs.
        name: of the output.
        got: of the candidate, one array per sample.
        wanted: of the reference.
        error: of the candidate.
        emulated: error of all-FP16 (``Sides.emulated``).
        limit: of the part that is worst against its own; errors are of that part.
        judged: the figure that it limits.
        judged_fp16: the same figure of all-FP16.
        largest: largest absolute difference of the output, on any sample.
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
    largest: float

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
