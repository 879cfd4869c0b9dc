"""JSON Schema of front.json and plan.json, as docs/reference has them; tests hold both against the files of runs."""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

import pydantic

from mptune.choice import ChoiceKind
from mptune.engines.base import ErrorSource
from mptune.engines.latency import LatencySource
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.plan import PLAN_FORMAT, PRECISIONS
from mptune.tuning.explanation import Reason
from mptune.tuning.front import FRONT_FORMAT

NUMBER: Any = float | Literal["nan", "inf", "-inf"]
MAYBE, TEXT = (NUMBER, None), (str, None)  # null where unknown


def _schema(kind: Any) -> dict[str, Any]:
    """Of a type; of types by key, an object with each key; of one in a list; of a choice; of a name in ``$defs``."""
    if isinstance(kind, dict):
        return {"type": "object", "properties": {k: _schema(v) for k, v in kind.items()}, "required": [*kind]}
    if isinstance(kind, list):
        return {"type": "array", "items": _schema(*kind)}
    if isinstance(kind, tuple):
        return {"anyOf": [*map(_schema, kind)]}
    return {"$ref": f"#/$defs/{kind}"} if isinstance(kind, str) else pydantic.TypeAdapter(kind).json_schema()


def plan_schema() -> dict[str, Any]:
    """Of plan.json."""
    precisions = {"type": "object", "additionalProperties": {"enum": [*map(str, PRECISIONS)]}}
    schema = _schema({"format": Literal[PLAN_FORMAT], "model_sha256": str, "precision": "by_name", "nodes": "by_name"})
    schema["properties"] |= {"opset": _schema(int), "io": _schema(Literal["fp16"])}  # where they were asked for
    return {**schema, "$defs": {"by_name": precisions}}


def front_schema() -> dict[str, Any]:
    """Of front.json, also that of a search that was stopped, without a choice."""
    latency = dict.fromkeys(("median_ms", "p90_ms", "p99_ms", "cv"), NUMBER)
    error: Any = {"value": NUMBER, "metric": str, "source": ErrorSource, "per_output": dict[str, dict[str, NUMBER]]}
    error |= {"emulated": MAYBE, "held_out": MAYBE, "ci95": ([NUMBER], None)}
    point: Any = {"latency": {**latency, "ci95_ms": [NUMBER], "source": LatencySource}, "plan": str, "origin": str}
    point |= {"error": {**error, "part": ({"output": str, "columns": ([int], None)}, None)}, "engine": TEXT}
    point |= {"metrics": dict[str, dict[Literal["search", "held_out"], NUMBER | None]], "held_out_value": MAYBE}
    point |= dict.fromkeys(("error_value", "judged_error", "speedup"), NUMBER) | {"remeasured": bool, "confirmed": bool}
    point |= dict.fromkeys(("fp16_groups", "bf16_groups", "fp32_groups"), int)
    point |= dict.fromkeys(("engine_bytes", "context_bytes", "weight_bytes"), (int, None))
    point |= {"memory_source": (LatencySource, None), "fp32": [{"group": str, "reason": Reason, "finding": TEXT}]}
    beside = {"plan": str, "latency_ms_delta": NUMBER, "error_ratio": NUMBER}
    choice = {"reason": ChoiceKind, "limits": dict[str, NUMBER], "limits_met": bool, "neighbours": [beside]}
    where = {**get_type_hints(Where), "outputs": [get_type_hints(OutputColumns)]}
    front: Any = {"format": Literal[FRONT_FORMAT], "model": {"path": str, "sha256": str}, "metric": str}
    front |= {"target": {"name": str, "engine": str, "device": TEXT}, "points": ["point"], "chosen": TEXT}
    front |= {"baseline": dict.fromkeys(("fp32", "fp16", "tf32"), ("point", None)), "chosen_point": ("point", None)}
    front |= {"choice": ({**choice, "nearest": TEXT, "replaced": TEXT}, None), "hypervolume": MAYBE}
    front |= {"findings": [{**get_type_hints(Finding), "where": where}], "warnings": [str]}
    return {**_schema(front | {"evaluations": int, "failures": int}), "$defs": {"point": _schema(point)}}
