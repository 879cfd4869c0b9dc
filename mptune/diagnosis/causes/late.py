"""Rows that are another row's result, wholly (stale) or in part (torn)."""

from __future__ import annotations

from collections.abc import Sequence

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.patterns.stale import Stale, find_stale
from mptune.diagnosis.sides import Side
from mptune.finding import Finding, OutputColumns

_SYNCHRONISE = (
    "no plan repairs this: synchronise the stream before the outputs are read (cudaStreamSynchronize, or"
    " stream.synchronize()), and give each run in flight buffers of its own"
)
_ONE_ROW = (
    "no plan repairs this: see whether the batch was fixed at 1 where the model was exported or the engine built"
    " (dynamic axes, optimisation profile), and whether the input is copied for each run"
)


def stale_rows(outputs: Sequence[Side]) -> list[Finding]:
    """``stale-rows`` and ``torn-rows``; not of two models, which ran here."""
    findings = []
    for side in outputs:
        if side.difference is None or side.sides.origin == "model":
            continue
        stale = find_stale(side.difference, side.sides.batch)
        if stale is not None:
            findings.append(stale_finding(side, stale))
    return findings


def stale_finding(side: Side, stale: Stale) -> Finding:
    """The finding for one output."""
    code = "torn-rows" if stale.torn else "stale-rows"
    rows, example = stale.torn or stale.whole, stale.example
    source = stale.source[example]
    which = f"row {example} equals the reference's row {source}"
    if stale.torn:
        which = f"row {example} is part its own result and part that of row {source}"
    whole = f", {len(stale.whole)} are wholly another row's" if stale.torn and stale.whole else ""
    lag = f"the source is most often {stale.lag} row{'s' * (stale.lag != 1)} before" if stale.lag > 0 else ""
    if stale.is_one_row:
        lag = f"so do all {len(rows)} that differ"
    text = f"output {side.name!r}: {len(rows)} of {side.row_count} rows are {code.split('-')[0]}{whole}: {which}"
    evidence: dict[str, int | float | str] = {
        "share": stale.share,
        "rows": len(stale.rows),
        "torn": len(stale.torn),
        "lag": stale.lag,
        "row": example,
        "source_row": source,
        "error": side.error,
    }
    return finding(
        code,
        (OutputColumns(side.name),),
        evidence,
        f"{text}; {lag}" if lag else text,
        _ONE_ROW if stale.is_one_row else _SYNCHRONISE,
        samples=side.samples_of(stale.rows),
    )
