"""What ``chosen/model.onnx`` says of itself in ``metadata_props``, as Netron and ONNX Runtime show it."""

from __future__ import annotations

import json

from mptune._version import __version__
from mptune.json_form import encode_float
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front


def provenance(front: Front, evaluation: Evaluation) -> dict[str, str]:
    """Where a plan's model comes from and what is known of it; keys without the prefix ``mptune.``.

    ``precision`` is JSON: layer group -> precision. The same plan with the same figures gives the same text.
    """
    latency = evaluation.latency
    facts = {
        "version": __version__,
        "source_sha256": front.model_sha256,
        "plan": evaluation.plan.fingerprint,
        "origin": str(evaluation.origin),
        "target": front.target,
        "engine": front.engine,
        "device": front.device,
        "metric": front.metric,
        "error": _number(evaluation.error_value),
        "error_source": evaluation.error_source,
        "held_out_error": "" if evaluation.held_out_value is None else _number(evaluation.held_out_value),
        "latency_ms": _number(latency.median_ms),
        "latency_source": latency.source,
        "speedup": _number(evaluation.speedup),
        "remeasured": "yes" if evaluation.remeasured else "no",
        "confirmed": "yes" if evaluation.confirmed else "no",
        "precision": json.dumps(
            {group: str(precision) for group, precision in evaluation.plan.precision.items()}, separators=(",", ":")
        ),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _number(value: float) -> str:
    return str(encode_float(float(f"{value:.6g}")))
