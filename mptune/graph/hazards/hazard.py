"""What a hazard is: a place where FP16 cannot hold a value, or where a runtime is known to go wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FP16_MAX = 65504.0
"""Largest finite FP16 value, (2 - 2**-10) * 2**15 (IEEE 754-2008, binary16)."""
FP16_TINY = 2.0**-24
"""Smallest FP16 value above zero (subnormal); half of it rounds to zero."""
FP16_NORMAL = 2.0**-14
"""Smallest normal FP16 value: below it, values lose digits."""

Severity = Literal["info", "warning", "error"]
"""error: FP16 cannot be right here, the group is pinned to FP32. warning: it may be. info: good to know."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Hazard:
    """One place where FP16 cannot hold a value, or where a runtime is known to go wrong.

    Attributes:
        severity: what it means for the search.
        kind: ``overflow``, ``vanishing`` or ``epsilon`` of constants; ``range`` or ``underflow`` of values seen on
            data; ``norm`` written out; ``broadcast``; ``int64``; ``input`` that looks random.
        group: id of the layer group that would be FP16 there; None where no group is.
        node: the node that reads or computes the value.
        tensor: the value.
        value: its magnitude, or what the reason says.
        reason: why it is one.
        cure: what to do about it.
    """

    severity: Severity
    kind: str
    group: str | None
    node: str | None
    tensor: str
    value: float
    reason: str
    cure: str

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)
