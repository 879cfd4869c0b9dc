"""Plans of one model measured on the device, with what a search would know of it: what replays rest on.

Both uniform plans, every group alone in FP16, and random ones. As in a search, groups whose operators have no FP16
kernel on the device stay in FP32 in all of them: such a node runs on the CPU, and what that costs differs from process
to process. A few plans with them in FP16 are measured last; they stand by themselves in the file. Emulations
are held against the same files (``benchmarks.emulation``).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import one_group_plans, random_plans, read_measured_plans, rounded, save
from benchmarks.measuring import Bench
from benchmarks.peers.known import know, read_known
from benchmarks.peers.models import PeerModel
from benchmarks.peers.world import World, fit_laws
from mptune.graph.plan import Precision

PLAN_TIMEOUT_S = 30.0
"""Of one plan: one that hangs, or takes seconds a run, must not eat what many others need."""

_WITHOUT_KERNEL = 3
"""Random plans in which groups without an FP16 kernel may be FP16."""

Plans = list[tuple[str, str]]
"""Kind and bits of each."""


def collect(model: PeerModel, options: argparse.Namespace, deadline: float) -> bool:
    """Measure what is left of a model's plans, until the deadline (``time.monotonic``); returns whether nothing is.

    Args:
        model: which.
        options: ``work`` and ``results`` folders; counts of ``random`` plans, of plans along the ``front`` of the law
            that is fitted to the others, and of groups that are built ``alone`` (all of them are emulated).
        deadline: nothing is begun after it.
    """
    out, known = (options.results / f"{stem}_{model.name}.json" for stem in ("h200_plans", "peers_known"))
    with Bench(model, "bench", options, plan_timeout_s=PLAN_TIMEOUT_S) as bench:

        def for_each(job: Callable[[str], object], plans: Iterable[str]) -> bool:
            """Do a job for each plan as far as there is time; what is in the record costs nothing. True if all are."""
            return all(time.monotonic() < deadline and job(bits) is not None for bits in plans)

        many, ones, lacking = plans_to_measure(bench, options.random)
        every = [bits for _, bits in (*many, *ones)]
        # In the order of importance: of plans of many groups a law learns more.
        is_done = for_each(bench.measure, [bits for _, bits in many]) and for_each(bench.emulate, every)
        know(bench, known)
        write(out, bench, many, lacking)
        if is_done and not bench.record.marked.get("front"):
            fitted = read_measured_plans(out)
            world = World(read_known(known), fitted, fit_laws(read_known(known), fitted))
            along = [bits for bits in map(world.bits, world.near_exact()) if bits not in every]
            for bits in spread(along, options.front):
                bench.record.mark(bits, "front")
        later = [("front", bits) for bits in bench.record.marked.get("front", ())] + spread(ones, options.alone)
        for job in (bench.measure, bench.emulate):
            is_done = is_done and for_each(job, [bits for _, bits in later])
        # Last, as they take seconds each, and no law needs them.
        is_done = is_done and for_each(bench.measure, [bits for _, bits in lacking])
        write(out, bench, [*many, *later], lacking)
        print(f"{model.name}: {len(bench.record.plans)} plans measured, {len(bench.record.emulated)} emulated")
    return is_done


def plans_to_measure(bench: Bench, count: int) -> tuple[Plans, Plans, Plans]:
    """Uniform and random plans; each group alone; and a few plans with groups in FP16 that have no FP16 kernel."""
    groups, without_kernel = bench.groups, bench.without_kernel
    free = [group.pinned is None and group.id not in without_kernel for group in groups]
    alone = one_group_plans(bench.model, groups)
    ones = [("one-group", bench.bits(alone[g.id])) for g, is_free in zip(groups, free, strict=True) if is_free]
    many = {"0" * len(groups): "uniform", "".join("01"[is_free] for is_free in free): "uniform"}
    for bits in random_plans(groups, count, 0, without_kernel):
        many.setdefault(bits, "random")
    for _, bits in ones:
        many.pop(bits, None)
    lacking: Plans = []
    if without_kernel:
        lacking = [("uniform", "".join("01"[group.pinned is None] for group in groups))]
        lacking += [("random", bits) for bits in random_plans(groups, _WITHOUT_KERNEL, 0)]
    return [(kind, bits) for bits, kind in many.items()], ones, lacking


def write(path: Path, bench: Bench, plans: Plans, lacking: Plans) -> None:
    """Write what ``benchmarks.common.read_measured_plans`` reads."""
    seconds = [entry["seconds"][2] for entry in bench.record.plans.values() if "seconds" in entry]
    document = {
        **bench.description(),
        "shapes": {tensor: list(observed.shape) for tensor, observed in bench.ranges.items()},
        "plan_s": rounded(float(np.median(seconds))) if seconds else None,  # to build and measure a plan
        "plans": _rows_of(bench, plans),
    }
    if bench.without_kernel:
        document["without_kernel"] = {
            "operators": sorted({node.op_type for node in bench.kernels.nodes[Precision.FP16]}),
            "groups": bench.without_kernel,
            "plans": _rows_of(bench, lacking),
        }
    save(path, document, lists=("groups", "plans"))


def _rows_of(bench: Bench, plans: Plans) -> list[dict[str, Any]]:
    """The plans that are measured, compact."""
    rows = []
    for kind, bits in plans:
        entry = bench.record.plans.get(bits)
        if entry is not None:
            figures = {key: rounded(entry.get(key, math.nan)) for key in ("latency_ms", "latency_sd_ms", "error")}
            emulated = bench.record.emulated.get(bits)
            row = {"kind": kind, "precision": bits, **figures, "finite": entry["finite"]}
            row["emulated"] = None if emulated is None else rounded(emulated)
            rows.append(row | ({"failure": entry["failure"]} if "failure" in entry else {}))
    return rows


def spread(plans: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of them, evenly spaced, the first and the last among them."""
    return [plans[k] for k in np.unique(np.linspace(0, len(plans) - 1, min(count, len(plans))).astype(int))]
