"""Plans of a front that could not be re-measured, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mptune.engines.base import Failure
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.failures import describe

_NAMED = 3
"""So many plans are named in one warning."""


@dataclass(frozen=True)
class Unconfirmed:
    """A plan that could not be re-measured.

    Attributes:
        evaluation: of the plan, as the search left it; with its held-out error where that is not finite.
        failure: why there are no outputs, and the plan stays as the search left it; None where its outputs are not
            finite on the held-out samples: then it is off the front, unless it is the baseline.
        finite_rounds: in so many processes the outputs were finite all the same.
    """

    evaluation: Evaluation
    failure: Failure | None
    finite_rounds: int = 0

    @property
    def reason(self) -> str:
        """Why, a few words."""
        if self.failure is None:
            return f"its outputs are {self._not_finite}"
        return describe(self.failure)

    @property
    def _not_finite(self) -> str:
        times = f", but finite in {self.finite_rounds} other process{'es' * (self.finite_rounds > 1)}"
        return f"not finite on the held-out samples{times if self.finite_rounds else ''}"

    @property
    def outcome(self) -> str:
        """What was seen of the plan and is done with it, without its name."""
        if self.failure is not None:
            return "failed when it was re-measured: the figures are the search's, and the same command measures again"
        if self.evaluation.origin == ORIGIN_FP32:
            return f"{self._not_finite}, when re-measured"
        return f"{self._not_finite}, and dropped"

    @property
    def cure(self) -> str:
        """What to do, or the failure."""
        if self.failure is not None:
            return self.reason
        if self.finite_rounds:
            return "the same engine does not give the same again: run `mptune compare` with --repeat and --stress"
        if self.evaluation.origin == ORIGIN_FP32:
            return "the FP32 engine gives NaN or Inf where the reference has none; try another --engine"
        return "give more calibration samples, so that the search sees such values"


def unconfirmed_warnings(plans: Iterable[Unconfirmed]) -> tuple[str, ...]:
    """One line for all plans of which the same was seen, each with what to do."""
    alike: dict[tuple[str, str], list[str]] = {}
    for plan in plans:
        name = f"{plan.evaluation.plan.fingerprint} ({plan.evaluation.origin})"
        alike.setdefault((plan.outcome, plan.cure), []).append(name)
    return tuple(
        f"plan{'s' * (len(names) > 1)} {', '.join(names[:_NAMED])}"
        f"{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}: {outcome}: {cure}"
        for (outcome, cure), names in alike.items()
    )
