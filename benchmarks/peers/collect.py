"""Plans of one model measured on the device, with what a search would know of it: what replays rest on.

Both uniform plans, every group alone in FP16, and random ones. As in a search, groups whose operators have no FP16
kernel on the device stay in FP32 in all of them: such a node runs on the CPU, and what that costs differs from process
to process. A few plans with them in FP16 are measured last; they stand by themselves in the file. Emulations
are held against the same files (``benchmarks.emulation``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
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

_EMULATION_SHARE = 0.3
"""Of the time there is, for emulating."""

_SAVE_EVERY_S = 10.0

_WITHOUT_KERNEL = 3
"""Random plans in which groups without an FP16 kernel may be FP16."""


def collect(
    model: PeerModel,
    work: Path,
    results: Path,
    *,
    random: int,
    front: int,
    alone: int,
    provider: str,
    target: str,
    limit_s: float,
) -> bool:
    """Measure what is left of a model's plans; returns whether nothing is.

    Args:
        model: which.
        work: folder of models and records.
        results: folder of the files that are written.
        random: random plans.
        front: plans along the front of the law that is fitted to the others.
        alone: groups that are built alone in FP16; the other groups alone are emulated only.
        provider: ``cuda`` or ``cpu``.
        target: whose roofline is taken.
        limit_s: seconds.
    """
    deadline = time.monotonic() + limit_s
    out, known = results / f"h200_plans_{model.name}.json", results / f"peers_known_{model.name}.json"
    options = model.options(work, "bench", provider=provider, target=target)
    with Bench(options, plan_timeout_s=PLAN_TIMEOUT_S) as bench:
        if time.monotonic() < deadline:
            know(bench, known)
        every = plans_to_measure(bench, random)
        ones = [bits for kind, bits in every if kind == "one-group"]
        unbuilt = set(ones) - set(_spread(ones, alone)) - set(bench.record.plans)
        alone_too = [(kind, bits) for kind, bits in every if kind == "one-group" and bits not in unbuilt]
        # in the order of importance: of plans of many groups a law learns more
        plans = [(kind, bits) for kind, bits in every if kind != "one-group"]
        stage = partial(_measure, bench, out, deadline=deadline)
        stage(plans, ones)
        know(bench, known)
        if _is_whole(bench, plans, ones) and not bench.record.marked.get("front"):
            fitted = read_measured_plans(out)
            world = World(read_known(known), fitted, fit_laws(read_known(known), fitted))
            for bits in along_the_front(world, front, {bits for _, bits in every}):
                bench.record.mark(bits, "front")
        plans += [*(("front", bits) for bits in bench.record.marked.get("front", ())), *alone_too]
        stage(plans, ones)
        lacking = plans_without_kernel(bench)  # last: they take seconds each, and no law needs them
        _build_and_time(bench, lacking, deadline, lambda: write(out, bench, plans))
        write(out, bench, plans)
        done = sum(bits in bench.record.plans for _, bits in (*plans, *lacking))
        wanted = {*ones, *(bits for _, bits in plans)}
        emulated = sum(bits in bench.record.emulated for bits in wanted)
        whole = done == len(plans) + len(lacking) and emulated == len(wanted)
    print(f"{model.name}: {done} of {len(plans) + len(lacking)} plans measured, {emulated} of {len(wanted)} emulated")
    return whole


def _is_whole(bench: Bench, plans: list[tuple[str, str]], only_emulated: Collection[str]) -> bool:
    record, wanted = bench.record, [bits for _, bits in plans]
    return all(b in record.plans for b in wanted) and all(b in record.emulated for b in (*only_emulated, *wanted))


def _measure(
    bench: Bench,
    out: Path,
    plans: list[tuple[str, str]],
    only_emulated: Sequence[str],
    *,
    deadline: float,
) -> None:
    """Measure plans, emulate these and others, as far as there is time; what is in the record already costs nothing."""

    def save_all() -> None:
        write(out, bench, plans)

    left = max(0.0, deadline - time.monotonic())
    _build_and_time(bench, plans, deadline - _EMULATION_SHARE * left, save_all)
    for bits in [*only_emulated, *(bits for _, bits in plans if bits in bench.record.plans)]:
        if time.monotonic() < deadline:
            bench.emulate(bits)
    save_all()


def _build_and_time(
    bench: Bench, plans: Sequence[tuple[str, str]], deadline: float, save_all: Callable[[], None]
) -> None:
    """As many as there is time for; ``save_all`` is called every few seconds."""
    saved = time.monotonic()
    for _, bits in plans:
        if time.monotonic() >= deadline:
            break
        bench.measure(bits)
        if time.monotonic() - saved > _SAVE_EVERY_S:
            save_all()
            saved = time.monotonic()
    save_all()


def plans_to_measure(bench: Bench, count: int) -> list[tuple[str, str]]:
    """Kind and bits of each plan, each plan once; groups without an FP16 kernel are FP32 in all of them."""
    groups, kept = bench.groups, bench.without_kernel
    free = [g.pinned is None and g.id not in kept for g in groups]
    plans = [("uniform", "0" * len(groups)), ("uniform", "".join("01"[one] for one in free))]
    alone = one_group_plans(bench.model, groups)
    plans += [("one-group", bench.bits(alone[g.id])) for g, is_free in zip(groups, free, strict=True) if is_free]
    plans += [("random", bits) for bits in random_plans(groups, count, 0, kept)]
    unique: dict[str, str] = {}
    for kind, bits in plans:
        unique.setdefault(bits, kind)
    return [(kind, bits) for bits, kind in unique.items()]


def plans_without_kernel(bench: Bench) -> list[tuple[str, str]]:
    """All-FP16 and a few random plans with groups without an FP16 kernel in FP16; none where every group has one."""
    if not bench.without_kernel:
        return []
    plans = [("uniform", "".join("01"[g.pinned is None] for g in bench.groups))]
    return plans + [("random", bits) for bits in random_plans(bench.groups, _WITHOUT_KERNEL, 0)]


def _rows_of(bench: Bench, plans: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The plans that are measured, compact."""
    rows = []
    for kind, bits in plans:
        entry = bench.record.plans.get(bits)
        if entry is None:
            continue
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
            }
        )
        if "failure" in entry:
            rows[-1]["failure"] = entry["failure"]
    return rows


def write(path: Path, bench: Bench, plans: Sequence[tuple[str, str]]) -> None:
    """Write what ``benchmarks.common.read_measured_plans`` reads."""
    taken = [entry["seconds"][2] for entry in bench.record.plans.values() if "seconds" in entry]
    document = {
        **bench.description(),
        "shapes": {tensor: list(seen.shape) for tensor, seen in bench.ranges.items()},
        "plan_s": rounded(float(np.median(taken))) if taken else None,  # to build and measure a plan
        "plans": _rows_of(bench, plans),
    }
    if bench.without_kernel:
        document["without_kernel"] = {
            "operators": sorted({node.op_type for node in bench.kernels.nodes[Precision.FP16]}),
            "groups": bench.without_kernel,
            "plans": _rows_of(bench, plans_without_kernel(bench)),
        }
    save(path, document, lists=("groups", "plans"))


def along_the_front(world: World, count: int, but: set[str]) -> list[str]:
    """Plans spread along the law's front, each of them new."""
    found = [bits for bits in map(world.bits, world.near_exact()) if bits not in but]
    return _spread(found, count)


def _spread(found: list[str], count: int) -> list[str]:
    """At most so many of them, evenly; the first and the last among them."""
    return [found[k] for k in np.unique(np.linspace(0, len(found) - 1, min(count, len(found))).astype(int))]
