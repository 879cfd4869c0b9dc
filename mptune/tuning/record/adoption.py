"""Takes over into a study what another one of the same run, of another metric, knows."""

from __future__ import annotations

from collections.abc import Collection

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from mptune.data.metrics.paired import LEAST_ERROR
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.attributes import EVALUATION


def adopt(study: optuna.Study, other: optuna.Study, known: Collection[str], metric: str) -> None:
    """Add the finished trials of ``other`` to ``study``, and the notes that it does not have."""
    done = other.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    missing = [trial for trial in done if trial.user_attrs.get("fingerprint") not in known]
    study.add_trials([t for t in (translate(trial, metric) for trial in missing) if t is not None])
    present = study.user_attrs
    for key, value in other.user_attrs.items():
        if key not in present:
            study.set_user_attr(key, value)


def translate(trial: FrozenTrial, metric: str) -> FrozenTrial | None:
    """The trial with the other metric's value; None where its statistics lack the metric: it needs a new build."""
    attrs, values = dict(trial.user_attrs), None
    if EVALUATION in attrs:
        evaluation = Evaluation.from_json(attrs[EVALUATION]).with_metric(metric)
        if not evaluation.has_metric:
            return None
        attrs[EVALUATION] = evaluation.to_json()
        values = objectives(evaluation) if evaluation.is_finite else None
    return create_trial(
        state=TrialState.PRUNED if values is None else TrialState.COMPLETE,
        values=values,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=attrs,
        system_attrs={k: v for k, v in trial.system_attrs.items() if k.startswith("constraints")},
    )


def objectives(evaluation: Evaluation) -> list[float]:
    """What Optuna minimizes."""
    return [evaluation.latency.median_ms, max(evaluation.error_value, LEAST_ERROR)]
