"""The error that the sampler minimises: one number for a plan, or for a group alone.

Without tolerances it is the metric's own. With them, what a tolerance is about is stated as a share of its limit: at
the limit it is ``REFERENCE_ERROR``, past which the sampler takes plans for worthless. What no tolerance is about stays
as it is, and the largest decides. All other limits filter and choose, and steer nothing.
"""

from __future__ import annotations

import math

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES, belongs_to
from mptune.settings import SearchSettings
from mptune.tuning.fronts.hypervolume import REFERENCE_ERROR
from mptune.tuning.fronts.limits import is_covered, largest_error


def part_errors(error: OutputError, law: str, settings: SearchSettings) -> dict[str, float]:
    """The error of each part of the outputs as the search weighs it, outputs that are ignored left out.

    ``law`` is the statistic that adds in squares (``law_metric``); where it sees all outputs at once it is one part.
    """
    counted, judged = error.without(settings.ignore), []
    parts = counted.by_part(law)
    errors = {} if parts else {law: counted.value(law)}
    for tolerance in settings.tolerance:
        unit = REFERENCE_ERROR if law in ADD_IN_SQUARES else max(other.limit for other in settings.tolerance)
        covered = {} if tolerance.is_absolute else {p: e for p, e in parts.items() if is_covered(p, [tolerance])}
        values = {f"{tolerance} {part}": value for part, value in covered.items()}
        if not values and not math.isnan(value := largest_error(counted, tolerance, law)):
            values = {str(tolerance): value}
        errors.update({name: value * unit / tolerance.limit for name, value in values.items()})
        judged += [tolerance] * bool(values)
    return errors | {str(part): value for part, value in parts.items() if not is_covered(part, judged)}


def searched_error(error: OutputError, law: str, settings: SearchSettings) -> float:
    """The number that the sampler minimises; ``inf`` where an output that counts is not finite."""
    errors = part_errors(error, law, settings).values()
    is_finite = error.without(settings.ignore).non_finite == 0 and all(map(math.isfinite, errors))
    return max(errors) if is_finite else math.inf


def searched_as(law: str, settings: SearchSettings) -> str:
    """Names the number, so that a search with other tolerances does not take its emulated errors for its own."""
    return "; ".join((law, *sorted(map(str, settings.tolerance)), *(f"without {o}" for o in sorted(settings.ignore))))


def stored(error: OutputError, law: str, settings: SearchSettings) -> OutputError:
    """What is stored of an emulated error: all that the number is made of, whatever the limits are."""
    wanted = {
        output: {s: v for s, v in by.items() if s in ("non_finite", "max_abs") or belongs_to(s, law)}
        for output, by in error.per_output.items()
    }
    limited = {tolerance.output for tolerance in settings.tolerance if tolerance.columns is not None}
    return OutputError(wanted, {output: errors for output, errors in error.columns.items() if output in limited})


def suffices(error: OutputError, law: str, settings: SearchSettings) -> bool:
    """Whether what was ``stored``, perhaps under other tolerances, has what these need."""
    return error.non_finite > 0 or not any(math.isnan(largest_error(error, t, law)) for t in settings.tolerance)
