"""Published latencies predicted by mptune's roofline, and the constant that predicts them best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import kendalltau

from benchmarks.published.table import Published
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import Precision
from mptune.targets.costs import group_costs, ungrouped_cost
from mptune.targets.roofline import NETWORK_SHARE, Kernels, roofline
from mptune.targets.target import Target

Predict = Callable[[float], float]
"""Share of what large kernels reach (``mptune.targets.roofline``) -> ms."""


class Network:
    """A network's groups, counted once, which predict its latency on any target."""

    def __init__(self, model: Model) -> None:
        self._grouped = GroupedModel(model, find_groups(model))
        self._shapes = static_shapes(model).shapes
        self._costs = group_costs(self._grouped, self._shapes)
        self._rest = ungrouped_cost(self._grouped, self._shapes)

    def predictor(self, target: Target, precision: str) -> Predict:
        """What predicts the network: as ``LatencyTerms`` does, without counting again."""
        free = Precision.FP16 if precision == "FP16" else Precision.FP32
        precisions = {g.id: Precision.FP32 if g.pinned else free for g in self._grouped.groups}
        plan = self._grouped.uniform(Precision.FP32).replace(precisions)
        boundaries = roofline(self._grouped, target, self._shapes).boundaries
        casts_ms = NETWORK_SHARE * sum(boundary.cost_ms * boundary.casts(plan) for boundary in boundaries)
        rest_ms = Kernels(target, network_share=1.0).moving_ms(self._rest.fp32_bytes)

        def predict(share: float) -> float:
            kernels = Kernels(target, tf32=precision == "TF32", network_share=share)
            kernels_ms = sum(kernels.ms(cost, precisions[group]) for group, cost in self._costs.items())
            return kernels_ms + (casts_ms + rest_ms) / share

        return predict


@dataclass(frozen=True)
class Case:
    """A published latency and what predicts it."""

    published: Published
    predict: Predict

    def log_ratio(self, share: float) -> float:
        """Log of published over predicted."""
        return math.log(self.published.ms / self.predict(share))


def fit_share(cases: Sequence[Case]) -> float:
    """The share of least absolute deviations of the logarithms, over the cases that may choose it.

    Absolute ones, as a few networks are far off for reasons of their own: Swin on TensorRT 8.0 took four times as long.
    """
    chosen = [case for case in cases if case.published.is_fitted]

    def deviation(log_share: float) -> float:
        return sum(abs(case.log_ratio(math.exp(log_share))) for case in chosen)

    bounds = (math.log(0.1), math.log(2.0))
    return math.exp(minimize_scalar(deviation, bounds=bounds, method="bounded", options={"xatol": 1e-4}).x)


def left_out(cases: Sequence[Case], part: Callable[[Published], str]) -> dict[int, float]:
    """Position of a case -> log of published over predicted, by the share fitted without its part."""
    parts = [part(case.published) for case in cases]
    ratios = {}
    for name in sorted(set(parts)):
        share = fit_share([case for case, other in zip(cases, parts, strict=True) if other != name])
        ratios |= {k: cases[k].log_ratio(share) for k, other in enumerate(parts) if other == name}
    return ratios


@dataclass(frozen=True)
class Agreement:
    """How predictions of some cases agree with what was published.

    Attributes:
        count: cases.
        median: of published over predicted.
        log_sd: standard deviation of the logarithm of that ratio.
        tau: Kendall's tau-b between the two (Biometrika 30, 1938); NaN of one case.
    """

    count: int
    median: float
    log_sd: float
    tau: float

    @classmethod
    def of(cls, published_ms: Sequence[float], log_ratios: Sequence[float]) -> Agreement:
        """From the latencies, and the logs of published over predicted."""
        logs, ms = np.array(log_ratios), np.array(published_ms)
        tau = kendalltau(ms, ms / np.exp(logs)).statistic if len(ms) > 1 else math.nan
        return cls(len(ms), float(np.exp(np.median(logs))), float(np.std(logs, ddof=min(1, len(ms) - 1))), float(tau))
