"""What a device says of the front of a search: every plan as seen and as measured, and whether the rankings agree."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from mptune.choice import Choice
from mptune.engines.failures import describe
from mptune.errors import RunError
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import JsonForm
from mptune.run_json import HOME, RunFile, TargetSection
from mptune.rundir import RunDirectory, read_run
from mptune.settings import SearchSettings
from mptune.tuning.dominance import ERROR_FLOOR, faster_beyond_noise
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import compare_metric
from mptune.tuning.remeasure import confirmed_evaluations, rounds_needed
from mptune.tuning.result import front_of, read_record

HELD, FEWEST_PAIRS = 0.9, 3
"""Share of the pairs from which on a ranking held; of fewer pairs nothing can be said."""

ERRORS_APART = 1.1
"""Errors with a smaller ratio count as equal: emulated and measured errors of one plan differ this much."""

Pair = tuple[Evaluation, Evaluation]
"""The same plan as the search saw it, and as it was measured now."""


@dataclass(frozen=True)
class Agreement(JsonForm):
    """How a ranking of plans held: of the pairs that differ beyond noise as measured, how many agree.

    Kendall's tau-b is -1 to 1; None where one side does not rank at all.
    """

    kendall_tau: float | None
    plans: int
    pairs: int
    agreeing: int

    @property
    def verdict(self) -> str:
        """In plain words, to follow "the ranking"."""
        if self.pairs < FEWEST_PAIRS:
            return "cannot be judged: too few plans differ beyond noise"
        return "held" if self.agreeing >= HELD * self.pairs else "did not hold: rely on the measurements"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**super().to_json(), "verdict": self.verdict}


def latency_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the medians. Only pairs of plans whose measured latencies differ beyond noise are judged."""
    values = [(before.latency.median_ms, now.latency.median_ms) for before, now in pairs]
    apart = [faster_beyond_noise(a, b) or faster_beyond_noise(b, a) for (_, a), (_, b) in combinations(pairs, 2)]
    return _agreement(values, apart)


def error_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the errors that choices go by. Only pairs whose measured errors differ by a tenth or more are judged."""
    values = [(max(a.judged_error, ERROR_FLOOR), max(b.judged_error, ERROR_FLOOR)) for a, b in pairs]
    apart = [max(a, b) >= ERRORS_APART * min(a, b) for (_, a), (_, b) in combinations(values, 2)]
    return _agreement(values, apart)


def _agreement(values: Sequence[tuple[float, float]], apart: Sequence[bool]) -> Agreement:
    """Of (before, now); ``apart`` says of each pair of plans whether it is judged."""
    from scipy.stats import kendalltau  # slow to import

    pairs = zip(combinations(values, 2), apart, strict=True)
    judged = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for (a, b), is_judged in pairs if is_judged]
    tau = float(kendalltau(*zip(*values, strict=True)).statistic) if len(values) > 1 else math.nan
    return Agreement(None if math.isnan(tau) else tau, len(values), len(judged), sum(judged))


@dataclass(frozen=True)
class ConfirmedPlan:
    """A plan as the search saw it and as it is on the device; a failure is one line, where nothing was measured."""

    searched: Evaluation
    measured: Evaluation | None
    failure: str = ""


@dataclass(frozen=True)
class Confirmation:
    """The front of a device beside the front of the search.

    Attributes:
        front: the confirmed front, of this device alone.
        searched: the target that the search saw.
        plans: every plan that was confirmed, the fastest first, those that failed last.
        latency: whether the search had ranked the latencies alike.
        error: the same of the errors: held-out where the search knew them.
    """

    front: Front
    searched: TargetSection
    plans: tuple[ConfirmedPlan, ...]
    latency: Agreement
    error: Agreement

    def to_json(self) -> dict[str, Any]:
        """The content of the confirmed front.json: that of a front, and how the search's ranking held."""
        target = self.searched
        sources = {"latency_source": target.latency_source, "error_source": target.error_source}
        names = {"name": target.name, "engine": target.engine, "device": target.device}
        plans = [
            {
                "plan": plan.searched.plan.fingerprint,
                "searched": plan.searched.to_point(),
                "measured": plan.measured and plan.measured.to_point(),
                "failure": plan.failure or None,
            }
            for plan in self.plans
        ]
        agreement = {"latency": self.latency.to_json(), "error": self.error.to_json()}
        return {**self.front.to_json(), "search": {"target": names, **sources}, "agreement": agreement, "plans": plans}


def read_searched(
    run: RunDirectory, file: RunFile, storage: str | None = None, metric: str | None = None
) -> tuple[Evaluation, ...]:
    """What is confirmed of a search, as it saw it: all-FP32 first, all-FP16, the front, the chosen plan, sound seeds.

    ``metric`` must be what the study was begun with, where it is given.
    """
    with contextlib.closing(read_record(run, file, storage)) as record:
        if metric is not None:
            compare_metric(record, file.search.metric, metric)
        front = front_of(run, file, record)
        seeds = [e for e in record.evaluations() if e.origin.kind == "seed"]
    wanted = (front.fp32, front.fp16, *front.points, front.chosen, *seeds)
    unique: dict[PrecisionPlan, Evaluation] = {}
    for evaluation in wanted:
        if evaluation is not None and evaluation.is_finite:
            unique.setdefault(evaluation.plan, evaluation)
    return tuple(unique.values())


def read_confirmation(
    directory: RunDirectory,
    file: RunFile,
    record: StudyRecord,
    storage: str | None = None,
    *,
    searched: Sequence[Evaluation] | None = None,
    asked: Choice | None = None,
) -> Confirmation:
    """Compare what a confirmation measured with what the search, in ``storage``, measured or predicted."""
    run, search = read_run(directory.path / HOME)
    searched = read_searched(run, search, storage) if searched is None else searched
    if search.target is None:
        raise RunError(f"{run.path} holds no evaluation yet", "continue it with `mptune search` first")
    settings = SearchSettings(**file.measured_settings)
    front = front_of(directory, file, record, asked=asked, is_again=True)
    evaluations = record.evaluations()
    sound = [replace(e, confirmed=True) for e in evaluations if e.is_finite]
    rounds = rounds_needed(settings, "measured")
    confirmed, unconfirmed = confirmed_evaluations(record, rounds, settings.latency, sound)
    measured = {e.plan: e for e in confirmed}
    reasons = {plan: describe(failure) for plan, _, failure in record.failures()}
    reasons |= {e.plan: "its outputs are not finite" for e in evaluations if not e.is_finite}
    not_finite = "its outputs are not finite on the held-out samples"
    reasons |= {e.plan: describe(failure) if failure else not_finite for e, failure in unconfirmed}
    plans = [
        ConfirmedPlan(e, measured.get(e.plan), "" if e.plan in measured else reasons.get(e.plan, "not measured yet"))
        for e in searched
    ]
    plans.sort(key=lambda plan: (plan.measured is None, (plan.measured or plan.searched).latency.median_ms))
    pairs = [(plan.searched, plan.measured) for plan in plans if plan.measured is not None]
    return Confirmation(front, search.target, tuple(plans), latency_agreement(pairs), error_agreement(pairs))
