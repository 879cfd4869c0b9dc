"""The choice of a plan: how it is made, and what it came to. run.json keeps the one record; all views read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pydantic

from mptune.settings import SearchSettings, Tolerance

ChoiceKind = Literal["knee", "fastest", "middle", "limits", "plan"]
"""How a plan was chosen: the knee of the front; where it has no knee its fastest plan, or for random inputs the one
nearest to both ends; by limits; by its id."""


class ChoiceLimits(pydantic.BaseModel):
    """Limits on the plan that is chosen, as they were given.

    ``limits`` are on the metrics' own values (``mptune.tuning.fronts.limits``).
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    max_error: float | None = None
    max_latency_ms: float | None = None
    max_memory_bytes: int | None = None
    limits: tuple[str, ...] = ()
    tolerance: tuple[str, ...] = ()


class Choice(ChoiceLimits):
    """How a plan is chosen (a request, ``chosen`` is None) and, once it is, which one and why: the plan in ``chosen/``.

    Attributes:
        ignore: outputs whose errors do not count.
        knee: the knee of the plans within the limits, where these would give the fastest.
        plan: the plan of this id, or of which it is the beginning; wins over limits.
        search_limits: those of the search that a pick came after: given again, they do not undo it.
        chosen: fingerprint of the plan in ``chosen/``.
        kind: how it was chosen.
        reason: why it, one line.
        unmet: which limits no plan meets, with the nearest plan, one line; empty where they are met.
        nearest: fingerprint of that plan.
        replaced: fingerprint of the plan that was chosen before, where a search replaced it.
    """

    ignore: tuple[str, ...] = ()
    knee: bool = False
    plan: str | None = None
    search_limits: ChoiceLimits | None = None
    chosen: str | None = None
    kind: ChoiceKind = "knee"
    reason: str = ""
    unmet: str = ""
    nearest: str | None = None
    replaced: str | None = None

    @classmethod
    def of(cls, settings: SearchSettings) -> Choice:
        """The request of a search."""
        given = {name: getattr(settings, name) for name in (*ChoiceLimits.model_fields, "ignore")}
        return cls(**{**given, "tolerance": tuple(map(str, settings.tolerance))})

    @property
    def given_limits(self) -> ChoiceLimits:
        """The limits alone."""
        return ChoiceLimits(**{name: getattr(self, name) for name in ChoiceLimits.model_fields})

    @property
    def has_limits(self) -> bool:
        """Whether limits are asked for."""
        return self.given_limits != ChoiceLimits()

    def limit(self, settings: SearchSettings) -> SearchSettings:
        """The settings of a search with these limits where it is given none, and with what is ignored."""
        limits = {} if Choice.of(settings).has_limits else self.given_limits.model_dump()
        if limits:
            limits["tolerance"] = tuple(map(Tolerance.parse, self.tolerance))
        return replace(settings, **limits, ignore=self.ignore)

    @property
    def text(self) -> str:
        """Why this plan, and which it replaced."""
        return self.reason + (f"; it replaces {self.replaced}, which was chosen before" if self.replaced else "")

    def again(self) -> Choice:
        """The request to choose in the same way again."""
        outcome = {name: Choice.model_fields[name].default for name in ("kind", "reason", "unmet", "nearest")}
        return self.model_copy(update={**outcome, "chosen": None, "replaced": self.chosen})

    def asked_again(self, given: Choice) -> Choice:
        """What the request of a further search comes to: a choice stands until limits are given that differ."""
        if self.chosen is None:
            return given
        standing = (ChoiceLimits(), self.given_limits, self.search_limits)
        asked = self.again() if given.given_limits in standing else given
        return asked.model_copy(update={"ignore": given.ignore or self.ignore, "replaced": self.chosen})
