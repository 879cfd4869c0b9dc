"""What is wrong with the model in FP32 already, and what hides behind the one number of the chosen plan, as findings.

No plan repairs the former, or errors say nothing. The latter: a column that moves more than its tensor shows, one
sample that makes the error, held-out samples that differ, an engine that does not do what was emulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mptune.data.metrics.accuracy import MANY_FOREIGN
from mptune.data.metrics.parts import belongs_to
from mptune.data.metrics.table import METRICS
from mptune.data.samples import split_indices
from mptune.engines.base import Place, ReferenceReport
from mptune.engines.toolchains.blame import ALONG_SEQUENCE, BY_INDEX, REPEAT_WARNING
from mptune.engines.toolchains.rows import ROWS_WARNING
from mptune.finding import Evidence, Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import Severity
from mptune.graph.facts import attribute
from mptune.graph.loading.model import Model, needed_nodes
from mptune.graph.ops import RANDOM, RECURRENT
from mptune.run_json import RunFile
from mptune.tuning.evaluation import EMULATION_FACTOR, Evaluation

REPEAT_LIMIT = 1e-2
"""Two runs on the same sample that differ by more: the model is not deterministic, and errors mean nothing. Below, a
node that draws random numbers is an error, too, and anything else a warning."""
ROWS_LIMIT = 1e-2  # rows of a batch that depend on the other rows: relative L2
_BEYOND_REPEATS = 10.0  # times more than two runs rows differ, to depend on the other rows
_STEPS = frozenset({"QuantizeLinear", "Round", "Floor", "Ceil"})
"""What takes each element to a step by itself: rows that first differ there differ by rounding before it."""

# Of columns: shares of a column's own standard deviation.
LEAST = 1e-2  # smaller errors are no finding, whatever the tensor shows
LEAST_HIDDEN = 5e-2  # large enough to be called hidden; untrained networks reach 2 % without harm
HIDDEN = 10.0  # times larger than the relative L2 error of its output is an error that is hidden by it
TINY = 2.0**-14  # the smallest normal FP16 number: an absolute error below it comes from values near zero
# Of samples.
FAR_ABOVE, _LEAST_SAMPLES = 10.0, 4  # times the median of the others decides alone, if there are this many
HELD_OUT_FACTOR = 5.0  # times larger than the error of the search samples differs
_LEAST_ERROR = 1e-3  # smaller relative errors are what FP16 gives anyway, and no worry


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
    return (Finding.from_code("not-deterministic", origin, where, evidence, kind=kind, node=name, more=more),)


def without_repetition(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without what runs showed of nodes that the graph alone names: a code and a place are named once."""
    unrepeated: list[Finding] = []
    for finding in findings:
        if finding.code != "not-deterministic" or not any(f.code == finding.code and f.where.nodes for f in unrepeated):
            unrepeated.append(finding)
    return tuple(unrepeated)


def with_suspects(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, a broadcast as a warning once the engine is seen to differ from the reference."""
    is_suspect = any(finding.code == "engine-differs" for finding in findings)
    return tuple(replace(f, severity="warning") if is_suspect and f.code == "broadcast" else f for f in findings)


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
        findings.append(Finding.from_code(code, origin, where, evidence, kind=kind, **texts))

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
        kind = "fixed" if rows.is_fixed else ""
        place = places.get(("rows-mix", output))
        severity: Severity | None = "warning" if error <= ROWS_LIMIT else None
        if place is not None and place.value in (ALONG_SEQUENCE, BY_INDEX):
            kind, severity = str(place.value), None
        elif place is not None and place.op_type.rpartition(".")[2] in _STEPS and math.isfinite(error):
            kind, severity = "step", None
        numbers = {"relative_l2": error, "limit": ROWS_LIMIT, "rows": rows.rows, "row": rows.mixed_row}
        add("rows-mix", [output], numbers, kind, place, severity=severity)

    # Outputs that lost the batch or do not run with one.
    for name, shape in rows.lost.items():
        lost: Evidence = {"rows": rows.rows, "shape": str(list(shape)), "declared": rows.declared[name]}
        place = places.get(("batch-not-kept", name))
        kind = "sequence" if place is not None and place.op_type in RECURRENT else ""
        add("batch-not-kept", [name], lost, kind, place)
    if rows.failure:
        where = Where(nodes=(rows.failed_node,) if rows.failed_node else ())
        evidence = {"rows": rows.rows, "rows_that_run": rows.ran}
        findings.append(
            Finding.from_code("batch-not-kept", origin, where, evidence, kind="fails", failure=rows.failure)
        )
    return tuple(findings)


class SampleIndices(NamedTuple):
    """Index in the user's data of each search sample and of each held-out one; empty where not known."""

    search: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()


def sample_indices(file: RunFile) -> SampleIndices:
    """Those of a run; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    split = split_indices(file.data.samples // steps, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))


def plan_findings(
    chosen: Evaluation, indices: SampleIndices, origin: FindingOrigin = "search", run: str = "RUN"
) -> tuple[Finding, ...]:
    """The findings about one plan; ``run`` is the run directory in command lines."""
    findings: list[Finding] = []

    def add(code: str, where: Where, numbers: Mapping[str, float], **names: Any) -> None:
        names |= {"plan": chosen.plan.fingerprint, "run": run}
        findings.append(Finding.from_code(code, origin, where, numbers, **names))

    # Columns that move more than their output shows, and errors near zero.
    error = chosen.counted_held_out or chosen.counted
    for name, by_column in error.columns.items():
        statistics = error.per_output.get(name, {})
        if "relative_l2" not in statistics or len(by_column["max_abs"]) < 2:
            continue
        whole, apart = float(np.mean(statistics["relative_l2"])), np.array(by_column["max_abs"])
        moved = np.array(by_column["worst_part"])
        large = np.isfinite(moved) & (moved >= LEAST) & (moved >= HIDDEN * whole)
        hidden, small = large & (apart >= TINY) & (moved >= LEAST_HIDDEN), large & (apart < TINY)
        for code, columns in (("column-hidden", np.flatnonzero(hidden)), ("near-zero", np.flatnonzero(small))):
            if len(columns):
                worst = int(columns[moved[columns].argmax()])
                sizes = {"column_error": float(moved[worst]), "output_relative_l2": whole}
                numbers = {"column": worst, **sizes, "max_abs": float(apart[worst])}
                place = Where(outputs=(OutputColumns(name, tuple(map(int, columns))),))
                better = "" if chosen.metric == "worst_part" else "worst_part"
                add(code, place, numbers, part=OutputColumns(name, (worst,)), better_metric=better)

    share, selected = error.foreign_selections
    if share > MANY_FOREIGN:
        where = Where(outputs=tuple(map(OutputColumns, selected)))
        about = {"side": f"plan {chosen.plan.fingerprint}", "names": ", ".join(map(repr, selected))}
        add("rows-selected", where, {"foreign_rows": share}, kind="foreign", share=share, **about)

    # One sample that makes the error, and held-out samples that differ. The user's own metric may have any scale: only
    # of the named errors it is known what is large.
    metric, held_out = METRICS.get(chosen.metric), chosen.held_out_value
    if metric is not None and metric.kind == "element" and not metric.is_summed:
        decisive: list[tuple[float, int, float]] = []
        for each, index_of in ((chosen.counted, indices.search), (chosen.counted_held_out, indices.held_out)):
            # The error of each sample alone: the worst over the outputs and their parts, shape (n_samples,).
            parts = [] if each is None else [part for by in each.per_output.values() for part in by.items()]
            rows = [values for name, values in parts if belongs_to(name, chosen.metric)]
            values = np.array(rows, dtype=np.float64).max(axis=0) if rows else np.empty(0)
            if len(values) >= _LEAST_SAMPLES and np.isfinite(values).all():
                worst = int(values.argmax())
                rest = float(np.median(np.delete(values, worst)))
                if values[worst] >= max(FAR_ABOVE * rest, _LEAST_ERROR):
                    decisive.append((float(values[worst]), index_of[worst] if worst < len(index_of) else worst, rest))
        if decisive:
            value, index, rest = max(decisive)
            add("one-sample-decides", Where(samples=(index,)), {"error": value, "median_of_others": rest})
        least = max(HELD_OUT_FACTOR * chosen.error_value, _LEAST_ERROR)
        if held_out is not None and least <= held_out < math.inf:
            numbers = {"held_out": held_out, "search": chosen.error_value}
            add("held-out-differs", Where(samples=indices.held_out), numbers)

    if chosen.disagrees and chosen.emulated is not None:
        numbers = {"measured": chosen.error_value, "emulated": chosen.emulated}
        add("emulation-differs", Where(), numbers, factor=EMULATION_FACTOR)
    return tuple(findings)
