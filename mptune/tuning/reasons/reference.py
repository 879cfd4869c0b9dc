"""What is wrong with the model in FP32 already, as findings: no plan repairs these, or errors say nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mptune.engines.base import Place, ReferenceReport
from mptune.engines.toolchains.blame import ALONG_SEQUENCE, BY_INDEX
from mptune.finding import Evidence, Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import Severity
from mptune.graph.facts import attribute
from mptune.graph.loading.model import Model, needed_nodes
from mptune.graph.ops import RANDOM

REPEAT_WARNING, REPEAT_LIMIT = 1e-5, 1e-2
"""Two runs on the same sample that differ by more than the limit: the model is not deterministic, and errors mean
nothing. Below, a node that draws random numbers is an error, too, and anything else a warning."""
ROWS_WARNING, ROWS_LIMIT = 1e-4, 1e-2
"""Rows of a batch that depend on the other rows: relative L2."""
_BEYOND_REPEATS = 10.0
"""How many times more than two runs rows differ, to depend on the other rows."""
_STEPS = frozenset({"QuantizeLinear", "Round", "Floor", "Ceil"})
"""What takes each element to a step by itself: rows that first differ there differ by rounding before it."""


def training_findings(model: Model, origin: FindingOrigin, *, is_run: bool) -> tuple[Finding, ...]:
    """Nodes that are left in training mode or draw random numbers, as the graph alone shows them.

    ``is_run``: the model is run twice, too, which shows what random numbers do, but not what training mode does.
    """
    wrong: dict[str, tuple[str, str]] = {}
    for node in needed_nodes(model, [info.name for info in model.outputs]):
        if not node.is_standard:
            continue
        if node.op_type == "BatchNormalization" and attribute(node, "training_mode") == 1:
            wrong[node.name] = "norm", node.op_type
        elif node.op_type == "Dropout":
            inputs = [model.initializers[n].numpy() if n in model.initializers else None for n in node.inputs[1:3]]
            ratio, training = (*inputs, None, None)[:2]
            if training is not None and bool(training) and (ratio is None or float(ratio) > 0):
                wrong[node.name] = "dropout", node.op_type
        elif node.op_type in RANDOM and not is_run:
            wrong[node.name] = "random", node.op_type
    if not wrong:
        return ()
    name, (kind, operator) = min(wrong.items(), key=lambda item: item[1][0] != "norm")
    evidence: Evidence = {"nodes": len(wrong), "operator": operator}
    where, more = Where(nodes=tuple(wrong)), len(wrong) - 1 or ""
    return (Finding.of("not-deterministic", origin, where, evidence, kind=kind, node=name, more=more),)


def without_repetition(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without what runs showed of nodes that the graph alone names: a code and a place are named once."""
    kept: list[Finding] = []
    for finding in findings:
        if finding.code != "not-deterministic" or not any(f.code == finding.code and f.where.nodes for f in kept):
            kept.append(finding)
    return tuple(kept)


def reference_findings(
    report: ReferenceReport, origin: FindingOrigin, indices: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """What the reference runs on samples showed; ``indices`` are those of the samples in the data."""
    outputs, places, findings = report.outputs, report.places, []

    def add(
        code: str, names: Iterable[str], evidence: Evidence, kind: str = "", place: Place | None = None, **texts: Any
    ) -> None:
        """A finding about outputs, with the node, or the input, where it begins."""
        where = Where(outputs=tuple(map(OutputColumns, names)), samples=texts.pop("samples", ()))
        if place is not None:
            at: dict[str, Any] = {"nodes": (place.node,)} if place.node else {"inputs": (place.tensor,)}
            where = replace(where, tensors=(place.tensor,), **at)
            evidence = {**evidence, "operator": place.op_type} if place.node else evidence
        texts["place"] = "" if place is None else place.shown
        findings.append(Finding.of(code, origin, where, evidence, kind=kind, **texts))

    # Outputs that are not finite.
    bad = {name: int(facts["non_finite"]) for name, facts in outputs.items() if facts["non_finite"]}
    if bad:
        placed = ((name, p) for (code, name), p in places.items() if code == "reference-not-finite")
        name, place = next(placed, (next(iter(bad)), None))
        sample, count = (int(outputs[name].get(key, least)) for key, least in (("bad_sample", 0), ("bad_samples", 1)))
        sample = indices[sample] if sample < len(indices) else sample
        evidence: dict[str, int | float | str] = {"non_finite": bad[name], "sample": sample}
        kind = "" if place is None else f"{place.op_type} {str(place.value).removeprefix('-')}"
        evidence |= {} if place is None else {"value": place.value}
        counts = {"bad_samples": count, "of_samples": int(outputs[name]["samples"])} if count > 1 else {}
        add("reference-not-finite", bad, evidence, kind, place, samples=(sample,), output=name, **counts)

    # An output that says nothing is a warning; where all are, an error.
    empty = [name for name, facts in outputs.items() if facts.get("size", 1.0) == 0]
    zero = [name for name, facts in outputs.items() if facts["zero_fraction"] >= 1.0]
    if empty and len(empty) == len(outputs):
        add("reference-zero", empty, {"size": 0}, "empty")
    elif zero and len(zero) == len(outputs):
        place = next((p for name in zero if (p := places.get(("output-constant", name))) is not None), None)
        add("reference-zero", zero, {"zero_fraction": 1.0}, place=place)
    else:
        for name, facts in outputs.items():
            place = places.get(("output-constant", name))
            if name in empty:
                add("output-constant", [name], {"size": 0}, "empty")
            # A table that follows from no input, such as anchors, is what it is meant to be.
            elif name in zero or (facts.get("constant") and place is not None):
                shares = {"absmax": facts["absmax"], "zero_fraction": facts["zero_fraction"]}
                add("output-constant", [name], shares, "zero" if name in zero else "", place)

    if not report.repeat_error <= REPEAT_WARNING:
        place = places.get(("not-deterministic", ""))
        draws = place is not None and place.op_type in RANDOM | {"Dropout"}
        kind = "" if draws or not report.repeat_error <= REPEAT_LIMIT else "noise"
        numbers = {"relative_l2": report.repeat_error, "limit": REPEAT_LIMIT}
        add("not-deterministic", (), numbers, kind, place, samples=(indices[0] if indices else 0,))

    # Rows that depend on the other rows of their batch. What differs as two runs do says nothing of it.
    rows, least = report.rows, max(ROWS_WARNING, _BEYOND_REPEATS * report.repeat_error)
    output, error = rows.worst_mixed
    if not error <= least:
        kind = "others" if rows.is_fixed else "mixed"
        place = places.get(("rows-mix", output))
        severity: Severity | None = "warning" if error <= ROWS_LIMIT else None
        if place is not None and place.value in (ALONG_SEQUENCE, BY_INDEX):
            kind, severity = f"{kind} {place.value}", None
        elif place is not None and place.op_type.rpartition(".")[2] in _STEPS and math.isfinite(error):
            kind, severity = f"{kind} step", None
        numbers = {"relative_l2": error, "limit": ROWS_LIMIT, "rows": rows.rows, "row": rows.mixed_row}
        add("rows-mix", [output], numbers, kind, place, severity=severity)

    # Outputs that lost the batch or do not run with one.
    for name, shape in rows.lost.items():
        lost: Evidence = {"rows": rows.rows, "shape": str(list(shape)), "declared": rows.declared[name]}
        add("batch-not-kept", [name], lost, place=places.get(("batch-not-kept", name)))
    if rows.failure:
        where = Where(nodes=(rows.failed_node,) if rows.failed_node else ())
        evidence = {"rows": rows.rows, "rows_that_run": rows.ran}
        findings.append(Finding.of("batch-not-kept", origin, where, evidence, kind="fails", failure=rows.failure))
    return tuple(findings)
