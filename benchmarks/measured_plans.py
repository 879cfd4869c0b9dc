"""Measure plans of one model on the device here: both uniform ones, every group alone in FP16, and random ones.

As in a search, groups whose operators have no FP16 kernel on the device stay in FP32 in all of them: such a node runs
on the CPU, and what that costs differs from process to process. A few plans with them in FP16 are measured last; they
stand by themselves in the file.

    python -m benchmarks.models.vit_s --out vit_s --batch 8
    python -m benchmarks.measured_plans vit_s.onnx vit_s.npz --emulate --json benchmarks/results/h200_plans_vit_s.json

ONNX Runtime with CUDA graphs and events, TF32 off; errors against true FP32 on the same samples. What laws of latency
and error, rooflines and emulations are held against (``benchmarks.roofline``, ``benchmarks.emulation``).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import one_group_plans, rounded, save
from benchmarks.measuring import Bench, add_options, open_bench
from mptune.graph.grouping.groups import LayerGroup

SAVE_EVERY_S = 10.0
KINDS = ("uniform", "one-group", "random")
Tf32 = Mapping[str, tuple[float, float]]
"""All-FP32 and all-FP16 where TF32 is allowed: latency in ms and error."""


_WITHOUT_KERNEL = 3
"""Random plans in which groups without an FP16 kernel may be FP16."""


def random_plans(groups: Sequence[LayerGroup], count: int, seed: int, kept: Collection[str] = ()) -> list[str]:
    """Plans of all densities: in turn each group by itself, and runs of groups, as good plans have them.

    Args:
        groups: of the model.
        count: plans.
        seed: that they are drawn by.
        kept: ids of groups that stay in FP32.
    """
    rng = np.random.default_rng(seed)
    free = np.array([group.pinned is None and group.id not in kept for group in groups])
    found = []
    for number in range(count):
        density = rng.uniform(0.05, 0.95)
        chosen = rng.random(len(groups)) < density
        if number % 2:
            starts = rng.random(len(groups)) < rng.uniform(0.05, 0.4)
            starts[0] = True
            chosen = chosen[np.maximum.accumulate(np.where(starts, np.arange(len(groups)), 0))]
        found.append("".join("1" if bit else "0" for bit in chosen & free))
    return found


def plans_to_measure(bench: Bench, count: int, seed: int) -> list[tuple[str, str]]:
    """Kind and bits of each plan, each plan once; groups without an FP16 kernel are FP32 in all of them."""
    groups, kept = bench.groups, bench.without_kernel
    free = [g.pinned is None and g.id not in kept for g in groups]
    plans = [("uniform", "0" * len(groups)), ("uniform", "".join("01"[one] for one in free))]
    alone = one_group_plans(bench.model, groups)
    plans += [("one-group", bench.bits(alone[g.id])) for g, is_free in zip(groups, free, strict=True) if is_free]
    plans += [("random", bits) for bits in random_plans(groups, count, seed, kept)]
    unique: dict[str, str] = {}
    for kind, bits in plans:
        unique.setdefault(bits, kind)
    return [(kind, bits) for bits, kind in unique.items()]


def plans_without_kernel(bench: Bench, seed: int) -> list[tuple[str, str]]:
    """All-FP16 and a few random plans with groups without an FP16 kernel in FP16; none where every group has one."""
    if not bench.without_kernel:
        return []
    plans = [("uniform", "".join("01"[g.pinned is None] for g in bench.groups))]
    return plans + [("random", bits) for bits in random_plans(bench.groups, _WITHOUT_KERNEL, seed)]


def rows_of(bench: Bench, plans: Sequence[tuple[str, str]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of the statistics, and the plans that are measured, compact."""
    names: list[str] = []
    rows = []
    for kind, bits in plans:
        entry = bench.record.plans.get(bits)
        if entry is None:
            continue
        taken = entry.get("statistics", {})
        names = names or [name for values in taken.values() for name in values][: len(next(iter(taken.values()), ()))]
        emulated = bench.record.emulated.get(bits)
        rows.append(
            {
                "kind": kind,
                "precision": bits,
                "latency_ms": rounded(entry.get("latency_ms", math.nan)),
                "latency_sd_ms": rounded(entry.get("latency_sd_ms", math.nan)),
                "error": rounded(entry.get("error", math.nan)),
                "finite": entry["finite"],
                "emulated": None if emulated is None else rounded(emulated),
                "statistics": {o: [rounded(values[n]) for n in names] for o, values in taken.items()},
            }
        )
        if "failure" in entry:
            rows[-1]["failure"] = entry["failure"]
    return names, rows


def write(path: Path | None, bench: Bench, plans: Sequence[tuple[str, str]], tf32: Tf32) -> None:
    names, rows = rows_of(bench, plans)
    document = {
        **bench.description(),
        "with_tf32": {name: {"latency_ms": rounded(ms), "error": rounded(e)} for name, (ms, e) in tf32.items()},
        "statistics": names,
        "shapes": {tensor: list(seen.shape) for tensor, seen in bench.ranges.items()},
        "plan_s": _plan_s(bench),
        "plans": rows,
    }
    if bench.without_kernel:
        document["without_kernel"] = {
            "operators": sorted({node.op_type for node in bench.kernels.nodes}),
            "groups": bench.without_kernel,
            "plans": rows_of(bench, plans_without_kernel(bench, seed=0))[1],
        }
    save(path, document, lists=("groups", "plans"))


def _plan_s(bench: Bench) -> float | str | None:
    """Median seconds to build and measure a plan; None where none was measured."""
    taken = [entry["seconds"][2] for entry in bench.record.plans.values() if "seconds" in entry]
    return rounded(float(np.median(taken))) if taken else None


def measure(bench: Bench, plans: Sequence[tuple[str, str]], deadline: float, save: Callable[[], None]) -> None:
    """As many as there is time for; ``save`` is called every few seconds."""
    waiting = {bench.start(bits) for _, bits in plans}
    while waiting and time.monotonic() < deadline:
        done, waiting = wait(waiting, min(SAVE_EVERY_S, max(0.0, deadline - time.monotonic())))
        for future in done:
            future.result()
        save()
    for future in waiting:
        future.cancel()


def emulate(bench: Bench, plans: Sequence[str], deadline: float) -> None:
    """As many as there is time for."""
    for bits in plans:
        if time.monotonic() < deadline:
            bench.emulate(bits)


def report(bench: Bench, plans: Sequence[tuple[str, str]]) -> None:
    taken = [bench.record.plans[bits] for _, bits in plans if bits in bench.record.plans]
    timed = [entry for entry in taken if "latency_ms" in entry]
    fp32, fp16 = (bench.record.plans.get(bits, {}).get("latency_ms", math.nan) for _, bits in plans[:2])
    print(f"{bench.model.path.stem}: {len(bench.groups)} groups, {len(timed)} of {len(plans)} plans timed, "
          f"{sum(not e['finite'] for e in taken)} not finite, FP32 {fp32:.4f} ms, FP16 {fp16:.4f} ms")  # fmt: skip
    if not timed:
        return
    seconds = np.median([entry["seconds"] for entry in timed], axis=0)
    baselines = np.array([entry["baseline_ms"] for entry in timed])
    noise = np.median([entry["latency_sd_ms"] / entry["latency_ms"] for entry in timed])
    print(f"  median seconds: building {seconds[0]:.2f}, on the device {seconds[1]:.2f}, in all {seconds[2]:.2f}, the "
          f"worker idle {seconds[3]:.3f}\n  baseline {baselines.min():.4f} to {baselines.max():.4f} ms; median "
          f"standard error {noise:.2%}")  # fmt: skip
    both = [
        (entry["error"], bench.record.emulated[bits])
        for _, bits in plans
        if (entry := bench.record.plans.get(bits, {})).get("error", 0) > 0 and bench.record.emulated.get(bits, 0) > 0
    ]
    if len(both) > 2:
        measured, emulated = np.log(np.array(both)).T
        finite = np.isfinite(measured) & np.isfinite(emulated)
        correlation = np.corrcoef(measured[finite], emulated[finite])[0, 1]
        ratio = np.exp(np.median((emulated - measured)[finite]))
        print(f"  emulated against measured errors: log-correlation {correlation:.5f}, median ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--random", type=int, default=100, help="random plans")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--emulate", action="store_true", help="take the emulated errors of the same plans as well")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    with open_bench(options, statistics=True) as bench:
        every = plans_to_measure(bench, options.random, options.seed)
        plans = [(kind, bits) for kind, bits in every if kind in options.kinds]
        tf32: dict[str, tuple[float, float]] = {}
        measure(bench, plans, deadline, lambda: write(options.json, bench, plans, tf32))
        if time.monotonic() < deadline:
            tf32.update(zip(("fp32", "fp16"), bench.with_tf32([bits for _, bits in every[:2]]), strict=False))
        lacking = plans_without_kernel(bench, options.seed)
        measure(bench, lacking, deadline, lambda: write(options.json, bench, plans, tf32))
        write(options.json, bench, plans, tf32)
        if options.emulate:
            emulate(bench, [bits for _, bits in plans if bits in bench.record.plans], deadline)
            write(options.json, bench, plans, tf32)
        report(bench, every)
        for name, (ms, error) in tf32.items():
            print(f"  TF32 allowed: all-{name} {ms:.4f} ms, error {error:.2e}")


if __name__ == "__main__":
    main()
