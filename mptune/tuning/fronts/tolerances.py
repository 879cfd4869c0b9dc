"""Which plans are feasible under tolerances: limits on the error of one output, or of some columns of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence

from mptune.data.metrics.accuracy import ALL_OUTPUTS, METRICS, OutputError
from mptune.data.metrics.paired import is_larger_beyond_noise
from mptune.data.metrics.parts import ADD_IN_SQUARES, part_statistic
from mptune.errors import SettingsError
from mptune.finding import OutputColumns
from mptune.settings import Tolerance
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.hypervolume import REFERENCE_ERROR


def excess(evaluation: Evaluation, tolerance: Tolerance) -> float:
    """The error that a tolerance is about over its limit, on the search samples and the held-out ones: at most 1 holds.

    Where it cannot be known, because a run of an older version kept no errors by column, it is infinite.
    """
    errors = [evaluation.error] if evaluation.held_out is None else [evaluation.error, evaluation.held_out]
    values = [largest_error(error, tolerance, evaluation.metric) for error in errors]
    return math.inf if any(math.isnan(v) for v in values) else max(values) / tolerance.limit


def is_feasible(evaluation: Evaluation, tolerances: Sequence[Tolerance]) -> bool:
    """Whether all tolerances hold."""
    return all(excess(evaluation, one) <= 1.0 for one in tolerances)


def feasible(evaluations: Sequence[Evaluation], tolerances: Sequence[Tolerance]) -> tuple[Evaluation, ...]:
    """The evaluations within all tolerances; all of them where none is."""
    found = tuple(e for e in evaluations if is_feasible(e, tolerances)) if tolerances else ()
    return found or tuple(evaluations)


def rest_error(evaluation: Evaluation, tolerances: Sequence[Tolerance]) -> float:
    """The error of what no tolerance is about, the larger of search and held-out samples: ``--max-error`` limits it."""

    def rest(error: OutputError) -> float:
        by_part = error.by_part(evaluation.metric) if tolerances else {}
        if not by_part:
            return error.value(evaluation.metric)
        return max((value for part, value in by_part.items() if not is_covered(part, tolerances)), default=0.0)

    errors = filter(None, (evaluation.counted, evaluation.counted_held_out))
    return max(map(rest, errors), key=lambda value: (math.isnan(value), value))


def is_larger_in_search(evaluation: Evaluation) -> bool:
    """Whether the error of the search samples is larger than the held-out one beyond their intervals."""
    held_out = evaluation.counted_held_out
    return held_out is not None and is_larger_beyond_noise(evaluation.counted, held_out, evaluation.metric)


def is_wanted(evaluation: Evaluation, tolerances: Sequence[Tolerance]) -> bool:
    """Whether what no tolerance is about stays within an error past which nobody wants a plan unasked."""
    return evaluation.metric not in ADD_IN_SQUARES or rest_error(evaluation, tolerances) <= REFERENCE_ERROR


def is_covered(part: OutputColumns, tolerances: Sequence[Tolerance]) -> bool:
    """Whether tolerances are about all of an output, or of a part of it."""
    mine = [one for one in tolerances if one.output == part.name]
    if any(one.columns is None for one in mine):
        return True
    limited = {column for one in mine for column in one.columns or ()}
    return part.columns is not None and limited.issuperset(part.columns)


def largest_error(error: OutputError, tolerance: Tolerance, metric: str) -> float:
    """The largest error of what a tolerance is about; NaN where it was not taken."""
    statistics = error.per_output.get(tolerance.output, {})
    if tolerance.columns is None:
        if tolerance.is_absolute:
            return max(statistics.get("max_abs", (math.nan,)))
        one = OutputError({tolerance.output: statistics})
        return one.value(metric) if one.has(metric) else math.nan
    kept = error.columns.get(tolerance.output)
    statistic = "max_abs" if tolerance.is_absolute else metric
    values = []
    for column in tolerance.columns:
        of_part = statistics.get(part_statistic(range(column, column + 1)))
        if of_part is not None and statistic == "worst_part":
            values.append(sum(of_part) / len(of_part))
        else:
            every = getattr(kept, statistic, ())
            values.append(every[column] if column < len(every) else math.nan)
    return math.nan if any(map(math.isnan, values)) else max(values)


def check_tolerances(
    tolerances: Sequence[Tolerance],
    ignored: Collection[str],
    metric: str,
    outputs: Collection[str],
    error: OutputError | None = None,
) -> None:
    """Check that tolerances, and outputs that are ignored, mean something for a model.

    Args:
        tolerances: as given.
        ignored: names of outputs, as given.
        metric: of the search.
        outputs: names of the model's outputs.
        error: of any plan, whose columns are known; None checks the names alone.

    Raises:
        SettingsError: an output that is not there, a column out of range, or what cannot be known of a metric.
    """
    for option, name in [("--tolerance", one.output) for one in tolerances] + [("--ignore", one) for one in ignored]:
        if name not in outputs:
            close = difflib.get_close_matches(name, outputs, 1)
            every = ", ".join(list(outputs)[:8])
            raise SettingsError(
                f"{option}: the model has no output {name!r}",
                f"did you mean {close[0]!r}?" if close else f"its outputs are {every}",
            )
    both = next((one.output for one in tolerances if one.output in ignored), None)
    if both is not None:
        raise SettingsError(f"--tolerance and --ignore both name output {both!r}", "give one of them")
    if outputs and set(ignored) >= set(outputs):
        raise SettingsError("--ignore names every output: nothing is left to compare", "leave one output")
    for one in tolerances:
        _check_unit(one, metric)
    if error is not None:
        check_columns(tolerances, error)


def _check_unit(tolerance: Tolerance, metric: str) -> None:
    if tolerance.is_absolute:
        return
    by_column = (*ADD_IN_SQUARES, "max_abs")
    if metric not in METRICS or METRICS[metric].is_task:
        raise SettingsError(
            f"--tolerance {tolerance}: {metric} sees all outputs at once, so no output has an error of its own",
            "write abs:X, the largest absolute error",
        )
    if tolerance.columns is not None and metric not in by_column:
        raise SettingsError(
            f"--tolerance {tolerance}: {metric} is not kept column by column",
            f"write abs:X, the largest absolute error, or search with --metric {' or '.join(by_column)}",
        )


def check_columns(tolerances: Sequence[Tolerance], error: OutputError) -> None:
    """Check that the outputs have the columns that tolerances name.

    Args:
        tolerances: as given.
        error: of any plan.

    Raises:
        SettingsError: a column out of range, or the errors of single columns are not known.
    """
    for one in tolerances:
        if one.columns is not None:
            _check_columns_of(one, error)


def _check_columns_of(tolerance: Tolerance, error: OutputError) -> None:
    kept, name = error.columns.get(tolerance.output), tolerance.output
    if kept is None:
        raise SettingsError(
            f"--tolerance {tolerance}: errors of single columns of output {name!r} are not known",
            f"limit the whole output: --tolerance {name}=X; a run of an older mptune needs a new search for columns",
        )
    count, last = len(kept.max_abs), max(tolerance.columns or (0,))
    if last >= count:
        raise SettingsError(
            f"--tolerance {tolerance}: output {name!r} has no column {last}",
            f"its columns are 0 to {count - 1}" if count > 1 else f"it has one column: --tolerance {name}=X limits it",
        )


def known_outputs(error: OutputError) -> tuple[str, ...]:
    """The model's outputs, as an evaluation names them."""
    return tuple(name for name in error.per_output if name != ALL_OUTPUTS)
