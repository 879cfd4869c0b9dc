"""The choice of a plan: how it is asked for, and what it came to. run.json keeps the one record; all views read it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import pydantic

from mptune.settings import SearchSettings, Tolerance

ChoiceKind = Literal["limits", "default", "knee", "plan"]
"""How a plan was chosen: by limits that were given, by the metric's default limit, as the knee, by its id."""


class ChoiceLimits(pydantic.BaseModel):
    """Limits on the plan that is chosen, as they were given, or the wish for the knee in their place."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    max_error: float | None = None
    max_latency_ms: float | None = None
    max_memory_bytes: int | None = None
    limits: tuple[str, ...] = ()  # on the metrics' own values
    tolerance: tuple[str, ...] = ()
    knee: bool = False


class Choice(ChoiceLimits):
    """How a plan is chosen (a request, ``chosen`` is None) and, once it is, which one and why: the plan in ``chosen/``.

    Plans are named by their fingerprints.
    """

    ignore: tuple[str, ...] = ()  # outputs whose errors do not count
    plan: str | None = None  # the plan of this id, or of which it is the beginning; wins over limits
    search_limits: ChoiceLimits | None = None  # of the search that a pick came after: given again, they do not undo it
    chosen: str | None = None
    kind: ChoiceKind = "default"
    default_error: float | None = None  # the metric's default limit, where it held
    is_most_exact: bool = False  # the smallest error was chosen, within a limit on latency; else the fastest plan
    passed_over: str | None = None  # the fastest within the limits, where the chosen one is as fast and more exact
    is_tf32_better: bool = False  # all-FP32 was chosen: plans are faster, TF32 is faster and more exact than these
    replaced: str | None = None  # the plan that was chosen before, where a search replaced it
    unmet: ChoiceLimits | None = None  # the limits asked for last, if no plan meets them; an earlier choice stands then
    nearest: str | None = None  # the plan that comes nearest to these

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Choice:
        """The request of a search."""
        given = {name: getattr(settings, name) for name in (*ChoiceLimits.model_fields, "ignore")}
        return cls(**{**given, "tolerance": tuple(map(str, settings.tolerance))})

    @property
    def given_limits(self) -> ChoiceLimits:
        """The limits alone."""
        return ChoiceLimits(**{name: getattr(self, name) for name in ChoiceLimits.model_fields})

    @property
    def limit_values(self) -> dict[str, float]:
        """Limit -> its bound, the metric's default counted in: ``max_error``, a tolerance's output, a metric."""
        names = ("max_error", "max_latency_ms", "max_memory_bytes")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.default_error is not None:
            values["max_error"] = self.default_error
        for text in (*self.tolerance, *self.limits):
            where, _, bound = re.split(r"([<>]=?|=)(?=[^<>=]*$)", text)
            values[where.strip()] = float(bound.removeprefix("abs:"))
        return values

    def limit(self, settings: SearchSettings) -> SearchSettings:
        """The settings of a search with these limits where it is given none, and with what is ignored."""
        limits = {**self.given_limits.model_dump(), "tolerance": tuple(map(Tolerance.parse, self.tolerance))}
        is_limited = Choice.from_settings(settings).given_limits != ChoiceLimits()
        return replace(settings, **({} if is_limited else limits), ignore=self.ignore)

    def again(self) -> Choice:
        """The request to choose in the same way again."""
        asked = (*ChoiceLimits.model_fields, "ignore", "plan", "search_limits")
        return Choice(**{name: getattr(self, name) for name in asked}, replaced=self.chosen)

    def asked_again(self, given: Choice) -> Choice:
        """What the request of a further search comes to: a choice stands until limits are given that differ."""
        if self.chosen is None:
            return given
        standing = (ChoiceLimits(), self.given_limits, self.search_limits)
        asked = self.again() if given.given_limits in standing else given
        return asked.model_copy(update={"ignore": given.ignore or self.ignore, "replaced": self.chosen})
