"""A confirmation on the page: what the search reported and what the device measured, plan by plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mptune.data.numbers import encode_float
from mptune.reporting.confirmation_text import place_of, searched_baseline, verdicts
from mptune.reporting.text import error_cell, latency_text, speedup_of

if TYPE_CHECKING:
    from mptune.tuning.evaluation import Evaluation
    from mptune.tuning.runs.confirmation import Confirmation


def confirmation_document(confirmation: Confirmation) -> dict[str, Any]:
    """Both figures of every plan and what became of it; and whether the rankings held."""
    searched, before = confirmation.searched, searched_baseline(confirmation)
    return {
        "device": confirmation.front.device,
        "searched_on": searched.device,
        "latency_was": "predicted" if searched.latency_source == "predicted" else "measured earlier",
        "error_was": "emulated" if searched.error_source == "emulated" else "measured earlier",
        "verdicts": list(verdicts(confirmation)),
        "plans": [
            {
                "plan": plan.searched.plan.fingerprint,
                "origin": plan.searched.origin.label,
                "place": place_of(confirmation, plan),
                "searched": _figures(plan.searched, before),
                "measured": None if plan.measured is None else _figures(plan.measured, confirmation.front.fp32),
                "failure": plan.failure,
            }
            for plan in confirmation.plans
        ],
    }


def _figures(evaluation: Evaluation, fp32: Evaluation | None) -> dict[str, Any]:
    return {
        "ms": encode_float(evaluation.latency.median_ms),
        "ms_text": latency_text(evaluation),
        "speedup": encode_float(evaluation.speedup),
        "speedup_text": speedup_of(evaluation, fp32),
        "error": encode_float(evaluation.judged_error),
        "error_text": error_cell(evaluation),
    }
