"""The two sides of a comparison, in one layout, with what FP16 and TF32 make of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from mptune.data.metrics.parts import OutputParts, find_parts
from mptune.data.metrics.row_sets import RowSet, aligned_rows, find_row_sets
from mptune.diagnosis.limits import Limit, columns_of, default_limit, error_of, largest_of, limits_of
from mptune.diagnosis.patterns.roundings import Cause, Compared, Explanation, explain, is_half_precise
from mptune.diagnosis.rows import Layout
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.jobs.samples import batch_sizes
from mptune.finding import OutputColumns
from mptune.graph.facts import facts_of
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.widened import ROUNDINGS
from mptune.settings import Tolerance

Origin = Literal["recorded", "model", "engine", "same"]


@dataclass(frozen=True)
class Sides:
    """What is compared."""

    runner: Runner
    """Runs the model."""
    reference: Outputs
    candidate: Outputs
    reference_name: str
    candidate_name: str
    layouts: Mapping[str, Layout]
    """Only of outputs that are compared."""
    batch: int
    """Rows that one run computes."""
    plan: PrecisionPlan
    """The candidate's precisions as far as they are known; else FP16 wherever FP16 can be right."""
    origin: Origin
    """Of the candidate: recorded, another model, an engine file, or the model itself."""
    tolerances: Mapping[str, Sequence[Tolerance]] = field(default_factory=dict)
    max_error: float | None = None
    """Limit of outputs without one; None for that of FP16."""
    is_other_model: bool = False
    """Two models differ in more than precision, or one draws random numbers: no rounding is made out behind that."""
    is_gate: bool = False
    """Only errors against their limits are asked for: nothing is emulated, and figures of FP16 are NaN."""

    def output(self, name: str) -> Side:
        """One output of both sides, judged by the part of it that is worst against its limit."""
        return self.worst(name, self.candidate, self.reference)

    def worst(self, name: str, candidate: Outputs, reference: Outputs) -> Side:
        """The part of an output that is worst against its limit, of any two runs."""
        return max(self.parts(name, candidate, reference), key=lambda side: side.judged / side.limit.value)

    def parts(self, name: str, candidate: Outputs, reference: Outputs) -> list[Side]:
        """Each part of an output that has a limit, of any two runs.

        Where the number of rows depends on values, rows are paired first (``mptune.data.metrics.row_sets``).
        """
        exact = self.runner.exact
        whole = arrays_of(candidate, name), arrays_of(reference, name)
        largest = largest_of(*self._paired(name, candidate, reference))
        sides = []

        def default(columns: tuple[int, ...] | None) -> float:
            return default_limit(self.error(name, columns, self.emulated, exact))

        tolerances = self.tolerances.get(name, ())
        for limit in limits_of(name, tolerances, self._parts.get(name), self.max_error, default):
            columns = limit.columns
            error = judged = self.error(name, columns, candidate, reference)
            of_fp16 = judged_fp16 = math.nan if self.is_gate else self.error(name, columns, self.emulated, exact)
            if limit.is_absolute:
                judged = largest_of(*self._part(name, columns, candidate, reference))
                judged_fp16 = largest_of(*self._part(name, columns, self.emulated, exact))
            sides.append(Side(self, name, *whole, error, of_fp16, limit, judged, judged_fp16, largest))
        return sides

    def error(self, name: str, columns: tuple[int, ...] | None, got: Outputs, wanted: Outputs) -> float:
        """The error of an output, or of columns of it, between any two runs."""
        pair = self._part(name, columns, got, wanted)
        return error_of(*pair, about_zero=self.has_row_set(name), least=self._least_scale(name, columns))

    def _least_scale(self, name: str, columns: tuple[int, ...] | None) -> float:
        parts = self._parts.get(name)
        return 0.0 if parts is None or columns is None else parts.least_scale(columns)

    def _part(
        self, name: str, columns: tuple[int, ...] | None, got: Outputs, wanted: Outputs
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        parts = self._parts.get(name)
        axis = None if parts is None else parts.axis
        first, second = self._paired(name, got, wanted)
        return columns_of(first, axis, columns), columns_of(second, axis, columns)

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
        aligned = [aligned_rows(row_sets, first, second).get(name) for first, second in zip(got, wanted, strict=True)]
        pairs = [rows for rows in aligned if rows is not None]
        if len(pairs) < len(aligned):
            return whole
        lead = (1,) * (whole[1][0].ndim - 2)
        return (
            [rows.output.reshape(lead + rows.output.shape) for rows in pairs],
            [rows.reference.reshape(lead + rows.reference.shape) for rows in pairs],
        )

    @cached_property
    def _row_sets(self) -> tuple[RowSet, ...]:
        dependent = [output for output in facts_of(self.runner.model).dependent_outputs if output.name in self.layouts]
        return find_row_sets(dependent, self.runner.exact)

    @cached_property
    def _parts(self) -> Mapping[str, OutputParts]:
        shapes = [{name: array.shape for name, array in sample.items()} for sample in self.runner.samples]
        return find_parts(self.runner.exact, batch_sizes(shapes, len(self.runner.exact)))


@dataclass(frozen=True, eq=False)
class Side:
    """One output of both sides, judged by the part of it that is worst against its own limit."""

    sides: Sides
    name: str
    got: Sequence[np.ndarray]
    """Of the candidate, one array per sample."""
    wanted: Sequence[np.ndarray]
    error: float
    """Of that part, as all figures but ``largest``."""
    emulated: float
    """Error of all-FP16 (``Sides.emulated``)."""
    limit: Limit
    judged: float
    """The figure that the limit is about."""
    judged_fp16: float
    largest: float
    """Largest absolute difference of the whole output, on any sample."""

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

    def lost(self, outputs: Outputs) -> np.ndarray | None:
        """Where a run's output is NaN or Inf and the reference is finite, flat; None where they differ in shape."""
        arrays = arrays_of(outputs, self.name)
        if any(a.shape != b.shape or b.dtype.kind not in "fiub" for a, b in zip(arrays, self.wanted, strict=True)):
            return None
        pairs = zip(arrays, self.wanted, strict=True)
        return np.concatenate([(np.isfinite(b) & ~np.isfinite(a)).ravel() for a, b in pairs])

    @cached_property
    def compared(self) -> Compared | None:
        """Both sides as rows; None where rows differ in shape."""
        return self.compared_with(self.got)

    def compared_with(self, got: Sequence[np.ndarray]) -> Compared | None:
        """As ``compared``, of other arrays in the candidate's place."""
        layout = self.sides.layouts[self.name]
        alike = all(a.shape == b.shape for a, b in zip(got, self.wanted, strict=True))
        if not layout.is_regular or not alike or any(array.dtype.kind not in "fiub" for array in self.wanted):
            return None
        emulated = arrays_of(self.sides.emulated, self.name)
        same = all(a.shape == b.shape for a, b in zip(emulated, self.wanted, strict=True))
        return Compared.of_rows(layout.rows(got), layout.rows(self.wanted), layout.rows(emulated) if same else None)

    @property
    def difference(self) -> Compared | None:
        """``compared``, where there is a difference to explain."""
        compared = self.compared
        is_set = self.is_within and self.sides.has_row_set(self.name)
        return None if compared is None or compared.distance <= compared.exact or is_set else compared

    @cached_property
    def rounding(self) -> Explanation | None:
        """The rounding whose pattern the difference has; None where it has none, or none is made out."""
        sides, runner, compared = self.sides, self.sides.runner, self.difference
        if compared is None:
            return None
        exact = np.asarray(self.rows(runner.exact), np.float64)

        def changes(cause: Cause, run: Outputs | None) -> list[tuple[Cause, np.ndarray]]:
            rows = exact[:0] if run is None else np.asarray(self.rows(run), np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                return [(cause, (rows - exact) / compared.scale)] if rows.shape == exact.shape else []

        ways = ROUNDINGS if sides.origin != "model" else ()
        tf32 = [each for way in ways for each in changes("tf32-candidate", runner.tf32(way))]
        tf32 += [("tf32-reference", -made) for _, made in tf32]
        plans = [plan for plan in dict.fromkeys((sides.plan, runner.throughout(Precision.FP16))) if plan.reduced_groups]
        half = [each for p in plans for each in changes("bf16" if p.bf16_groups else "fp16", runner.emulated(p))]
        is_half = is_half_precise(np.concatenate([array.ravel() for array in self.got]))
        difference = compared.got - compared.wanted
        cause = explain(difference, [*tf32, *half], is_half=is_half)
        if cause is None and sides.origin != "model":  # an engine may be BF16 throughout, which nothing says
            bf16 = changes("bf16", runner.emulated(runner.throughout(Precision.BF16)))
            cause = explain(difference, [*tf32, *bf16], is_half=is_half)
        return cause


def arrays_of(outputs: Outputs, name: str) -> list[np.ndarray]:
    """One output of all samples."""
    return [np.asarray(sample[name]) for sample in outputs]
