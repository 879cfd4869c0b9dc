"""Whether what a study holds can be read: a record that was damaged, or made up, is refused before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.engines.timing.latency import Latency
from mptune.engines.timing.spread import SessionTiming
from mptune.errors import PlanError
from mptune.files import READ_ERRORS, parse_json
from mptune.graph.plan import Precision
from mptune.json_form import decode_float
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.attributes import ATTEMPTS, EVALUATION, FAILED_BEFORE, FAILURE, FAULT, FAULTS, OWNER
from mptune.tuning.sampler.trials import (
    CONSTRAINT_ATTR,
    EHVI_ATTR,
    EMULATED_ATTR,
    FAILURE_ATTR,
    JSON_MARK,
    LAW_ATTR,
    PLAN_ATTR,
    TIMING_ATTR,
)

_COMPLETE = TrialState.COMPLETE

DAMAGE = (*READ_ERRORS, AssertionError, RecursionError, PlanError)
"""What making something of a damaged record can raise."""


def read_evaluation(document: Any) -> Evaluation:
    """An evaluation, with the figures that every reader asks for computed."""
    evaluation = Evaluation.from_json(document)
    counts = {len(values) for by in evaluation.error.per_output.values() for values in by.values()}
    if not counts or 0 in counts:
        raise ValueError("a statistic without samples")
    evaluation.to_point()
    return evaluation


def is_readable_note(key: str, value: Any) -> bool:
    """Whether a study's note is what mptune writes under that key."""
    name = key.removeprefix(JSON_MARK)
    return _can_read(next((read for prefix, read in _NOTES.items() if name.startswith(prefix)), None), value)


def is_readable_attribute(key: str, value: Any) -> bool:
    """Whether a trial's attribute is what mptune writes under that key."""
    return _can_read(_numbers if key.startswith(EMULATED_ATTR) else _ATTRIBUTES.get(key), value)


def _can_read(read: Callable[[Any], object] | None, value: Any) -> bool:
    try:
        if read is not None:
            read(value)
    except DAMAGE:
        return False
    return True


def is_readable_trial(trial: FrozenTrial) -> bool:
    """Whether parameters, values and attributes of a trial are what mptune writes; its evaluation is left out."""
    attrs = {key: value for key, value in trial.user_attrs.items() if key != EVALUATION}
    return (
        all(is_readable_attribute(key, value) for key, value in attrs.items())
        and _can_read(_precisions, trial.system_attrs.get("fixed_params", {}))
        and _can_read(_precisions, trial.params)
        and all(isinstance(each, CategoricalDistribution) for each in trial.distributions.values())
        and are_objectives(trial.values, trial.state)
    )


def is_readable_operation(record: Mapping[str, Any]) -> bool:
    """Whether an operation in a journal sets what ``is_readable_trial`` accepts, or a note that can be read."""
    sets, system = (record.get(name, record.get(f"{name}s", {})) for name in ("user_attr", "system_attr"))
    given = record.get("distributions", {"": record["distribution"]} if "distribution" in record else {})
    if not all(isinstance(entry, dict) for entry in (sets, system, given)):
        return False
    check = is_readable_note if "trial_id" not in record and "user_attr" in record else is_readable_attribute
    return (
        all(check(key, value) for key, value in sets.items())
        and _can_read(_precisions, system.get("fixed_params", {}))
        and isinstance(record.get("param_name", ""), str)
        and all(_can_read(_distribution, text) for text in given.values())
        and (
            record.get("state") != TrialState.COMPLETE.value
            or are_objectives(record.get("values"), TrialState.COMPLETE)
        )
    )


def are_objectives(values: Any, state: TrialState) -> bool:
    """Whether a trial in this state may have these values."""
    if state is not TrialState.COMPLETE:
        return True
    return isinstance(values, list) and len(values) == 2 and all(type(value) in (int, float) for value in values)


def _precisions(value: Any) -> None:
    _entries(value, Precision.named)


def _distribution(text: Any) -> None:
    for choice in parse_json(text)["attributes"]["choices"]:
        Precision.named(choice)


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError("no text")


def _count(value: Any) -> None:
    if type(value) is not int or value < 0:
        raise TypeError("no count")


def _number(value: Any) -> None:
    if type(value) not in (int, float):
        raise TypeError("no number")
    float(value)


def _entries(value: Any, read: Callable[[Any], object]) -> None:
    for key, entry in value.items():
        _text(key)
        read(entry)


def _owner(value: Any) -> None:
    if value:
        _text(value["host"])
        _count(value["pid"])
        _number(value["started"])
        _number(value.get("at", 0.0))


def _timing(value: Any) -> None:
    _entries({key: entry for key, entry in value.items() if key != "group_ms"}, _number)
    _entries(value.get("group_ms", {}), _number)


def _session_timings(value: Any) -> None:
    for entry in value:
        SessionTiming.from_json(entry)


def _measurement(value: Mapping[str, Any]) -> None:
    """A round of measuring again (``mptune.tuning.steps.remeasure``), or why it failed."""
    if "failure" in value:
        Failure.from_json(value["failure"])
        return
    Latency.from_json(value["latency"])
    OutputError.from_json(value["error"])
    decode_float(value["drift"])
    decode_float(value["build_s"])
    for text in (*value["warnings"], value["engine_path"] or ""):
        _text(text)


def _shared_errors(value: Any) -> None:
    range(*value["samples"])
    for error in value["errors"].values():
        if error is not None:
            OutputError.from_json(error)


def _numbers(value: Any) -> None:
    _entries(value, decode_float)


_ATTRIBUTES: dict[str, Callable[[Any], object]] = {
    "fingerprint": _text,
    "origin": _text,
    "attempt": _count,
    "fault": _text,
    FAILURE_ATTR: _text,
    ATTEMPTS: _count,
    FAULTS: _count,
    FAILED_BEFORE: _count,
    EHVI_ATTR: _number,
    CONSTRAINT_ATTR: _number,
    EVALUATION: read_evaluation,
    FAILURE: Failure.from_json,
    FAULT: Failure.from_json,
    OWNER: _owner,
    TIMING_ATTR: _timing,
    LAW_ATTR: _number,
    PLAN_ATTR: _precisions,
}

_NOTES: dict[str, Callable[[Any], object]] = {
    "budget": _count,
    "started": lambda value: _number(value or 0.0),
    "first baseline, ms": _number,
    "first baseline, session": _text,
    "mptune": lambda value: _entries(value, lambda entry: entry),
    "session:": _session_timings,
    "confirm:": _measurement,
    "metric:": lambda value: _entries(value, _text),
    "one-group errors by sample:": _shared_errors,
    "one-group errors in work:": _owner,
}
"""Beginning of a note's key -> what reads it."""
