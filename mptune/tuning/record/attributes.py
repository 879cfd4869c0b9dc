"""How a study looks in Optuna's own tools: parameters named after the layer groups, short attributes first.

Parameters are named ``g012 encoder/layer3/attn``: the group's id, which is unique, and its readable name. Attributes
that hold JSON for mptune alone begin with ``~``, so that tools that sort by name show them last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from mptune.data.metrics.paired import LEAST_ERROR
from mptune.graph.plan import Precision
from mptune.tuning.evaluation import ORIGIN_SAMPLER, Evaluation, Origin
from mptune.tuning.sampler.trials import JSON_MARK, TIMING_ATTR

if TYPE_CHECKING:
    from mptune.graph.grouping.groups import LayerGroup

EVALUATION = f"{JSON_MARK}evaluation"
FAILURE = f"{JSON_MARK}failure"
FAULT = f"{JSON_MARK}fault"
OWNER = f"{JSON_MARK}owner"

ATTEMPTS = "attempts"
"""Of a plan that failed: in how many processes, one after the other."""
FAILED_BEFORE = "failed before"
"""Of a plan that is tried again after it failed: how often it did."""
FAULTS = "faults"
"""Of an evaluation: how many attempts before it failed, which was not the plan's fault."""

_NORMAL_95 = 1.96
_LONGEST_NAME = 200
"""Characters; Optuna's database tables hold 512."""


def note_key(key: str, value: Any) -> str:
    """Under which a study keeps a note: with the mark where it holds more than one number or word."""
    return f"{JSON_MARK}{key}" if isinstance(value, dict | list) else key


def read_notes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of a study by their keys."""
    return {key.removeprefix(JSON_MARK): value for key, value in attrs.items()}


def origin_of(attrs: Mapping[str, Any]) -> Origin:
    """Who proposed a trial's plan."""
    return Origin.parse(attrs["origin"]) if "origin" in attrs else ORIGIN_SAMPLER


def evaluation_attrs(evaluation: Evaluation, group_ms: Mapping[str, float] | None, faults: int) -> dict[str, Any]:
    """The attributes that hold an evaluation, the evaluation itself last: with it all of them are there."""
    attrs: dict[str, Any] = {}
    low, high = evaluation.latency.ci95_ms
    timing: dict[str, Any] = {"latency_ms": evaluation.latency.median_ms, "sd_ms": (high - low) / (2 * _NORMAL_95)}
    if all(map(math.isfinite, timing.values())):
        if group_ms is not None:
            timing["group_ms"] = {name: round(ms, 6) for name, ms in group_ms.items()}
        attrs[TIMING_ATTR] = timing
    if faults:
        attrs[FAULTS] = faults
    attrs["speedup"] = round(evaluation.speedup, 4)
    attrs["FP16 groups"] = len(evaluation.plan.fp16_groups)
    counts = evaluation.plan.reduced_counts
    attrs |= {f"{p.name} groups": count for p, count in counts.items() if p is not Precision.FP16}
    attrs[EVALUATION] = evaluation.to_json()
    return attrs


def objectives(evaluation: Evaluation) -> list[float]:
    """What Optuna minimizes."""
    return [evaluation.latency.median_ms, max(evaluation.error_value, LEAST_ERROR)]


def by_group(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by the ids of the groups that the parameters are named after."""
    return {name.partition(" ")[0]: value for name, value in parameters.items()}


def plan_count(trials: Iterable[FrozenTrial]) -> int | None:
    """How many plans a search may try; None before the first trial."""
    choices: dict[str, Sequence[Any]] = {
        name: distribution.choices
        for trial in trials
        for name, distribution in trial.distributions.items()
        if isinstance(distribution, CategoricalDistribution)
    }
    return math.prod(map(len, choices.values())) if choices else None


class ParameterNames:
    """Group id -> name of its parameter. A study that is read without its groups has the names in its trials."""

    def __init__(self, groups: Iterable[LayerGroup], trials: Iterable[FrozenTrial]) -> None:
        self._names = {group.id: f"{group.id} {group.name}"[:_LONGEST_NAME].rstrip() for group in groups}
        for trial in trials:
            for name in (*trial.params, *trial.system_attrs.get("fixed_params", {})):
                self._names[name.partition(" ")[0]] = name

    def of(self, group: str) -> str:
        """The name of a group's parameter; the id itself where nothing is known of the group."""
        return self._names.get(group, group)
