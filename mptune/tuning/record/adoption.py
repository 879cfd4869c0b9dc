"""A trial of another metric's study, judged by this study's metric."""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState, create_trial

from mptune.data.metrics.paired import LEAST_ERROR
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.attributes import EVALUATION, read_json
from mptune.tuning.sampler.trials import JSON_MARK


def translate(trial: FrozenTrial, metric: str) -> FrozenTrial | None:
    """The trial with the other metric's value; None where its statistics lack the metric: it needs a new build."""
    attrs, values = dict(trial.user_attrs), None
    document = read_json(attrs, EVALUATION)
    if document is not None:
        evaluation = Evaluation.from_json(document).with_metric(metric)
        if not evaluation.has_metric:
            return None
        attrs.pop(EVALUATION.removeprefix(JSON_MARK), None)
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
