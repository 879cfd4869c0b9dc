"""What BF16 gains where FP16 overflows, on this machine's GPU, and how well it is emulated.

    python -m benchmarks.bf16 --limit 520 --json bf16.json
    python -m benchmarks.bf16 --networks matching --predicted       # no GPU: a roofline's latencies, emulated errors

For each network of ``benchmarks.models.overflowing``: every layer group alone in BF16, emulated and measured; then
plans along the trade-off, chosen by the law of SEARCH (one-group errors add in squares, latencies in groups and
boundaries) among FP32 and FP16 alone, and among all three precisions, built and timed by ONNX Runtime's CUDA provider.
The hypervolume of both fronts is that of a search (error at most 3e-2). Operators without a BF16 kernel are found by
opening the engine, and their groups stay out of BF16. Searches are compared by ``benchmarks.bf16_search``.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import hypervolume, labels_of, require, rounded, save, workspace
from benchmarks.emulation import Pair, agreement, value
from benchmarks.models.overflowing import add_options, each_network
from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import Failure
from mptune.engines.environment import read_gpus
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.toolchain import MeasuredToolchain, PredictedToolchain
from mptune.engines.workload import Workload
from mptune.graph.casting.value_types import ValueTypes, unsupported
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.settings import LatencySettings, SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.targets.target import load_target
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR

_MISSING = re.compile(r"implementation for (?P<op>\w+)\(\d+\)")
_WEIGHTS = 40
"""Trade-off weights that are swept."""
_SWEEPS = 6
"""Passes over the groups of the descent: few plans change after the third."""

FP32, FP16, BF16 = Precision.FP32, Precision.FP16, Precision.BF16
Choices = Mapping[str, tuple[Precision, ...]]


@dataclass
class Network:
    """One network while it is measured."""

    name: str
    toolchain: MeasuredToolchain | PredictedToolchain
    grouped: GroupedModel
    deadline: float

    def __post_init__(self) -> None:
        self.base = self.grouped.uniform(FP32)
        self.terms: LatencyTerms = require(self.toolchain.predictor.latency_terms())
        self.without_kernel: dict[str, str] = {}
        self.points: dict[str, tuple[float, float]] = {}

    def alone(self, group: str, precision: Precision) -> PrecisionPlan:
        return self.base.replace({group: precision})

    def evaluate(self, plan: PrecisionPlan) -> tuple[float, float]:
        """Latency in ms and error of a plan, each built once; infinite where it fails or is not finite."""
        known = self.points.get(plan.fingerprint)
        if known is None:
            measured = self.toolchain.evaluate(plan)
            if isinstance(measured, Failure):
                print(f"  {plan.fingerprint} failed: {measured.message}", flush=True)
                known = math.inf, math.inf
            else:
                known = measured.latency.median_ms, value(measured.error)
            self.points[plan.fingerprint] = known
        return known


def candidates(network: Network, absmax: Mapping[str, float]) -> dict[Precision, set[str]]:
    """The groups that each reduced precision may be tried in."""
    grouped = network.grouped
    hazards = find_hazards(grouped, absmax)
    free = {group.id for group in grouped.groups if group.pinned is None}
    found = {p: free - set(pinned_by_hazards(hazards, p)) for p in REDUCED}
    found[BF16] -= set(unsupported(ValueTypes(grouped), BF16).groups)
    return found


def drop_missing_kernels(network: Network, groups: set[str]) -> set[str]:
    """Without the groups whose operators the engine has no BF16 kernel for: the engine names one at a time."""
    ops = {group.id: set(group.ops) for group in network.grouped.groups}
    while groups:
        answer = network.toolchain.evaluate(network.base.replace(dict.fromkeys(groups, BF16)))
        if not isinstance(answer, Failure):
            break
        found = _MISSING.search(answer.message)
        if found is None:
            print(f"  all-BF16 does not open: {answer.message}", flush=True)
            break
        network.without_kernel[found["op"]] = answer.message
        kept = {group for group in groups if found["op"] not in ops[group]}
        if kept == groups:
            break
        groups = kept
    return groups


def one_group_errors(network: Network, tried: Mapping[Precision, set[str]]) -> dict[tuple[str, Precision], float]:
    """Emulated errors of each group alone in each precision."""
    keys = [(g.id, p) for p in REDUCED for g in network.grouped.groups if g.id in tried[p]]
    errors: dict[tuple[str, Precision], float] = {}
    for start in range(0, len(keys), 8):
        few = keys[start : start + 8]
        found = require(network.toolchain.predictor.emulate([network.alone(*key) for key in few]))
        errors.update(zip(few, map(value, found), strict=True))
    return errors


def plans_along(
    network: Network, choices: Choices, errors: Mapping[tuple[str, Precision], float], scale: float
) -> list[PrecisionPlan]:
    """Plans that minimise ``latency + weight * squared error`` for many weights, by descent from both ends."""
    terms, groups = network.terms, list(choices)
    touching = {g: [b for b in terms.boundaries if g == b.producer_group or g in b.consumer_groups] for g in groups}
    squares = {key: max(error, ERROR_FLOOR) ** 2 for key, error in errors.items()}

    def cost(group: str, plan: PrecisionPlan, weight: float) -> float:
        precision = plan.precision[group]
        own = 0.0 if precision is FP32 else weight * squares[group, precision] - scale * terms.gains_ms[group]
        return own + scale * sum(b.cost_ms * b.casts(plan) for b in touching[group])

    def descend(plan: PrecisionPlan, weight: float) -> PrecisionPlan:
        for _ in range(_SWEEPS):
            before = plan
            for group in groups:
                tried = [plan.replace({group: p}) for p in choices[group]]
                plan = min(tried, key=lambda one: cost(group, one, weight))
            if plan == before:
                break
        return plan

    def total(plan: PrecisionPlan, weight: float) -> float:
        error = sum(squares[g, p] for g, p in plan.precision.items() if p is not FP32)
        return scale * terms.predict(plan) + weight * error

    reduced = network.base.replace({g: of[-1] for g, of in choices.items()})
    found: dict[str, PrecisionPlan] = {}
    for weight in np.geomspace(1e-1, 1e9, _WEIGHTS):
        both = [descend(start, float(weight)) for start in (network.base, reduced)]
        best = min(both, key=lambda plan: total(plan, float(weight)))
        found[best.fingerprint] = best
    return list(found.values())


def spread(plans: Sequence[PrecisionPlan], count: int) -> list[PrecisionPlan]:
    """So many of them, evenly along the trade-off, both ends among them."""
    chosen = np.unique(np.linspace(0, len(plans) - 1, min(count, len(plans))).round().astype(int))
    return [plans[index] for index in chosen]


def area(network: Network, plans: Sequence[PrecisionPlan]) -> float:
    points = np.array([network.points[p.fingerprint] for p in plans if p.fingerprint in network.points])
    finite = np.isfinite(points).all(axis=1)
    base_ms = network.points[network.base.fingerprint][0]
    return hypervolume(points[finite, 0], points[finite, 1], base_ms)


def measure(network: Network, absmax: Mapping[str, float], count: int) -> dict[str, Any]:
    groups = network.grouped.groups
    base_ms, _ = network.evaluate(network.base)
    tried = candidates(network, absmax)
    tried[BF16] = drop_missing_kernels(network, tried[BF16])
    outside = {precision: sum(group.id not in of for group in groups) for precision, of in tried.items()}
    print(
        f"{network.name}: {len(groups)} groups, {outside[FP16]} cannot be right in FP16, {outside[BF16]} in BF16;"
        f" no BF16 kernel for {', '.join(network.without_kernel) or 'none'}; FP32 {base_ms:.4f} ms",
        flush=True,
    )
    errors = one_group_errors(network, tried)
    lowest = network.base.replace({g.id: FP16 if g.id in tried[FP16] else FP32 for g in groups})
    all_three = lowest.replace({g.id: BF16 for g in groups if g.id in tried[BF16] and not _works(errors, g.id, FP16)})
    for what, plan in (("all-FP16 but pinned", lowest), ("the same, pinned in BF16", all_three)):
        ms, error = network.evaluate(plan)
        print(f"  {what:<26} {ms:8.4f} ms  error {error:.2e}", flush=True)
    saved_ms = base_ms - network.points[all_three.fingerprint][0]
    predicted_ms = network.terms.base_ms - network.terms.predict(all_three)
    scale = saved_ms / predicted_ms if math.isfinite(saved_ms) and saved_ms > 0 < predicted_ms else 1.0
    fronts: dict[str, list[PrecisionPlan]] = {}
    for what, allowed in (("two", (FP16,)), ("three", REDUCED)):
        choices = {
            g.id: (FP32, *(p for p in reversed(allowed) if g.id in tried[p] and _works(errors, g.id, p)))
            for g in groups
            if any(g.id in tried[p] for p in allowed)
        }
        fronts[what] = spread(plans_along(network, choices, errors, scale), count)
    for two, three in zip(fronts["two"], fronts["three"], strict=False):  # in turn, as the time may end
        for plan in (two, three):
            if time.monotonic() < network.deadline:
                network.evaluate(plan)
    areas = {what: area(network, [network.base, lowest, *plans]) for what, plans in fronts.items()}
    # A search over three precisions could have found every plan of two.
    areas["three"] = area(network, [network.base, lowest, all_three, *fronts["two"], *fronts["three"]])
    ratio = areas["three"] / areas["two"] if areas["two"] else math.inf
    shown = f"{areas['two']:.4f} in two precisions, {areas['three']:.4f} in three: {ratio:.3f} times"
    print(f"  hypervolume {shown}", flush=True)
    pairs = []
    for group in groups:
        if group.id in tried[BF16] and time.monotonic() < network.deadline:
            measured = network.evaluate(network.alone(group.id, BF16))[1]
            pairs.append((group.name, Pair("one-group", group.id, measured, errors[group.id, BF16])))
    found = agreement([pair for _, pair in pairs])
    print(
        f"  BF16 alone, {found.plans} groups: log-correlation {found.log_correlation:.5f}, median ratio of emulated to"
        f" measured {found.median_ratio:.3f}, extremes {found.ratios[0]:.3f} to {found.ratios[1]:.3f}",
        flush=True,
    )
    for name, pair in pairs:
        print(f"    {name[:40]:<40} measured {pair.measured:.3e} emulated {pair.emulated:.3e}")
    return {
        "groups": len(groups),
        "fp16_pinned": outside[FP16],
        "without_bf16_kernel": network.without_kernel,
        "baseline_ms": rounded(base_ms),
        "hypervolume": {what: rounded(number) for what, number in areas.items()},
        "log_correlation": rounded(found.log_correlation),
        "median_ratio": rounded(found.median_ratio),
        "extremes": [rounded(one) for one in found.ratios],
        "one_group": [[name, rounded(pair.measured), rounded(pair.emulated)] for name, pair in pairs],
        "fronts": {
            what: [
                {
                    "precision": labels_of(plan),
                    "latency_ms": rounded(network.points[plan.fingerprint][0]),
                    "error": rounded(network.points[plan.fingerprint][1]),
                }
                for plan in plans
                if plan.fingerprint in network.points
            ]
            for what, plans in fronts.items()
        },
    }


def _works(errors: Mapping[tuple[str, Precision], float], group: str, precision: Precision) -> bool:
    """Whether a group alone is finite in a precision that it may be tried in."""
    return math.isfinite(errors.get((group, precision), math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, samples=6, predicted="an H200's roofline and emulated errors")
    parser.add_argument("--plans", type=int, default=12, help="of each front")
    options = parser.parse_args()
    gpus = read_gpus()
    if not gpus and not options.predicted:
        raise SystemExit("no GPU here: --predicted takes an H200's roofline and emulated errors")
    document: dict[str, Any] = {}
    for name, path, data, place, deadline in each_network(options):
        space = workspace(path, data, place, options.samples, options.batch)
        model = load_model(path, opset=options.opset if options.model else None)
        grouped = GroupedModel(model, find_groups(model))
        settings = SearchSettings(metric="relative_l2", latency=LatencySettings(warmup_ms=20, duration_ms=150))
        target, provider = load_target("h200"), "cpu" if options.predicted else "cuda"
        made: MeasuredToolchain | PredictedToolchain = _open(
            target, Workload(grouped, space), settings, provider, gpus[0].name if gpus else ""
        )
        with made as toolchain:
            require(toolchain.reference_model.reference("search"))
            observed = require(toolchain.reference_model.observe())
            network = Network(name, toolchain, grouped, deadline)
            absmax = {tensor: seen.absmax for tensor, seen in observed.items()}
            document[name] = measure(network, absmax, options.plans)
            save(options.json, {"device": gpus[0].name if gpus else "predicted", "networks": document})


def _open(
    target: Any, workload: Workload, settings: SearchSettings, provider: Provider, device: str
) -> MeasuredToolchain | PredictedToolchain:
    if provider == "cpu":
        return PredictedToolchain(None, target, workload, settings)
    return MeasuredToolchain(ONNXRUNTIME, target, workload, settings, provider, device=device)


if __name__ == "__main__":
    main()
