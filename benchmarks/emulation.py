"""Compare emulated FP16 errors with those of real FP16 engines: every layer group alone, and random plans.

    python -m benchmarks.emulation benchmarks/models/digits_vit.onnx benchmarks/models/digits_calib.npz
    python -m benchmarks.emulation vit_s.onnx vit_s.npz --plans benchmarks/results/h200_plans_vit_s.json
    python -m benchmarks.emulation one.onnx one.npz other.onnx other.npz --random 0 --samples 4

Both are relative L2 against true FP32 on the same samples. The measured errors come from a file of
``benchmarks.peers collect``, and so do the emulated ones unless ``--again`` is given; without a file the plans are
measured on the GPU of this machine. Groups whose ratio of emulated to measured error is outside 0.8 to 1.25 are shown
with their operators.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.measuring import Emulating
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.context import RunContext
from mptune.engines.environment import read_gpus
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.session import Provider
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.settings import LatencySettings
from mptune.targets.target import load_target

_HOLDS = (0.8, 1.25)
"""Emulated over measured, of a group whose emulation holds."""


@dataclass(frozen=True)
class Pair:
    """One plan's errors; infinite where it failed or is not finite."""

    kind: str
    precision: str
    measured: float
    emulated: float = math.nan


def agreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of the finite errors of some plans; and the plans that overflow in only one of the two."""
    measured, emulated = (np.array([getattr(p, what) for p in pairs]) for what in ("measured", "emulated"))
    both = np.isfinite(measured) & np.isfinite(emulated) & (measured > 0) & (emulated > 0)
    ratio = emulated[both] / measured[both] if both.any() else np.array([math.nan])
    correlation = np.corrcoef(np.log(measured[both]), np.log(emulated[both]))[0, 1] if both.sum() > 2 else math.nan
    return {
        "plans": len(pairs),
        "log_correlation": float(correlation),
        "median_ratio": float(np.median(ratio)),
        "ratios": (float(ratio.min()), float(ratio.max())),
        "overflow_in_both": int((np.isinf(measured) & np.isinf(emulated)).sum()),
        "only_measured": [p.precision for p in pairs if math.isinf(p.measured) and math.isfinite(p.emulated)],
        "only_emulated": [p.precision for p in pairs if math.isinf(p.emulated) and math.isfinite(p.measured)],
    }


def value(error: OutputError) -> float:
    return error.value("relative_l2") if error.non_finite == 0 else math.inf


def measure(context: RunContext, random: int) -> list[Pair]:
    gpus = read_gpus()
    if not gpus:
        raise SystemExit("no GPU here: give the figures of one with --plans")
    context = context.with_settings(latency=LatencySettings(warmup_ms=1, duration_ms=1))
    model, groups = context.model, context.grouped.groups
    plans = [("one-group", plan) for plan in common.one_group_plans(model, groups).values()]
    plans += [("random", common.plan_of(model, groups, bits)) for bits in common.random_plans(groups, random, seed=0)]
    pairs = []
    target = load_target("h200")
    with Toolchain(ONNXRUNTIME, target, context, "cuda", device=gpus[0].name) as toolchain:
        common.require(toolchain.reference("search"))
        for kind, plan in plans:
            error = common.require(toolchain.evaluate(plan)).error
            pairs.append(Pair(kind, common.bits_of(groups, plan), value(error)))
    return pairs


def emulate(context: RunContext, plans: Sequence[PrecisionPlan]) -> list[float]:
    provider: Provider = "cuda" if read_gpus() else "cpu"
    toolchain = Emulating(ONNXRUNTIME, load_target("h200"), context, provider)
    toolchain.prediction.fuses = False  # as the CUDA provider, since that is what was measured, on any device
    with toolchain:
        common.require(toolchain.reference("search"))
        common.require(toolchain.observe())
        started = time.perf_counter()
        errors = [toolchain.emulate_all(plan) for plan in plans]
        taken_s = time.perf_counter() - started
        samples = len(next(iter(next(iter(errors[0].per_output.values())).values())))
        print(f"{len(plans)} plans emulated on {samples} samples each in {taken_s:.1f} s ({provider})")
    return [value(error) for error in errors]


def report(groups: Sequence[LayerGroup], pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Print the pairs of one group, and of each kind of plan how far they agree, which is returned."""

    def groups_of(bits: str) -> list[LayerGroup]:
        return [group for group, bit in zip(groups, bits, strict=True) if bit == "1"]

    agreements = {}
    for kind in ("one-group", "random"):
        chosen = [pair for pair in pairs if pair.kind == kind]
        if not chosen:
            continue
        if kind == "one-group":
            print(f"{'group':<34} {'measured':>10} {'emulated':>10} {'ratio':>6}")
            for p in chosen:
                (group,) = groups_of(p.precision)
                ratio = p.emulated / p.measured if p.measured > 0 and math.isfinite(p.measured) else math.nan
                holds = math.isnan(ratio) or _HOLDS[0] <= ratio <= _HOLDS[1]
                ops = "" if holds else "  " + ", ".join(op if n == 1 else f"{n} {op}" for op, n in group.ops.items())
                print(f"{group.name[:34]:<34} {p.measured:>10.3e} {p.emulated:>10.3e} {ratio:>6.3f}{ops}")
        agreements[kind] = a = agreement(chosen)
        print(f"{a['plans']} {kind} plans: log-correlation {a['log_correlation']:.5f}, median ratio "
              f"{a['median_ratio']:.3f}, extremes {a['ratios'][0]:.3f} to {a['ratios'][1]:.3f}; "
              f"{a['overflow_in_both']} overflow in both, {len(a['only_measured'])} as measured only, "
              f"{len(a['only_emulated'])} as emulated only")  # fmt: skip
        for what in ("measured", "emulated"):
            for bits in a[f"only_{what}"] if kind == "one-group" else ():
                print(f"  overflows as {what} only: {groups_of(bits)[0].name}")
    return agreements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="MODEL DATA", help="a model and its data, or several")
    parser.add_argument("--plans", type=Path, help="a file of benchmarks.peers collect")
    parser.add_argument("--again", action="store_true", help="emulate here, whatever the file holds")
    parser.add_argument("--random", type=int, default=100, help="random plans; without --plans")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(options.paths) % 2 or (options.plans is not None and len(options.paths) != 2):
        parser.error("give a model and its data, or several without --plans")
    documents = []
    for model, data in zip(options.paths[::2], options.paths[1::2], strict=True):
        print(f"== {model.stem}", flush=True)
        documents.append(study(model, data, options))
    common.save(options.json, documents[0] if len(documents) == 1 else {"models": documents}, lists=("plans",))


def study(path: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare, print, and return the figures of one model."""
    model = load_model(path)
    groups = find_groups(model)
    with tempfile.TemporaryDirectory() as folder:
        context = common.make_context(GroupedModel(model, groups), data, Path(folder), options.samples, options.batch)
        if options.plans is None:
            pairs = measure(context, options.random)
        else:
            known = common.read_measured_plans(options.plans)
            common.check_groups(known, groups)
            pairs = [
                Pair(p.kind, p.precision, p.error, math.nan if p.emulated is None else p.emulated)
                for kind in ("one-group", "random")
                for p in known.of_kind(kind)
            ]
        if options.again or any(math.isnan(pair.emulated) for pair in pairs):
            plans = [common.plan_of(model, groups, pair.precision) for pair in pairs]
            errors = emulate(context, plans)
            pairs = [replace(pair, emulated=error) for pair, error in zip(pairs, errors, strict=True)]
    agreements = report(groups, pairs)
    rows = [{**asdict(p), **{k: common.rounded(getattr(p, k)) for k in ("measured", "emulated")}} for p in pairs]
    return {"model": path.stem, "agreement": agreements, "plans": rows}


if __name__ == "__main__":
    main()
