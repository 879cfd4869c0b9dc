"""Numbers in JSON: mptune's files stay standard JSON, in which NaN and infinity do not exist."""

from __future__ import annotations

import math

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_float(value: float) -> float | str:
    """A number as JSON can hold it: itself, or ``"nan"``, ``"inf"``, ``"-inf"``."""
    value = float(value)
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def decode_float(value: float | str) -> float:
    """Inverse of ``encode_float``."""
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r} is not a number; non-finite ones are written 'nan', 'inf' and '-inf'")
        return _NON_FINITE[value]
    return float(value)
