"""The comparison as Markdown for ``benchmarks/README.md``, and a paragraph for README.md.

A search may always fall back to all-FP32, which is exact, so its fastest plan within a limit is that one where it
built nothing faster. A peer beats mptune within a limit where its 95 % interval lies below mptune's; in hypervolume,
where it has more by more than the law is off. What a peer is better at is listed, however little it is.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.peers.replay import BUILDS, LIMITS, NAMES, SHARES
from benchmarks.peers.table import Row
from mptune.files import write_text

MPTUNE, TPE = NAMES["precision"], NAMES["tpe"]
OURS = f"{MPTUNE}, {BUILDS} builds"
_SUMMARY_LIMIT = LIMITS.index(3e-3)
_SUMMARY_SHARE = SHARES.index(0.3)
_WITHIN = " (less than the law is off on plans left out of its fit, {:.1%})"

_VERDICT = (
    "The goals, network by network. Hypervolumes* as a share of the front of the law, replayed, 50 builds; in bold who "
    "has more than mptune and the law's residual. Gains* are the share of the latency that the fastest plan within an "
    "error of 1 %, 0.3 % and 0.1 % saves, over that of the law's fastest plan; mptune's searches aim at that limit, "
    "and the best peer has the largest sum. Then the fastest plan, built and timed, within 0.1, 0.3 and 0.5 of "
    "all-FP16's error (± half of the 95 % interval): mptune's, or all-FP32 where nothing of its front is within the "
    "limit, and the best peer's.\n\n"
)


def insert(page: Path, text: str) -> None:
    """Replace what stands between the lines ``<!-- peers -->`` and ``<!-- /peers -->`` of a page.

    Raises:
        SystemExit: the page has not both of these lines, once each.
    """
    before, opening, rest = page.read_text().partition("<!-- peers -->\n")
    _, closing, after = rest.partition("<!-- /peers -->\n")
    if not opening or not closing:
        raise SystemExit(f"{page} has no lines <!-- peers --> and <!-- /peers -->")
    write_text(page, f"{before}<!-- peers -->\n{text.strip()}\n<!-- /peers -->\n{after}")


def headline(models: Mapping[str, Row]) -> str:
    """A paragraph for the main README; nothing where no plans were built and timed."""
    timed = _timed(models)
    faster = sum(bool(beaten_by(entry, _SUMMARY_SHARE)) for entry in timed)
    outcome = f"another method found a faster plan on {faster}" if faster else "no other method found a faster plan"
    text = (
        f"**Against other searches.** On {len(timed)} networks, the plans of Optuna's samplers, of bisection and of "
        "four converters were built and timed on an H200 beside mptune's. With at most 0.3 times all-FP16's error, "
        f"{outcome} (beyond the 95 % intervals). "
        "[Tables, and where mptune loses](benchmarks/README.md#mptune-against-its-peers)."
    )
    return _wrapped(text) if timed else ""


def published(models: Mapping[str, Row]) -> str:
    """The part of ``benchmarks/README.md``: a summary, the table of the goals, what was not run, where mptune loses."""
    parts = [_summary(models), _VERDICT + verdict(models)] if _replayed(models) else []
    for what, key in (("replayed", "replayed"), ("built and timed in turn", "measured")):
        if names := [entry["what"] for entry in models.values() if key not in entry]:
            parts.append(f"Not {what} yet: {'; '.join(names)}.")
    lost = [line for entry in models.values() for line in (*_lost_replays(entry), *_lost_timings(entry))]
    head = "Where mptune loses, with as many builds (found by the script, not chosen):"
    return "\n\n".join([*parts, "\n".join([head, "", *(lost or ["- nowhere in these figures."])])])


# -- who is better ----------------------------------------------------------------------------------------------------


def ours(entry: Row, at: int) -> Row | None:
    """mptune's fastest plan within a limit, or all-FP32; None where nothing of mptune was built, or no limit is known.

    Args:
        entry: of ``table.measured``.
        at: index of the limit in ``SHARES``.
    """
    row = entry["peers"].get(OURS)
    if row is None or row["at_error"] is None:
        return None
    plans = [plan for plan in (row["at_error"][at], entry["fp32"]) if plan is not None]
    return min(plans, key=lambda plan: float(plan["latency_ms"]))


def rivals(entry: Row, at: int) -> dict[str, Row]:
    """The fastest plan within a limit of each peer that has one; of searches with as many builds as mptune's."""
    plans = {name: row["at_error"] and row["at_error"][at] for name, row in entry["peers"].items() if name != OURS}
    return {name: plan for name, plan in plans.items() if plan is not None}


def beaten_by(entry: Row, at: int) -> list[str]:
    """The peers whose fastest plan within a limit is faster than mptune's beyond both intervals."""
    own = ours(entry, at)
    return [n for n, plan in rivals(entry, at).items() if own and plan["ci95_ms"][1] < own["ci95_ms"][0]]


def share(entry: Row, name: str) -> float:
    """A sampler's median hypervolume over that of the law's own front; of an entry of ``table.replayed``."""
    return float(entry["samplers"][name]["hypervolume"]) / float(entry["own_front"])


def more_volume(entry: Row) -> list[str]:
    """Who has more hypervolume than mptune with as many builds, by more than the law is off.

    A latency that is off by some share of the baseline everywhere moves the hypervolume by at most this share.
    """
    volumes = {name: row["hypervolume"] for name, row in entry["samplers"].items()}
    most = volumes.pop(MPTUNE) + entry["law"]["residual"]["latency"]
    return [name for name, volume in volumes.items() if volume > most]


def _replayed(models: Mapping[str, Row]) -> list[Row]:
    """The replays that have mptune's hypervolume."""
    entries = [entry["replayed"] for entry in models.values() if "replayed" in entry]
    return [entry for entry in entries if MPTUNE in entry["samplers"]]


def _timed(models: Mapping[str, Row]) -> list[Row]:
    """The networks of which plans were built and timed, mptune's among them."""
    entries = [entry["measured"] for entry in models.values() if "measured" in entry]
    return [entry for entry in entries if ours(entry, _SUMMARY_SHARE)]


# -- the texts --------------------------------------------------------------------------------------------------------


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _summary(models: Mapping[str, Row]) -> str:
    """How often mptune comes first, with as many builds."""

    def limited_ms(row: Row) -> float:
        latency_ms = row["latency_ms"][_SUMMARY_LIMIT] if row["latency_ms"] else None
        return math.inf if latency_ms is None else float(latency_ms)

    samplers = [entry["samplers"] for entry in _replayed(models)]
    first = sum(all(r["hypervolume"] <= rows[MPTUNE]["hypervolume"] for r in rows.values()) for rows in samplers)
    text = f"With {BUILDS} builds mptune has the largest hypervolume* on {first} of {len(samplers)} networks"
    if ratios := [rows[MPTUNE]["hypervolume"] / rows[TPE]["hypervolume"] for rows in samplers if TPE in rows]:
        text += f", {median(ratios):.2f} times TPE's in the median ({min(ratios):.2f} to {max(ratios):.2f})"
    if limited := [rows for rows in samplers if rows[MPTUNE]["latency_ms"]]:
        fastest = sum(all(limited_ms(row) >= limited_ms(rows[MPTUNE]) for row in rows.values()) for rows in limited)
        text += f"; within an error of 0.3 % nobody's plan is faster* on {fastest} of {len(limited)}"
    if timed := _timed(models):
        unbeaten = sum(not beaten_by(entry, _SUMMARY_SHARE) for entry in timed)
        text += f"; built and timed, nobody's is faster beyond the intervals on {unbeaten} of {len(timed)}"
    return _wrapped(f"{text}.")


def verdict(models: Mapping[str, Row]) -> str:
    """The table of the goals."""
    heads = ["network", "hypervolume*: mptune, best peer", "times TPE's*", "gains*: mptune; best peer"]
    heads += [f"ms at {share:g}: mptune, best peer" for share in SHARES]
    heads += ["no peer's is faster beyond noise"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {e['what']} | {' | '.join(_cells(e))} |" for e in models.values())])


def _cells(entry: Row) -> Iterator[str]:
    replayed, timed = entry.get("replayed"), entry.get("measured")
    if replayed is None or MPTUNE not in replayed["samplers"]:
        yield from ("-", "-", "-")
    else:
        shares = {name: share(replayed, name) for name in replayed["samplers"]}
        own = shares.pop(MPTUNE)
        first = max(shares, key=lambda name: shares[name], default=None)
        beaten = f" **({', '.join(names)})**" if (names := more_volume(replayed)) else ""
        yield f"{own:.3f}" + (f", {shares[first]:.3f} {first}" if first else "") + beaten
        yield f"{own / shares[TPE]:.2f}" if TPE in shares else "-"
        gains = {name: row["gains"] for name, row in replayed["samplers"].items()}
        best = max(shares, key=lambda name: sum(filter(None, gains[name])), default=None)
        yield _gains(gains[MPTUNE]) + (f"; {_gains(gains[best])} {best}" if best else "")
    if timed is None or ours(timed, 0) is None:
        yield from "-" * (len(SHARES) + 1)
        return
    for at in range(len(SHARES)):
        others = rivals(timed, at)
        name = min(others, key=lambda name: float(others[name]["latency_ms"]), default=None)
        yield f"{_half_width(ours(timed, at))}; " + (f"{_half_width(others[name])} {name}" if name else "nobody else")
    lost = {limit: names for at, limit in enumerate(SHARES) if (names := beaten_by(timed, at))}
    yield "; ".join(f"**{', '.join(names)} at {limit:g}**" for limit, names in lost.items()) or "yes"


def _gains(row: Sequence[float | None]) -> str:
    return ", ".join("-" if gain is None else f"{gain:.3f}" for gain in row) or "-"


def _half_width(plan: Row | None) -> str:
    assert plan is not None
    low, high = plan["ci95_ms"]
    return f"{plan['latency_ms']:.4g} ± {(high - low) / 2:.2g}"


def _interval(plan: Row | None) -> str:
    assert plan is not None
    low, high = plan["ci95_ms"]
    return f"{plan['latency_ms']:.4g} ({low:.4g} to {high:.4g})"


def _lost_replays(entry: Row) -> Iterator[str]:
    """Every replayed figure in which somebody with as many builds is before mptune."""
    replays = entry.get("replayed", {"samplers": {}})
    own = replays["samplers"].get(MPTUNE)
    for name, row in replays["samplers"].items() if own else ():
        off = replays["law"]["residual"]
        if share(replays, name) > share(replays, MPTUNE):
            within = "" if name in more_volume(replays) else _WITHIN.format(off["latency"])
            shares = f"{name} {share(replays, name):.3f}, mptune {share(replays, MPTUNE):.3f}"
            yield f"- {entry['what']}: hypervolume*, {shares}{within}"
        for limit, mine, other in zip(LIMITS, own["latency_ms"], row["latency_ms"], strict=False):
            if other is not None and (mine is None or other < mine):
                is_within = mine is not None and mine <= other * math.exp(off["latency"])
                within = _WITHIN.format(math.expm1(off["latency"])) if is_within else ""
                figure = "no plan" if mine is None else f"{mine:.4g}"
                yield f"- {entry['what']}: ms at error limit {limit:g}*, {name} {other:.4g}, mptune {figure}{within}"


def _lost_timings(entry: Row) -> Iterator[str]:
    """Every figure that was built and timed in which somebody with as many builds is before mptune."""
    timed = entry.get("measured", {"peers": {}})
    own = timed["peers"].get(OURS)
    # Not where some of mptune's front were not built: those that were are the ones for the limits, not its fast end.
    for name, row in timed["peers"].items() if own is not None and not own["not_built"] else ():
        if row["hypervolume"] > own["hypervolume"]:
            theirs, mine = (f"{r['hypervolume']:.4f} ({r['points']} plans" for r in (row, own))
            yield f"- {entry['what']}, built: hypervolume, {name} {theirs}), mptune {mine} of its front)"
    for at, limit in enumerate(SHARES):
        for name in beaten_by(timed, at):
            mine, theirs = _interval(ours(timed, at)), _interval(rivals(timed, at)[name])
            yield f"- {entry['what']}, built: ms at {limit:g} of all-FP16's error, {name} {theirs}, mptune {mine}"
