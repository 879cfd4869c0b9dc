"""Whether mptune holds its own against each peer, network by network: the goals of the comparison, as one table.

A search may always fall back to all-FP32, which is exact, so its fastest plan within a limit is that one where it
found nothing faster. A peer beats mptune within a limit where its 95 % interval lies below mptune's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from benchmarks.peers.replay import FINAL, LIMITS, NAMES
from benchmarks.peers.table import Row

MPTUNE = NAMES["precision"]
TPE = NAMES["tpe"]
FIRST, LAST = map(str, (FINAL[0], FINAL[-1]))


def best(entry: Row, name: str, at: int) -> Row | None:
    """The fastest plan of a peer within a limit, of its 50 builds where it is a search; None where it has none.

    Args:
        entry: of ``table.measured``.
        name: of the peer.
        at: index of the limit in ``LIMITS``.
    """
    row = entry["peers"].get(f"{name}, {FIRST} builds") or entry["peers"].get(name)
    found: Row | None = row["at_error"][at] if row is not None and row["at_error"] is not None else None
    return found


def ours(entry: Row, at: int) -> Row | None:
    """mptune's fastest plan within a limit, or all-FP32; None where nothing of mptune was built, or no limit is known.

    Args:
        entry: of ``table.measured``.
        at: index of the limit in ``LIMITS``.
    """
    row = entry["peers"].get(f"{MPTUNE}, {FIRST} builds")
    if row is None or row["at_error"] is None:
        return None
    found = [one for one in (row["at_error"][at], entry["fp32"]) if one is not None]
    return min(found, key=lambda one: float(one["latency_ms"]))


def rivals(entry: Row, at: int) -> dict[str, Row]:
    """The fastest plan within a limit of each peer that has one; of searches with as many builds as mptune's."""
    names = [n for n in entry["peers"] if not n.startswith(MPTUNE) and not n.endswith(f", {LAST} builds")]
    found = {name: best(entry, name.removesuffix(f", {FIRST} builds"), at) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def beaten_by(entry: Row, at: int) -> list[str]:
    """The peers whose fastest plan within a limit is faster than mptune's beyond both intervals."""
    own = ours(entry, at)
    if own is None:
        return []
    return [name for name, one in rivals(entry, at).items() if one["ci95_ms"][1] < own["ci95_ms"][0]]


def share(entry: Row, name: str, at: str = FIRST) -> float:
    """A sampler's median hypervolume over that of the law's own front; of an entry of ``table.replayed``."""
    return float(entry["samplers"][name]["hypervolume"][at][0]) / float(entry["own_front"])


def more_volume(entry: Row) -> list[str]:
    """Who has more hypervolume than mptune with as many builds, by more than the law is off.

    A latency that is off by some share of the baseline everywhere moves the hypervolume by at most this share.

    Args:
        entry: of ``table.replayed``, with figures of mptune.
    """
    volumes = {n: row["hypervolume"][FIRST][0] for n, row in entry["samplers"].items() if _has_volume(row)}
    most = volumes.pop(MPTUNE) + entry["law"]["residual"]["latency"]
    return [name for name, volume in volumes.items() if volume > most]


def verdict(models: Mapping[str, Row]) -> str:
    """The table, of ``table.compare``, and a line that sums it up."""
    heads = ["network", "hypervolume*: mptune, best peer", "times TPE's*"]
    heads += [f"ms at {limit:g}: mptune, best peer" for limit in LIMITS]
    heads += ["no peer's is faster beyond noise"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    lines += [f"| {entry['what']} | {' | '.join(_cells(entry))} |" for entry in models.values()]
    return "\n".join([*lines, "", *_summary(models.values())])


def _cells(entry: Row) -> Iterable[str]:
    replayed, timed = entry.get("replayed"), entry.get("measured")
    if replayed is None or not _has_volume(replayed["samplers"].get(MPTUNE, {})):
        yield from ("-", "-")
    else:
        others = [name for name, row in replayed["samplers"].items() if name != MPTUNE and _has_volume(row)]
        first = max(others, key=lambda name: share(replayed, name), default=None)
        beaten = f" **({', '.join(found)})**" if (found := more_volume(replayed)) else ""
        yield f"{share(replayed, MPTUNE):.3f}" + (f", {share(replayed, first):.3f} {first}" if first else "") + beaten
        yield f"{share(replayed, MPTUNE) / share(replayed, TPE):.2f}" if TPE in others else "-"
    for at in range(len(LIMITS)):
        yield "-" if timed is None else _at(timed, at)
    if timed is None or ours(timed, 0) is None:
        yield "-"
    else:
        lost = {limit: found for at, limit in enumerate(LIMITS) if (found := beaten_by(timed, at))}
        yield "; ".join(f"**{', '.join(names)} at {limit:g}**" for limit, names in lost.items()) or "yes"


def _at(timed: Row, at: int) -> str:
    own, others = ours(timed, at), rivals(timed, at)
    if own is None:
        return "-"
    if not others:
        return f"{_latency(own)}; nobody else"
    name = min(others, key=lambda one: float(others[one]["latency_ms"]))
    return f"{_latency(own)}; {_latency(others[name])} {name}"


def _latency(one: Row) -> str:
    """With its interval: half of its width."""
    low, high = one["ci95_ms"]
    return f"{one['latency_ms']:.4g} ± {(high - low) / 2:.2g}"


def _summary(entries: Iterable[Row]) -> Iterable[str]:
    entries = list(entries)
    replays = [e["replayed"] for e in entries if "replayed" in e]
    replays = [e for e in replays if _has_volume(e["samplers"].get(MPTUNE, {}))]
    timed = [e["measured"] for e in entries if "measured" in e and ours(e["measured"], 0) is not None]
    ratios = [share(e, MPTUNE) / share(e, TPE) for e in replays if _has_volume(e["samplers"].get(TPE, {}))]
    most = sum(not more_volume(e) for e in replays)
    yield f"- Largest hypervolume*, less the law's residual: on {most} of {len(replays)}."
    if ratios:
        yield f"- Times TPE's hypervolume*: {median(ratios):.2f} in the median, {min(ratios):.2f} to {max(ratios):.2f}."
    for at, limit in enumerate(LIMITS):
        unbeaten = sum(not beaten_by(e, at) for e in timed)
        yield f"- At {limit:g} of all-FP16's error, built: nobody faster beyond noise on {unbeaten} of {len(timed)}."


def _has_volume(row: Mapping[str, object]) -> bool:
    volumes = row.get("hypervolume")
    return isinstance(volumes, Mapping) and FIRST in volumes and math.isfinite(volumes[FIRST][0])
