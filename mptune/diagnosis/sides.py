"""The two sides of a comparison in one layout, each output with its error, its limit, and what FP16 and TF32 make."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.data.metrics.parts import WORST_PART, OutputParts, belongs_to, columns_of_part, find_parts
from mptune.data.metrics.row_sets import RowSet, find_row_sets, in_order_of, row_axes
from mptune.diagnosis.rows import FP32_ROUNDING, Cause, Compared, Explanation, Layout, explain
from mptune.diagnosis.runner import Outputs, Runner
from mptune.engines.samples import batch_sizes
from mptune.errors import SettingsError
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.facts import DependentOutput, facts_of
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.variants import ROUNDINGS
from mptune.settings import Tolerance

HEADROOM = 2.0  # without a tolerance, the limit is this times the emulated all-FP16 error (``default_limit``)
MOST_LIMIT = 0.1  # without a tolerance, no limit is larger
_MOST_OF_SAMPLE = 5.0  # limits of the mean over samples that one sample's error may reach
FALLBACK_LIMIT = 1e-2  # the limit where the emulated all-FP16 error is not finite


@dataclass(frozen=True)
class Limit:
    """How far a part of an output may lie from its reference."""

    value: float
    is_absolute: bool = False  # of the largest absolute difference, in the output's own unit
    columns: tuple[int, ...] | None = None  # None: the whole output
    is_default: bool = field(default=False, compare=False)  # nobody gave it

    def to_json(self) -> dict[str, Any]:
        """The limit as ``compare --json`` prints it."""
        columns = None if self.columns is None else list(self.columns)
        return {"value": self.value, "unit": "absolute" if self.is_absolute else "relative", "columns": columns}

    def text(self, figure: float) -> str:
        """A figure of what is limited, as ``--tolerance`` takes it: ``0.01``, or ``abs:0.5``."""
        return f"abs:{figure:.3g}" if self.is_absolute else f"{figure:.3g}"

    def sentence(self, figure: float) -> str:
        """The same in a sentence: ``an error of 0.01``, or ``a largest absolute difference of 0.5``."""
        return f"{'a largest absolute difference' if self.is_absolute else 'an error'} of {figure:.3g}"


def limits_of(
    name: str,
    tolerances: Sequence[Tolerance],
    parts: OutputParts | None,
    rest: float | None,
    default: Callable[[tuple[int, ...] | None], float],
) -> list[Limit]:
    """The limit of each part of an output: where no tolerance is, ``rest`` (``--max-error``), else ``default``."""
    tolerances = [tolerance for tolerance in tolerances if tolerance.output == name]
    count = 0 if parts is None or parts.axis is None else len(parts.scales)
    for tolerance in tolerances:
        if tolerance.columns is not None and max(tolerance.columns) >= count:
            hint = f"it has {count} columns, from 0 to {count - 1}" if count else "it has no columns"
            raise SettingsError(f"{tolerance}: output {name!r} has no such column", hint, setting="tolerance")
    limits = [Limit(tolerance.limit, tolerance.is_absolute, tolerance.columns) for tolerance in tolerances]
    if any(limit.columns is None for limit in limits):
        return limits
    named = {column for limit in limits for column in limit.columns or ()}
    left: list[tuple[int, ...] | None] = [None]
    if parts is not None and (parts.is_split or named):
        ranges = parts.ranges if parts.is_split else (range(count),)
        left = [columns for each in ranges if (columns := tuple(k for k in each if k not in named))]
    return [*limits, *(Limit(default(c) if rest is None else rest, False, c, rest is None) for c in left)]


def default_limit(emulated: float) -> float:
    """The limit where none is given: twice the error of all-FP16, and no more than a small part of the spread.

    A value beyond FP16's range, or a decision that falls the other way, is no rounding: an error that is as large as
    that of a broken FP16 model does not agree.
    """
    if not math.isfinite(emulated):
        return FALLBACK_LIMIT
    return min(max(HEADROOM * emulated, FP32_ROUNDING), MOST_LIMIT)


def figure_of(errors: OutputError, name: str, limit: Limit, *, is_absolute: bool | None = None) -> float:
    """The figure of an output that a limit is about; infinite where shapes or finite values differ.

    ``is_absolute`` asks for the error, or the largest absolute difference, whatever the limit is about.
    """
    is_absolute = limit.is_absolute if is_absolute is None else is_absolute
    by_part = {part.columns: error for part, error in errors.by_part(WORST_PART).items() if part.name == name}
    values: Collection[float]
    if limit.columns is None:
        values = errors.per_output[name].get("max_abs", ()) if is_absolute else by_part.values()
    elif limit.columns in by_part and not is_absolute:
        values = (by_part[limit.columns],)
    else:
        every = errors.columns.get(name, {}).get("max_abs" if is_absolute else WORST_PART, ())
        values = [every[k] for k in limit.columns if k < len(every)]
    return max(values) if values and all(map(math.isfinite, values)) else math.inf


@dataclass(frozen=True)
class Sides:
    """What is compared."""

    runner: Runner  # runs the model
    reference: Outputs
    candidate: Outputs
    reference_name: str
    candidate_name: str
    layouts: Mapping[str, Layout]  # only of outputs that are compared
    batch: int  # rows that one run computes
    plan: PrecisionPlan  # the candidate's precisions as far as they are known; else FP16 wherever FP16 can be right
    origin: str  # of the candidate: recorded, another model, an engine file, or the same model
    tolerances: Sequence[Tolerance] = ()
    max_error: float | None = None  # limit of outputs without one; None for that of FP16
    is_other_model: bool = False
    """Two models differ in more than precision, or one draws random numbers: no rounding is made out behind that."""

    @cached_property
    def outputs(self) -> list[Side]:
        """Every output that is compared."""
        return self.judged(self.candidate, self.reference)

    def judged(self, got: Outputs, wanted: Outputs) -> list[Side]:
        """Each output of two runs, by the part of it that is worst against its limit."""
        errors, ordered = self.errors(got, wanted), self.ordered(got, wanted)
        sides = []
        for name, limits in self._limits.items():
            arrays = arrays_of(ordered, name), arrays_of(wanted, name)
            sides.append(max((Side(self, name, *arrays, errors, each) for each in limits), key=lambda s: s.excess))
        return sides

    @cached_property
    def _limits(self) -> dict[str, list[Limit]]:
        parts = {name: part for name, part in self._parts.items() if not self.is_row_set(name)}
        rest, tolerances, fp16 = self.max_error, self.tolerances, self._fp16_limit
        return {name: limits_of(name, tolerances, parts.get(name), rest, partial(fp16, name)) for name in self.layouts}

    def _fp16_limit(self, name: str, columns: tuple[int, ...] | None) -> float:
        return default_limit(figure_of(self.fp16_errors, name, Limit(0.0, columns=columns)))

    def errors(self, got: Outputs, wanted: Outputs) -> OutputError:
        """All statistics of two runs; rows whose number depends on values are paired first."""
        first, second = ([{k: np.asarray(run[k]) for k in self.layouts} for run in each] for each in (got, wanted))
        return compare_outputs(first, Reference(second, self._parts), row_sets=self._row_sets)

    def ordered(self, got: Outputs, wanted: Outputs) -> Outputs:
        """A run with the rows that a TopK selects in the order of another one."""
        if not any(rows.is_selection for rows in self._row_sets):
            return got
        return tuple(in_order_of(self._row_sets, *pair, self._parts) for pair in zip(got, wanted, strict=True))

    @cached_property
    def emulated(self) -> Outputs:
        """The model in all-FP16, as a search plans it: what limits and figures of FP16 are taken from."""
        return self.runner.emulated(self.runner.throughout(Precision.FP16, self.runner.hazards))

    @cached_property
    def fp16_errors(self) -> OutputError:
        """The error of that."""
        return self.errors(self.emulated, self.runner.exact)

    @cached_property
    def _row_sets(self) -> tuple[RowSet, ...]:
        return find_row_sets(self._row_outputs, self.runner.exact)

    @cached_property
    def _row_outputs(self) -> list[DependentOutput]:
        return [output for output in facts_of(self.runner.model).row_outputs if output.name in self.layouts]

    def is_row_set(self, name: str) -> bool:
        """Whether an output is compared as a set of as many rows as values select."""
        return any(name in rows.names for rows in self._row_sets if not rows.is_selection)

    @cached_property
    def _parts(self) -> Mapping[str, OutputParts]:
        shapes = [{name: array.shape for name, array in sample.items()} for sample in self.runner.samples]
        exact = self.runner.exact
        parts = dict(find_parts(exact, batch_sizes(shapes, len(exact)), row_axes(self._row_outputs)))
        for name, part in parts.items():
            if part.is_split and part.axis is not None and len(part.ranges) < len(part.scales):
                # Columns that are one part have one scale: of few samples, that of a column may be nearly 0 by chance.
                columns = [np.moveaxis(np.asarray(run[name], np.float64), part.axis, 0) for run in exact]
                values = np.concatenate([each.reshape(len(each), -1) for each in columns], axis=1)
                scales = [float(np.std(values[each])) for each in part.ranges for _ in each]
                parts[name] = replace(part, scales=tuple(scales))
        return parts


@dataclass(frozen=True, eq=False)
class Side:
    """One output of both sides, judged by the part of it that is worst against its own limit."""

    sides: Sides
    name: str
    got: Sequence[np.ndarray]  # of the candidate, one array per sample
    wanted: Sequence[np.ndarray]
    errors: OutputError
    limit: Limit  # of that part

    @cached_property
    def fp16(self) -> Side:
        """All-FP16 (``Sides.emulated``) in the candidate's place; its figures only."""
        return replace(self, errors=self.sides.fp16_errors)

    @cached_property
    def error(self) -> float:
        """The error of that part."""
        return figure_of(self.errors, self.name, self.limit, is_absolute=False)

    @cached_property
    def judged(self) -> float:
        """The figure that the limit is about."""
        return figure_of(self.errors, self.name, self.limit)

    @cached_property
    def worst_sample(self) -> tuple[float, int]:
        """The largest error of one sample in that part, and which it is; 0 where only means over samples are kept."""
        by, columns = {} if self.limit.is_absolute else self.errors.per_output[self.name], self.limit.columns
        parts = [by[key] for key in by if belongs_to(key, WORST_PART) and columns in (None, columns_of_part(key))]
        return max(((error, k) for each in parts for k, error in enumerate(each)), default=(0.0, 0))

    @cached_property
    def excess(self) -> float:
        """More than 1 is beyond the limit: the figure by its limit, or the worst sample's error by five times that."""
        (error, _), most = self.worst_sample, _MOST_OF_SAMPLE * self.limit.value
        if error > most and self.limit.is_default:  # what FP16 makes of one sample agrees, unless that one is broken
            most = max(most, min(HEADROOM * self.fp16.worst_sample[0], MOST_LIMIT))
        return max(self.judged / self.limit.value, error / most)

    @property
    def is_within(self) -> bool:
        """Whether it is within tolerance."""
        return self.excess <= 1

    @cached_property
    def stored_share(self) -> float | None:
        """Share of the values that are the reference's, rounded to FP16, of an output that is stored as FP16.

        None where it is not: FP16 does not hold every value of it, or holds half of the reference's.
        """
        got, wanted = (np.concatenate([np.ravel(array) for array in arrays]) for arrays in (self.got, self.wanted))
        if {got.dtype.kind, wanted.dtype.kind} != {"f"} or not got.size:
            return None
        with np.errstate(over="ignore"):
            halves = got.astype(np.float16), wanted.astype(np.float16)
        held, held_wanted = ((a == half) | ~np.isfinite(a) for a, half in zip((got, wanted), halves, strict=True))
        if not held.all() or held_wanted.sum() >= 0.5 * max(wanted.size, 1):
            return None
        return float(np.mean(got == halves[1])) if got.size == wanted.size else 0.0

    @property
    def where(self) -> OutputColumns:
        """The output, or the columns of it that are judged."""
        return OutputColumns(self.name, self.limit.columns)

    def finding(
        self, code: str, evidence: Mapping[str, int | float | str], where: Where | None = None, **names: Any
    ) -> Finding:
        """A finding about this output."""
        where = where or Where(outputs=(OutputColumns(self.name),))
        names |= {"error_shown": self.limit.sentence(self.judged), "judged_fp16": self.fp16.judged}
        return Finding.from_code(code, "compare", where, evidence, place=str(self.where), **names)

    @property
    def evidence(self) -> dict[str, int | float | str]:
        """Its figures for a finding."""
        largest = {"largest_difference": self.judged} if self.limit.is_absolute else {}
        return {"error": self.error, "emulated_fp16": self.fp16.error, "limit": self.limit.value, **largest}

    def rows(self, outputs: Outputs) -> np.ndarray:
        """Rows of this output of any run on the same samples; none where they have several shapes."""
        try:
            ordered = self.sides.ordered(outputs, self.sides.reference)
            return self.sides.layouts[self.name].rows(arrays_of(ordered, self.name))
        except ValueError:
            return np.zeros(0)

    def samples_of(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The samples that these rows belong to."""
        ends = self.sides.layouts[self.name].ends
        return tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in rows}))

    @cached_property
    def compared(self) -> Compared | None:
        """Both sides as rows; None where rows differ in shape."""
        layout = self.sides.layouts[self.name]
        alike = all(a.shape == b.shape and b.dtype.kind in "fiub" for a, b in zip(self.got, self.wanted, strict=True))
        if not layout.is_regular or not alike:
            return None
        return Compared.of_rows(layout.rows(self.got), layout.rows(self.wanted), self.rows(self.sides.emulated))

    @property
    def difference(self) -> Compared | None:
        """``compared``, where there is a difference to explain."""
        compared = self.compared
        is_set = self.is_within and self.sides.is_row_set(self.name)
        return None if compared is None or compared.distance <= compared.exact or is_set else compared

    @cached_property
    def rounding(self) -> Explanation | None:
        """The rounding whose pattern the difference has; None where it has none, or none is made out."""
        sides, runner, compared = self.sides, self.sides.runner, self.difference
        if compared is None or sides.is_other_model:
            return None
        exact = np.asarray(self.rows(runner.exact), np.float64)

        def changes(cause: Cause, run: Outputs | None) -> list[tuple[Cause, np.ndarray]]:
            rows = exact[:0] if run is None else np.asarray(self.rows(run), np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                return [(cause, (rows - exact) / compared.scale)] if rows.shape == exact.shape else []

        difference, ways = compared.got - compared.wanted, ROUNDINGS if sides.origin != "model" else ()
        tf32 = [each for way in ways for each in changes("tf32-candidate", runner.tf32(way))]
        tf32 += [("tf32-reference", -change) for _, change in tf32]
        plans = [plan for plan in dict.fromkeys((sides.plan, runner.throughout(Precision.FP16))) if plan.reduced_groups]
        half = [each for p in plans for each in changes("bf16" if p.bf16_groups else "fp16", runner.emulated(p))]
        cause = explain(difference, [*tf32, *half])
        if cause is None and sides.origin != "model":  # an engine may be BF16 throughout, which nothing says
            cause = explain(difference, [*tf32, *changes("bf16", runner.emulated(runner.throughout(Precision.BF16)))])
        return cause


def arrays_of(outputs: Outputs, name: str) -> list[np.ndarray]:
    """One output of all samples."""
    return [np.asarray(sample[name]) for sample in outputs]
