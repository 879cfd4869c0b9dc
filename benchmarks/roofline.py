"""Compare the roofline's latencies with measured ones: the order of plans, and the ratio.

    python -m benchmarks.models.vit_s --out models/vit_s --batch 8
    python -m benchmarks.roofline benchmarks/results/h200_plans_*.json --models models --fit \
        --json benchmarks/results/roofline.json

The plans are those of ``benchmarks.peers collect``; the models are needed for their structure, not for their weights.
Kendall's tau-b over random plans (Biometrika 30, 1938) measures the agreement of the two orders.
Gains of groups and costs of boundaries are compared with those of the additive model fitted to all plans.

``--fit`` fits the constants of ``mptune.targets.roofline.UNFUSED`` that are fitted: least squares of log(predicted /
measured) over the random plans and both uniform ones, every model with the same weight; first over all files together,
then with each model left out and predicted from the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from benchmarks.common import MeasuredPlans, bools_of, check_groups, plan_of, read_measured_plans, save
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.targets.costs import ShapeTable, kernel_costs
from mptune.targets.roofline import FUSED, UNFUSED, Execution, LatencyTerms, cast_ms, kernel_ms, roofline
from mptune.targets.target import Target, load_target

ENGINES = {"onnxruntime": UNFUSED, "tensorrt": FUSED}
FITTED = ("fp32_matrix", "bandwidth", "tile_elements", "cast_launches")
"""The constants that ``--fit`` fits."""
ROBUST_MS = 0.01


@dataclass(frozen=True)
class Fitted:
    """The additive model of the measured latencies, in ms: gain per group, cost per boundary, residual."""

    gains: np.ndarray
    costs: np.ndarray
    residual: float


def fit(measured: MeasuredPlans, terms: LatencyTerms, groups: Sequence[LayerGroup], crossed: np.ndarray) -> Fitted:
    """Least squares with a weak prior at the prediction, for terms that the plans cannot separate.

    Absolute loss (soft L1) above 10 us: the first plans of a run were corrected by a baseline that had not settled.
    """
    rows = np.hstack([bools_of([p.precision for p in measured.plans]), -crossed.astype(float)])
    saved = measured.baseline_ms - np.array([plan.latency_ms for plan in measured.plans])
    known = np.isfinite(saved)
    rows, saved = rows[known], saved[known]
    prior = np.array([terms.gains_ms[g.id] for g in groups] + [b.cost_ms for b in terms.boundaries])
    pull = 0.05
    stacked = np.vstack([rows, pull * np.eye(len(prior))])
    goal = np.concatenate([saved, pull * prior])
    found = least_squares(
        lambda x: stacked @ x - goal, prior, lambda x: stacked, loss="soft_l1", f_scale=ROBUST_MS, method="trf"
    ).x
    return Fitted(found[: len(groups)], found[len(groups) :], float(np.std(saved - rows @ found)))


def by_kind(
    groups: Sequence[LayerGroup], fitted: Fitted, terms: LatencyTerms
) -> Mapping[str, tuple[int, float, float]]:
    """Kind of group -> how many, and the sums of measured and predicted gains in ms."""
    found: dict[str, tuple[int, float, float]] = {}
    for group, gain in zip(groups, fitted.gains, strict=True):
        count, measured, predicted = found.get(group.kind, (0, 0.0, 0.0))
        found[group.kind] = count + 1, measured + float(gain), predicted + terms.gains_ms[group.id]
    return found


class Counted:
    """A model's kernels and the measurements of its plans; predicts latencies for any constants.

    Attributes:
        name: of the model.
        measured_ms: all-FP32 (the baseline), all-FP16, then the random plans.
    """

    def __init__(self, path: Path, models: Path, target: Target) -> None:
        measured = read_measured_plans(path)
        model = load_model(models / f"{measured.model}.onnx")
        groups = find_groups(model)
        check_groups(measured, groups)
        grouped = GroupedModel(model, groups)
        kept = [*measured.plans[:2], *(p for p in measured.of_kind("random") if np.isfinite(p.latency_ms))]
        boundaries = roofline(grouped, target, measured.shapes).boundaries
        plans = [plan_of(model, groups, plan.precision) for plan in kept]
        shapes = ShapeTable(model, measured.shapes)
        self.name = measured.model
        self.measured_ms = np.array([measured.baseline_ms, *(plan.latency_ms for plan in kept[1:])])
        self._target = target
        self._kernels = [(p, list(kernel_costs(grouped, measured.shapes, p).values())) for p in DEFAULT_PRECISIONS]
        self._half = bools_of([plan.precision for plan in kept])
        self._crossed = np.array([[b.casts(plan) for b in boundaries] for plan in plans], dtype=float)
        self._elements = [shapes.elements(b.tensor) for b in boundaries]

    def predict(self, execution: Execution) -> np.ndarray:
        """Latency of each plan in ms, without nodes outside groups: those of the measured models take no time."""
        ms = {
            precision: np.array(
                [sum(kernel_ms(k, self._target, precision, execution) for k in each) for each in groups]
            )
            for precision, groups in self._kernels
        }
        casts = np.array([cast_ms(count, self._target, execution) for count in self._elements])
        return np.where(self._half, ms[Precision.FP16], ms[Precision.FP32]).sum(1) + self._crossed @ casts


def fit_constants(models: Sequence[Counted]) -> Execution:
    """The constants that predict the plans of these models best, every model with the same weight."""

    def execution(logs: np.ndarray) -> Execution:
        return replace(UNFUSED, **dict(zip(FITTED, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        off = [np.log(m.predict(execution(logs)) / m.measured_ms) / np.sqrt(len(m.measured_ms)) for m in models]
        return np.concatenate(off)

    start = np.log([getattr(UNFUSED, name) for name in FITTED])
    return execution(least_squares(residuals, start, diff_step=1e-3).x)


def held_against(model: Counted, execution: Execution) -> dict[str, float]:
    """Accuracy of constants on a model's plans."""
    predicted = model.predict(execution)
    ratio = predicted / model.measured_ms
    return {
        "tau_random": float(kendalltau(predicted[2:], model.measured_ms[2:]).statistic),
        "fp32_ratio": float(ratio[0]),
        "fp16_ratio": float(ratio[1]),
        **{name: float(getattr(execution, name)) for name in FITTED},
    }


def fit_all(paths: Sequence[Path], models: Path, target: Target) -> dict[str, Any]:
    """The constants fitted to all models, and with each model left out."""
    counted = [Counted(path, models, target) for path in paths]
    together = fit_constants(counted)
    left_out = {
        model.name: held_against(model, fit_constants([other for other in counted if other is not model]))
        for model in counted
        if len(counted) > 1
    }
    print("constants over all: " + ", ".join(f"{name} {getattr(together, name):.4g}" for name in FITTED))
    for name, found in left_out.items():
        print(
            f"  {name:<14} from the other models: tau {found['tau_random']:.3f}, FP32 {found['fp32_ratio']:.2f}, FP16 "
            f"{found['fp16_ratio']:.2f}; " + ", ".join(f"{key} {found[key]:.4g}" for key in FITTED)
        )
    return {"together": {name: float(getattr(together, name)) for name in FITTED}, "left_out": left_out}


def compare(path: Path, models: Path, target: Target, execution: Execution, verbose: bool) -> dict[str, Any]:
    measured = read_measured_plans(path)
    model = load_model(models / f"{measured.model}.onnx")
    groups = find_groups(model)
    check_groups(measured, groups)
    terms = roofline(GroupedModel(model, groups), target, measured.shapes, execution)
    plans = [plan_of(model, groups, plan.precision) for plan in measured.plans]
    predicted = np.array([terms.predict(plan) for plan in plans])
    taken = np.array([measured.baseline_ms, *(plan.latency_ms for plan in measured.plans[1:])])
    crossed = np.array([[b.casts(plan) for b in terms.boundaries] for plan in plans])
    random = np.array([p.kind == "random" and np.isfinite(p.latency_ms) for p in measured.plans])
    alone = np.array([p.kind == "one-group" and np.isfinite(p.latency_ms) for p in measured.plans])
    tau = float(kendalltau(predicted[random], taken[random]).statistic)
    fitted = fit(measured, terms, groups, crossed)
    gains = np.array([terms.gains_ms[g.id] for g in groups])
    kinds = by_kind(groups, fitted, terms)
    result = {
        "model": measured.model,
        "random_plans": int(random.sum()),
        "tau_random": tau,
        "correlation_one_group": float(np.corrcoef(predicted[alone], taken[alone])[0, 1]),
        "tau_gains": float(kendalltau(gains, fitted.gains).statistic),
        "fp32_ms": [float(predicted[0]), float(taken[0])],
        "fp16_ms": [float(predicted[1]), float(taken[1])],
        "boundary_us": [1e3 * float(np.mean([b.cost_ms for b in terms.boundaries])), 1e3 * float(fitted.costs.mean())],
        "law_residual_ms": fitted.residual,
        "kinds": {k: list(v) for k, v in kinds.items()},
    }
    print(f"{measured.model} on {measured.device}: tau over {random.sum()} random plans {tau:.3f}, of gains "
          f"{result['tau_gains']:.3f}; FP32 {predicted[0]:.3f} ms predicted, {taken[0]:.3f} measured "
          f"({predicted[0] / taken[0]:.2f}); FP16 {predicted[1]:.3f}, {taken[1]:.3f} ({predicted[1] / taken[1]:.2f}); "
          f"a boundary {result['boundary_us'][0]:.1f}, {result['boundary_us'][1]:.1f} us")  # fmt: skip
    for kind, (count, was, expected) in kinds.items():
        print(f"  {count:3d} {kind:<12} gain {1e3 * was:8.1f} us measured, {1e3 * expected:8.1f} us predicted")
    if verbose:
        for group, gain, expected in zip(groups, fitted.gains, gains, strict=True):
            print(f"    {group.id} {group.name[:40]:<40} {1e3 * gain:8.1f} {1e3 * expected:8.1f}  {dict(group.ops)}")
        for boundary, cost in zip(terms.boundaries, fitted.costs, strict=True):
            print(f"    {boundary.tensor[:50]:<50} {1e3 * cost:8.1f} {1e3 * boundary.cost_ms:8.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of benchmarks.peers collect")
    parser.add_argument("--models", type=Path, default=Path(), help="folder with MODEL.onnx")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--engine", choices=ENGINES, default="onnxruntime", help="which engine measured")
    parser.add_argument("--fit", action="store_true", help="fit the constants of ONNX Runtime's kernels")
    parser.add_argument("--groups", action="store_true", help="show every group and boundary, in us")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target, execution = load_target(options.target), ENGINES[options.engine]
    results = [compare(path, options.models, target, execution, options.groups) for path in options.results]
    document = {"target": options.target, "engine": options.engine, "models": results}
    if options.fit:
        document["fit"] = fit_all(options.results, options.models, target)
    save(options.json, document)


if __name__ == "__main__":
    main()
