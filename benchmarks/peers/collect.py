"""Plans of one model measured on the device, with what a search would know of it: what replays rest on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import read_measured_plans
from benchmarks.measured_plans import emulate, measure, plans_to_measure, plans_without_kernel, write
from benchmarks.measuring import Bench, open_bench
from benchmarks.peers.beside import Beside
from benchmarks.peers.known import know, read_known
from benchmarks.peers.models import PeerModel
from benchmarks.peers.world import World, fit_laws

PLAN_TIMEOUT_S = 30.0
"""Of one plan: one that hangs, or takes seconds a run, must not eat what many others need."""

_EMULATION_SHARE = 0.3
"""Of the time there is, for emulating."""


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
    jobs: int = 1,
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
        jobs: processes that emulate on the CPU while the device measures; with one the device's process does both.
    """
    deadline = time.monotonic() + limit_s
    out, known = results / f"h200_plans_{model.name}.json", results / f"peers_known_{model.name}.json"
    options = model.options(work, "bench", provider=provider, target=target)
    with open_bench(options, statistics=False, plan_timeout_s=PLAN_TIMEOUT_S) as bench:
        if time.monotonic() < deadline:
            know(bench, known)
        every = plans_to_measure(bench, random, seed=0)
        ones = [bits for kind, bits in every if kind == "one-group"]
        unbuilt = set(ones) - set(_spread(ones, alone)) - set(bench.record.plans)
        alone_too = [(kind, bits) for kind, bits in every if kind == "one-group" and bits not in unbuilt]
        # in the order of importance: of plans of many groups a law learns more
        plans = [(kind, bits) for kind, bits in every if kind != "one-group"]
        stage = partial(_measure, bench, out, deadline=deadline, options=options, jobs=jobs)
        stage(plans, ones)
        know(bench, known)
        if _is_whole(bench, plans, ones) and not bench.record.marked.get("front"):
            fitted = read_measured_plans(out)
            world = World(read_known(known), fitted, fit_laws(read_known(known), fitted))
            for bits in along_the_front(world, front, {bits for _, bits in every}):
                bench.record.mark(bits, "front")
        plans += [*(("front", bits) for bits in bench.record.marked.get("front", ())), *alone_too]
        stage(plans, ones)
        lacking = plans_without_kernel(bench, seed=0)  # last: they take seconds each, and no law needs them
        measure(bench, lacking, deadline, lambda: write(out, bench, plans, {}))
        write(out, bench, plans, {})
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
    options: argparse.Namespace,
    jobs: int,
) -> None:
    """Measure plans, emulate these and others, as far as there is time; what is in the record already costs nothing."""

    def save() -> None:
        write(out, bench, plans, {})

    left = max(0.0, deadline - time.monotonic())
    if jobs > 1:
        with Beside(bench, options, [*only_emulated, *(bits for _, bits in plans)], jobs) as beside:
            measure(bench, plans, deadline, save)
            beside.take(deadline)
    else:
        measure(bench, plans, deadline - _EMULATION_SHARE * left, save)
        emulate(bench, [*only_emulated, *(bits for _, bits in plans if bits in bench.record.plans)], deadline)
    save()


def along_the_front(world: World, count: int, but: set[str]) -> list[str]:
    """Plans spread along the law's front, each of them new."""
    found = [bits for bits in map(world.bits, world.near_exact()) if bits not in but]
    return _spread(found, count)


def _spread(found: list[str], count: int) -> list[str]:
    """At most so many of them, evenly; the first and the last among them."""
    return [found[k] for k in np.unique(np.linspace(0, len(found) - 1, min(count, len(found))).astype(int))]
