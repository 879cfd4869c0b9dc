"""The comparison as Markdown, and where it goes: tables for ``benchmarks/README.md``, a paragraph for README.md."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.replay import LATENCY_LIMITS, LIMITS, NAMES
from benchmarks.peers.table import Row
from benchmarks.peers.verdict import FIRST, LAST, MPTUNE, beaten_by, best, more_volume, ours, share, verdict
from mptune.files import write_text
from mptune.json_form import decode_float

_LIMIT = LIMITS.index(0.3)
"""The error limit that the summary names."""


_VERDICT = (
    "The goals, network by network. Hypervolumes* as a share of the front of the law, replayed, 50 builds; in bold who "
    "has more than mptune and the law's residual. Then the fastest plan, built and timed, within 0.1, 0.3 and 0.5 of "
    "all-FP16's error (± half of the 95 % interval): mptune's, or all-FP32 where nothing of its front is within the "
    "limit, and the best peer's.\n\n"
)


def insert(page: Path, text: str) -> None:
    """Replace what stands between the lines ``<!-- peers -->`` and ``<!-- /peers -->`` of a page.

    Raises:
        SystemExit: the page has not both of these lines, once each.
    """
    before, found, rest = page.read_text().partition("<!-- peers -->\n")
    _, closed, after = rest.partition("<!-- /peers -->\n")
    if not found or not closed:
        raise SystemExit(f"{page} has no lines <!-- peers --> and <!-- /peers -->")
    write_text(page, f"{before}<!-- peers -->\n{text.strip()}\n<!-- /peers -->\n{after}")


def headline(models: Mapping[str, Row]) -> str:
    """A paragraph for the main README; nothing where no plans were built and timed."""
    timed = [entry["measured"] for entry in models.values() if "measured" in entry and ours(entry["measured"], _LIMIT)]
    if not timed:
        return ""
    faster = [beaten_by(entry, _LIMIT) for entry in timed]
    text = (
        f"**Against other searches**, on {len(timed)} networks: the plans of Optuna's samplers, of bisection and of "
        "four converters were built and timed on an H200 beside mptune's. With at most 0.3 times all-FP16's error, "
        "another method's plan is faster than mptune's, beyond the 95 % intervals, on "
        f"{sum(map(bool, faster)) or 'none'}. "
        "[Tables, and where mptune loses](benchmarks/README.md#mptune-against-its-peers)."
    )
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def published(models: Mapping[str, Row]) -> str:
    """The part of ``benchmarks/README.md``: a summary, the verdict's table, and where mptune loses."""
    parts = [_summary(models), _VERDICT + verdict(models).partition("\n\n")[0]] if _with(models, MPTUNE) else []
    return "\n\n".join([*parts, *_missing(models), _lost(models)])


def tables(models: Mapping[str, Row]) -> str:
    """All tables of what ``table.compare`` found."""
    replays = {entry["what"]: entry["replayed"] for entry in models.values() if "replayed" in entry}
    parts = [_summary(models)] if _with(models, MPTUNE) else []
    if replays:
        parts.append(_VERDICT + verdict(models))
    if replays:
        parts += _replay_tables(replays)
    for entry in models.values():
        if "measured" in entry:
            parts.append(_measured_table(entry["what"], entry["measured"]))
    return "\n\n".join([*parts, *_missing(models), _lost(models)])


def _missing(models: Mapping[str, Row]) -> Iterable[str]:
    """The networks that a step was not run for."""
    for what, missing in (("replayed", "replayed"), ("built and timed in turn", "measured")):
        names = [entry["what"] for entry in models.values() if missing not in entry]
        if names:
            yield f"Not {what} yet: {'; '.join(names)}."


def _summary(models: Mapping[str, Row]) -> str:
    """How often mptune comes first, with as many builds."""
    replays = _with(models, MPTUNE)
    first = [not any(_rivals(entry, lambda row: -row["hypervolume"][FIRST][0])) for entry in replays]
    ratios = [share(entry, MPTUNE) / share(entry, NAMES["tpe"]) for entry in _with(models, MPTUNE, NAMES["tpe"])]
    text = f"With 50 builds mptune has the largest hypervolume* on {sum(first)} of {len(first)} networks"
    if ratios:
        text += f", {median(ratios):.2f} times TPE's in the median ({min(ratios):.2f} to {max(ratios):.2f})"
    limited = [e for e in replays if e["samplers"][MPTUNE]["at"][FIRST].get("latency_ms")]
    if limited:
        fastest = [not any(_rivals(entry, _limited_ms)) for entry in limited]
        text += f"; within 0.3 of all-FP16's error nobody's plan is faster* on {sum(fastest)} of {len(fastest)}"
    timed = [entry["measured"] for entry in models.values() if "measured" in entry and ours(entry["measured"], _LIMIT)]
    if timed:
        unbeaten = sum(not beaten_by(entry, _LIMIT) for entry in timed)
        text += f"; built and timed, nobody's is faster beyond the intervals on {unbeaten} of {len(timed)}"
    return "\n".join(textwrap.wrap(f"{text}.", 120, break_long_words=False, break_on_hyphens=False))


def _rivals(entry: Row, cost: Callable[[Row], float]) -> Iterable[str]:
    """Who costs less than mptune, of those with as many builds."""
    ours = cost(entry["samplers"][MPTUNE])
    for name, row in entry["samplers"].items():
        if name != MPTUNE and FIRST in row.get("hypervolume", {}) and cost(row) < ours:
            yield name


def _limited_ms(row: Row) -> float:
    """Latency within the error limit of the summary; infinite where there is none."""
    found = row["at"][FIRST].get("latency_ms")
    return math.inf if not found or found[_LIMIT] is None else float(found[_LIMIT])


# -- replays ----------------------------------------------------------------------------------------------------------


def _replay_tables(models: Mapping[str, Row]) -> list[str]:
    return [
        "Hypervolume* as a share of the front of the law, replayed: the median of the seeds (and the extremes). The "
        "last column: how many plans the law is fitted to, and how far it is off on plans left out of the fit.\n\n"
        + _by_network(models, FIRST, _volume, law=True),
        "The same after 200 builds; mptune's after 50.\n\n" + _by_network(models, LAST, _volume, law=False),
        "Least latency* in ms at 0.1 / 0.3 / 0.5 of all-FP16's error, 50 builds, replayed (median).\n\n"
        + _by_network(models, FIRST, lambda entry, row, at: _at(row, at, "latency_ms"), law=False),
        "Least error* at latencies of 10 % / 25 % / 50 % of the way from all-FP16's to all-FP32's, 50 builds, replayed "
        "(median).\n\n" + _by_network(models, FIRST, lambda entry, row, at: _at(row, at, "error"), law=False),
        "What the search itself takes, without builds: CPU seconds and peak MiB of the sampler's process, and plans "
        "emulated (of 50 builds with mptune and GP, of 200 with the others), replayed.\n\n"
        + _by_network(models, FIRST, _cost, law=False),
    ]  # fmt: skip


def _by_network(models: Mapping[str, Row], at: str, cell: Callable[[Row, Row, str], str], *, law: bool) -> str:
    """A row a network and a column a sampler, of those that have such figures; mptune always with its own budget."""

    def budget(row: Row) -> str | None:
        found = row.get("hypervolume", {})
        return at if at in found else FIRST if at == LAST and FIRST in found and row.get("cpu_s") else None

    names = [*NAMES.values(), "bisection"]
    names = [n for n in names if any(_has_figures(e["samplers"].get(n, {}), at, n) for e in models.values())]
    heads = [*names, *(["law: plans, off in latency, error"] if law else [])]
    lines = [f"| network | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for what, entry in models.items():
        cells = []
        for name in names:
            row = entry["samplers"].get(name, {})
            used = budget(row)
            cells.append("-" if used is None else cell(entry, row, used))
        if law:
            off = entry["law"]["residual"]
            cells.append(f"{entry['law']['plans']}, {off['latency']:.2%}, {math.expm1(off['log_error']):.1%}")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _has_figures(row: Mapping[str, Any], at: str, name: str) -> bool:
    return at in row.get("hypervolume", {}) or (name == MPTUNE and "hypervolume" in row)


def _volume(entry: Row, row: Row, at: str) -> str:
    middle, low, high = (value / entry["own_front"] for value in row["hypervolume"][at])
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _at(row: Row, at: str, key: str) -> str:
    values = row.get("at", {}).get(at, {}).get(key, [])
    if all(value is None for value in values):
        return "-"
    return " / ".join("-" if value is None else f"{value:.3g}" for value in values)


def _cost(entry: Row, row: Row, at: str) -> str:
    if "cpu_s" not in row:
        return "-"
    return f"{row['cpu_s']:.3g} s, {row['peak_mib']:.0f} MiB, {row['emulated']:.0f}"


def _with(models: Mapping[str, Row], *names: str) -> list[Row]:
    """The replays that have hypervolumes of all of these."""
    found = [entry["replayed"] for entry in models.values() if "replayed" in entry]
    return [e for e in found if all(FIRST in e["samplers"].get(n, {}).get("hypervolume", {}) for n in names)]


# -- built and timed --------------------------------------------------------------------------------------------------


def _measured_table(what: str, entry: Row) -> str:
    fp16 = entry["fp16"]
    head = f"**{what}**: all-FP32 {entry['baseline_ms']:.4g} ms"
    if fp16 is not None:
        error = decode_float(fp16["error"])
        words = f"with error {error:.2g}" if math.isfinite(error) else "with outputs that are not finite"
        head += f", all-FP16 {fp16['latency_ms']:.4g} ms {words}"
    if entry.get("without_kernel"):
        head += f" ({' and '.join(entry['without_kernel'])}, without an FP16 kernel, in FP32)"
    processes = entry.get("processes", 1)
    one = "; timed in one process, so the intervals do not hold what differs from process to process"
    head += f"; timed in {processes} processes" if processes > 1 else one
    others = [name for name, row in entry["peers"].items() if row.get("of_other_replay")]
    if others:
        head += f"; plans of an earlier replay than the tables above: {', '.join(others)}"
    errors = [f"ms at {limit:g} of its error" for limit in LIMITS]
    latencies = [f"error at FP16 + {share:.0%}" for share in LATENCY_LIMITS]
    columns = [*errors, *latencies, "hypervolume", "s", "MiB"]
    lines = [head, "", "| peer | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, row in entry["peers"].items():
        cells = [_latency_cell(one) for one in row["at_error"] or [None] * len(LIMITS)]
        cells += ["-" if one is None else f"{one['error']:.2g}" for one in row["at_latency"] or [None] * len(latencies)]
        figures = (row["seconds"], row["peak_mib"])
        cells += [f"{row['hypervolume']:.4f}", *("-" if value is None else f"{value:.3g}" for value in figures)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        f"| {name} | {words.replace('|', '/')} |" + " |" * (len(columns) - 1)
        for name, words in entry["crashed"].items()
    ]
    return "\n".join(lines)


def _latency_cell(one: Row | None) -> str:
    if one is None:
        return "-"
    low, high = one["ci95_ms"]
    return f"{one['latency_ms']:.4g} ({low:.4g} to {high:.4g})"


_WITHIN = " (less than the law is off on plans left out of its fit, {:.1%})"

# -- where mptune loses -----------------------------------------------------------------------------------------------


def _lost(models: Mapping[str, Row]) -> str:
    """Every figure above in which somebody with as many builds is before mptune."""
    lines = [line for entry in models.values() for line in (*_lost_replays(entry), *_lost_timings(entry))]
    head = "Where mptune loses, with as many builds (found by the script, not chosen):"
    return "\n".join([head, "", *(lines or ["- nowhere in these figures."])])


def _lost_replays(entry: Row) -> Iterable[str]:
    replays = entry.get("replayed")
    if replays is None or FIRST not in replays["samplers"].get(MPTUNE, {}).get("hypervolume", {}):
        return
    ours, off = replays["samplers"][MPTUNE], replays["law"]["residual"]
    for name, row in replays["samplers"].items():
        if name == MPTUNE or FIRST not in row.get("hypervolume", {}):
            continue
        if row["hypervolume"][FIRST][0] > ours["hypervolume"][FIRST][0]:
            theirs_share, our_share = (share(replays, one) for one in (name, MPTUNE))
            reason = "" if name in more_volume(replays) else _WITHIN.format(off["latency"])
            yield f"- {entry['what']}: hypervolume*, {name} {theirs_share:.3f}, mptune {our_share:.3f}{reason}"
        for key, what, limits, residual in (
            ("latency_ms", "ms at error", LIMITS, off["latency"]),
            ("error", "error at latency", LATENCY_LIMITS, off["log_error"]),
        ):
            theirs, own = (one["at"][FIRST].get(key, []) for one in (row, ours))
            for limit, mine, other in zip(limits, own, theirs, strict=False):
                if other is not None and (mine is None or other < mine):
                    is_within = mine is not None and mine <= other * math.exp(residual)
                    yield (
                        f"- {entry['what']}: {what} limit {limit:g}*, {name} {other:.4g}, "
                        f"mptune {'no plan' if mine is None else f'{mine:.4g}'}"
                        f"{_WITHIN.format(math.expm1(residual)) if is_within else ''}"
                    )


def _lost_timings(entry: Row) -> Iterable[str]:
    timed = entry.get("measured")
    if timed is not None:
        yield from _lost_volumes(entry["what"], timed["peers"])
    for number, limit in enumerate(LIMITS if timed is not None else ()):
        own = ours(timed, number) if timed is not None else None
        for name in beaten_by(timed, number) if timed is not None else ():
            theirs = best(timed, name.removesuffix(f", {FIRST} builds"), number)
            yield (
                f"- {entry['what']}, built: ms at {limit:g} of all-FP16's error, {name} {_latency_cell(theirs)}, "
                f"mptune {_latency_cell(own)}"
            )


def _lost_volumes(what: str, peers: Mapping[str, Row]) -> Iterable[str]:
    """The peers whose built plans have more hypervolume than mptune's; at equal builds.

    Nobody where some of mptune's front were not built: those that were are the ones for the limits, not its fast end.
    """
    ours = peers.get(f"{MPTUNE}, {FIRST} builds")
    for name, row in peers.items() if ours is not None and not ours["not_built"] else ():
        if not name.endswith(f", {LAST} builds") and ours is not None and row["hypervolume"] > ours["hypervolume"]:
            yield (
                f"- {what}, built: hypervolume, {name} {row['hypervolume']:.4f} ({row['points']} plans), "
                f"mptune {ours['hypervolume']:.4f} ({ours['points']} plans of its front)"
            )
