"""Explanation: why groups stay FP32 in each plan of a front, and what every group costs and gains; with its JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mptune.json_form import JsonForm, encode

Reason = Literal["finding", "no-kernel", "error", "casts", "not-tried"]
"""Why a group is FP32: a finding pins it; the engine has no kernel; its error; FP16 saves nothing beyond its Casts; or
none of these, as where the search space pins it."""


@dataclass(frozen=True)
class GroupWorth(JsonForm):
    """What one group costs and gains in FP16, whatever the plan; what is not known is None.

    Attributes:
        one_group_error: the objective error with this group alone in FP16; ``inf`` where that is not finite.
        gain_ms: what it takes less in FP16, its Casts not counted.
        casts_ms: what the Casts around it cost while all its neighbours are FP32.
        fp16_points: in how many points of the front it is FP16 or BF16.
        pinned: why its precision is not searched; None where it is.
        finding: code of the finding that pins it, or else of the first one about its values.
    """

    group: str
    name: str
    kind: str
    one_group_error: float | None = None
    gain_ms: float | None = None
    casts_ms: float | None = None
    fp16_points: int = 0
    pinned: str | None = None
    finding: str | None = None


@dataclass(frozen=True)
class Kept:
    """A group that a plan keeps in FP32, why, and what FP16 there would save this plan, the Casts counted in."""

    worth: GroupWorth
    reason: Reason
    saves_ms: float | None = None

    @property
    def finding(self) -> str | None:
        """The code of the finding that pins it, or that is about its values where its error is the reason."""
        return None if self.reason in ("casts", "not-tried") else self.worth.finding

    @property
    def word(self) -> str:
        """Why it is FP32, in a word: the code of its finding, else the reason."""
        return self.finding or self.reason

    @property
    def because(self) -> str:
        """Why it is FP32 with the figures, one line, as every view says it."""
        error, figures = self.worth.one_group_error, [self.worth.pinned] if self.worth.pinned else []
        if error is not None:
            figures.append(f"{error:.1e} alone" if math.isfinite(error) else "NaN or Inf alone")
        if self.saves_ms is not None:
            figures.append(f"would {'save' if self.saves_ms >= 0 else 'cost'} {abs(self.saves_ms):.2g} ms")
        return f"{self.word}: {', '.join(figures)}" if figures else self.word

    def to_json(self) -> dict[str, Any]:
        """As front.json lists it, without figures."""
        return {"group": self.worth.group, "reason": self.reason, "finding": self.finding}


@dataclass(frozen=True)
class Explanation:
    """Why the plans of a front are what they are. Empty where the run holds nothing to explain them with.

    Attributes:
        kept: plan fingerprint -> its FP32 groups, the largest one-group error first, those without one last.
        groups: all layer groups, by error per millisecond gained; those that gain nothing, and pinned ones, last.
        gains_from: where the gains come from, such as ``the roofline and 48 builds``; None where they are not known.
    """

    kept: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    groups: tuple[GroupWorth, ...] = ()
    gains_from: str | None = None

    def of(self, fingerprint: str) -> tuple[Kept, ...]:
        """The FP32 groups of a plan; empty where nothing is known of it."""
        return self.kept.get(fingerprint, ())

    def to_json(self, metric: str) -> dict[str, Any]:
        """What ``mptune report RUN --explain --json`` prints; the metric is what the errors are."""
        plans = {
            plan: [{**k.to_json(), "one_group_error": k.worth.one_group_error, "saves_ms": k.saves_ms} for k in kept]
            for plan, kept in self.kept.items()
        }
        document = {"format": 1, "metric": metric, "gains_from": self.gains_from, "groups": self.groups, "plans": plans}
        encoded: dict[str, Any] = encode(document)
        return encoded


def reason_counts(kept: Iterable[Kept], most: int | None = None) -> str:
    """FP32 groups by finding or reason, such as ``2 overflow, 12 error, 1 more``; at most ``most`` words are listed."""
    counts = list(Counter(group.word for group in kept).items())
    parts = [f"{count} {word}" for word, count in counts[:most]]
    rest = 0 if most is None else sum(count for _, count in counts[most:])
    return ", ".join([*parts, f"{rest} more"] if rest else parts)
