"""Plans of a front that could not be re-measured, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mptune.engines.base import Failure
from mptune.findings.wording import fill, listed
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.failures import describe

_NAMED = 3
"""So many plans are named in one warning."""


@dataclass(frozen=True)
class Unconfirmed:
    """A plan that could not be re-measured."""

    evaluation: Evaluation
    """As the search left it; with its held-out error where that is not finite."""
    failure: Failure | None
    """Why there are no outputs, and the plan stays as the search left it; None where its outputs are not finite on the
    held-out samples: then it is off the front, unless it is the baseline."""
    finite_rounds: int = 0
    """In so many processes the outputs were finite all the same."""

    @property
    def reason(self) -> str:
        """Why, a few words."""
        return describe(self.failure) if self.failure else f"its outputs are {self._not_finite}"

    @property
    def _not_finite(self) -> str:
        names = {"rounds": self.finite_rounds or None}
        return fill(
            "not finite on the held-out samples[, but finite in {rounds:/# other process/# other processes}]", names
        )

    @property
    def outcome(self) -> str:
        """What was seen of the plan, what is done with it, and what to do, without its name."""
        if self.failure is not None:
            again = "the figures are the search's, and the same command measures again"
            return f"failed when it was re-measured: {again}: {self.reason}"
        is_fp32 = self.evaluation.origin == ORIGIN_FP32
        cure = "give more calibration samples, so that the search sees such values"
        if self.finite_rounds:
            cure = "the same engine does not give the same again: run `mptune compare` with --repeat and --stress"
        elif is_fp32:
            cure = "the FP32 engine gives NaN or Inf where the reference has none; try another --engine"
        return f"{self._not_finite}, {'when re-measured' if is_fp32 else 'and dropped'}: {cure}"


def unconfirmed_warnings(plans: Iterable[Unconfirmed]) -> tuple[str, ...]:
    """One line for all plans of which the same was seen, each with what to do."""
    alike: dict[str, list[str]] = {}
    for plan in plans:
        alike.setdefault(plan.outcome, []).append(f"{plan.evaluation.plan.fingerprint} ({plan.evaluation.origin})")
    return tuple(
        f"plan{'s' * (len(names) > 1)} {listed(names, _NAMED, ' and {others} more')}: {outcome}"
        for outcome, names in alike.items()
    )
