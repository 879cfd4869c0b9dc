"""Whether two final measurements of one network rank its plans alike, wherever they call two plans different."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from mptune.json_form import decode_float

Row = dict[str, Any]

CONFIRMED = ", mptune confirm"
"""Follows the name of a network in the file of agreements, where two confirmations by the tool were compared."""


def agreement(one: Mapping[str, Any], other: Mapping[str, Any]) -> Row:
    """Compare two documents of ``benchmarks.peers.final``, of the plans that both measured.

    Latencies are compared relative to the baseline of their own document. Two plans are called different where their
    95 % intervals do not overlap.

    Returns:
        ``plans`` that both measured, ``pairs`` of them, ``different`` pairs (called so by one of the documents),
        ``both`` (called so by both), ``reversed`` (called different by one, in another order in the other),
        ``contradicted`` (called different by both, in another order), ``shift`` (median of the ratios of the latencies
        of all plans, less one) and ``deviation`` (root of their mean square about it), both relative.
    """
    figures = [{key: _relative(document, key) for key in document["measured"]} for document in (one, other)]
    plans = [key for key in figures[0] if key in figures[1]]
    pairs = list(combinations(plans, 2))
    orders = [(_order(figures[0], *pair), _order(figures[1], *pair)) for pair in pairs]
    signs = [[_sign(f[a][0] - f[b][0]) for f in figures] for a, b in pairs]
    ratios = sorted(math.log(figures[1][key][0] / figures[0][key][0]) for key in plans)
    shift = ratios[len(ratios) // 2] if ratios else 0.0
    spread = math.sqrt(sum((ratio - shift) ** 2 for ratio in ratios) / len(ratios)) if ratios else 0.0
    return {
        "plans": len(plans),
        "pairs": len(pairs),
        "different": sum(a != 0 or b != 0 for a, b in orders),
        "both": sum(a != 0 and b != 0 for a, b in orders),
        "reversed": sum(
            (a != 0 or b != 0) and first * second < 0
            for (a, b), (first, second) in zip(orders, signs, strict=True)
        ),
        "contradicted": sum(a * b < 0 for a, b in orders),
        "shift": float(f"{shift:.3g}"),
        "deviation": float(f"{spread:.3g}"),
    }  # fmt: skip


def agreements(first: Path, second: Path, models: Sequence[str]) -> dict[str, Row]:
    """The same of every network that both folders have a final measurement of, by name."""
    found = {}
    for model in models:
        paths = [folder / f"h200_peers_{model}.json" for folder in (first, second)]
        if all(path.exists() for path in paths):
            found[model] = agreement(*(json.loads(path.read_text()) for path in paths))
    return found


def of_confirmed_front(front: Mapping[str, Any]) -> Row:
    """A front.json of ``mptune confirm`` as a document that ``agreement`` compares: plans with the tool's intervals."""
    measured = {plan["plan"]: plan["measured"]["latency"] for plan in front["plans"] if plan["measured"] is not None}
    return {
        "baseline_ms": front["baseline"]["fp32"]["latency"]["median_ms"],
        "measured": {
            plan: {"latency_ms": latency["median_ms"], "ci95_ms": latency["ci95_ms"]}
            for plan, latency in measured.items()
        },
    }


def _relative(document: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """Latency and the ends of its interval, as multiples of the baseline's."""
    one, base = document["measured"][key], document["baseline_ms"]
    low, high = one["ci95_ms"]
    return decode_float(one["latency_ms"]) / base, decode_float(low) / base, decode_float(high) / base


def _order(figures: Mapping[str, tuple[float, float, float]], a: str, b: str) -> int:
    """-1 where a is faster beyond both intervals, 1 where b is, else 0."""
    (_, a_low, a_high), (_, b_low, b_high) = figures[a], figures[b]
    return -1 if a_high < b_low else 1 if b_high < a_low else 0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
