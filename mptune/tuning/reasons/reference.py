"""What is wrong with the model in FP32 already, as findings: no plan repairs these, or errors say nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mptune.engines.jobs.reference_report import Place, ReferenceReport
from mptune.engines.toolchains.blame import ALONG_SEQUENCE, BY_INDEX
from mptune.finding import Evidence, Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import Severity
from mptune.graph.facts import attribute
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.ops import RANDOM

REPEAT_WARNING = 1e-5
REPEAT_LIMIT = 1e-2
"""Two runs on the same sample that differ by more: the model is not deterministic, and errors mean nothing. Below, a
node that draws random numbers is an error, too, and anything else a warning."""

ROWS_WARNING = 1e-4
ROWS_LIMIT = 1e-2
"""Rows of a batch that depend on the other rows: relative L2."""

_STEPS = frozenset({"QuantizeLinear", "Round", "Floor", "Ceil"})
"""What takes each element to a step by itself: rows that first differ there differ by rounding before it."""

_BEYOND_REPEATS = 10.0
"""How many times more than two runs rows differ, to depend on the other rows."""

_DRAWS = RANDOM | {"Dropout"}
"""Operators that draw random numbers; Dropout in training mode only."""


def reference_findings(
    report: ReferenceReport, origin: FindingOrigin, indices: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """What the reference runs on a set of samples showed; ``indices`` are those of the samples in the data."""
    facts = _Reference(report, origin, indices)
    return (*facts.not_finite(), *facts.constant(), *facts.repeats(), *facts.rows(), *facts.batch())


def without_repetition(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without what runs showed of nodes that the graph alone names: a code and a place are named once."""
    kept: list[Finding] = []
    for finding in findings:
        named = {node for other in kept if other.code == finding.code for node in other.where.nodes}
        if finding.code != "not-deterministic" or not named:
            kept.append(finding)
    return tuple(kept)


def training_findings(model: Model, origin: FindingOrigin, *, is_run: bool) -> tuple[Finding, ...]:
    """Nodes that are left in training mode or draw random numbers, as the graph alone shows them.

    Where the model is run twice, too, that shows what random numbers do; what is in training mode may repeat in one
    runtime, and is wrong in another all the same.
    """
    nodes = [
        node
        for node in needed_nodes(model, [info.name for info in model.outputs])
        if _is_training_norm(node) or (_draws(model, node) and (node.op_type == "Dropout" or not is_run))
    ]
    if not nodes:
        return ()
    norms = [node for node in nodes if _is_training_norm(node)]
    first = norms[0] if norms else nodes[0]
    where = Where(nodes=tuple(node.name for node in nodes))
    kind = "norm" if norms else "dropout" if first.op_type == "Dropout" else "random"
    evidence: Evidence = {"nodes": len(nodes), "operator": first.op_type}
    more = len(nodes) - 1 or ""
    return (Finding.of("not-deterministic", origin, where, evidence, kind=kind, node=first.name, more=more),)


def _is_training_norm(node: Node) -> bool:
    return node.op_type == "BatchNormalization" and node.is_standard and attribute(node, "training_mode") == 1


def _draws(model: Model, node: Node) -> bool:
    if node.op_type not in _DRAWS or not node.is_standard:
        return False
    if node.op_type != "Dropout":
        return True
    values = [model.initializers[name].numpy() if name in model.initializers else None for name in node.inputs[1:3]]
    ratio, training = (*values, None, None)[:2]
    return training is not None and bool(training) and (ratio is None or float(ratio) > 0)


class _Reference:
    """The findings of one report, by what they are about."""

    def __init__(self, report: ReferenceReport, origin: FindingOrigin, indices: Sequence[int]) -> None:
        self._report = report
        self._origin = origin
        self._indices = indices

    def _sample(self, index: int) -> int:
        return self._indices[index] if index < len(self._indices) else index

    def _finding(
        self,
        code: str,
        outputs: Iterable[str],
        evidence: Evidence,
        kind: str = "",
        place: Place | None = None,
        *,
        severity: Severity | None = None,
        samples: tuple[int, ...] = (),
        **names: Any,
    ) -> Finding:
        where = Where(
            nodes=(place.node,) if place is not None and place.node else (),
            tensors=(place.tensor,) if place is not None else (),
            outputs=tuple(OutputColumns(name) for name in outputs),
            inputs=(place.tensor,) if place is not None and not place.node else (),
            samples=samples,
        )
        if place is not None and place.node:
            evidence = {**evidence, "operator": place.op_type}
        names["place"] = "" if place is None else place.shown
        return Finding.of(code, self._origin, where, evidence, kind=kind, severity=severity, **names)

    def not_finite(self) -> Iterator[Finding]:
        """Outputs that hold NaN or Inf."""
        bad = {name: int(facts["non_finite"]) for name, facts in self._report.outputs.items() if facts["non_finite"]}
        if not bad:
            return
        placed = ((name, p) for (code, name), p in self._report.places.items() if code == "reference-not-finite")
        name, place = next(placed, (next(iter(bad)), None))
        facts = self._report.outputs[name]
        sample, bad_samples = self._sample(int(facts.get("bad_sample", 0))), int(facts.get("bad_samples", 1))
        evidence: dict[str, int | float | str] = {"non_finite": bad[name], "sample": sample}
        kind = ""
        if place is not None:
            evidence["value"] = place.value
            kind = f"{place.op_type} {str(place.value).removeprefix('-')}"
        several: dict[str, Any] = (
            {"bad_samples": bad_samples, "of_samples": int(facts["samples"])} if bad_samples > 1 else {}
        )
        yield self._finding(
            "reference-not-finite", bad, evidence, kind, place, samples=(sample,), output=name, **several
        )

    def constant(self) -> Iterator[Finding]:
        """Outputs that are empty, zero, or the same on all samples; every one of them, or single ones."""
        outputs = self._report.outputs
        empty = [name for name, facts in outputs.items() if facts.get("size", 1.0) == 0]
        zero = [name for name, facts in outputs.items() if facts["zero_fraction"] >= 1.0]
        if empty and len(empty) == len(outputs):
            yield self._finding("reference-zero", empty, {"size": 0}, "empty")
        else:
            for name in empty:
                yield self._finding("output-constant", [name], {"size": 0}, "empty")
        if zero and len(zero) == len(outputs):
            places = (self._report.places.get(("output-constant", name)) for name in zero)
            place = next((place for place in places if place is not None), None)
            yield self._finding("reference-zero", zero, {"zero_fraction": 1.0}, place=place)
            return
        for name, facts in outputs.items():
            place = self._report.places.get(("output-constant", name))
            # A table that follows from no input, such as anchors, is what it is meant to be.
            if name in zero or (facts.get("constant") and place is not None):
                evidence = {"absmax": facts["absmax"], "zero_fraction": facts["zero_fraction"]}
                yield self._finding("output-constant", [name], evidence, "zero" if name in zero else "", place)

    def repeats(self) -> Iterator[Finding]:
        """Two runs on one sample that differ."""
        error = self._report.repeat_error
        if error <= REPEAT_WARNING:
            return
        place = self._report.places.get(("not-deterministic", ""))
        draws = place is not None and place.op_type in _DRAWS
        kind = "" if draws or not error <= REPEAT_LIMIT else "noise"
        evidence = {"relative_l2": error, "limit": REPEAT_LIMIT}
        yield self._finding("not-deterministic", (), evidence, kind, place, samples=(self._sample(0),))

    def rows(self) -> Iterator[Finding]:
        """Rows that depend on the other rows of their batch."""
        rows = self._report.rows
        candidates = [
            ("others" if rows.mixed and not rows.alone else "mixed", *rows.worst_mixed),
            ("alone", *_worst(rows.alone)),
            ("repeated", *_worst(rows.repeated)),
        ]
        # Rows that differ as two runs do say nothing of their batch.
        least = max(ROWS_WARNING, _BEYOND_REPEATS * self._report.repeat_error)
        wrong = [candidate for candidate in candidates if not candidate[2] <= least]
        if not wrong:
            return
        # The first that is beyond the limit, else the first: what is named is what a user does, feed different rows.
        kind, output, error = next((candidate for candidate in wrong if not candidate[2] <= ROWS_LIMIT), wrong[0])
        place = self._report.places.get(("rows-mix", output))
        severity: Severity | None = "warning" if error <= ROWS_LIMIT else None
        if place is not None and place.value in (ALONG_SEQUENCE, BY_INDEX):
            kind, severity = f"{kind} {place.value}", None
        elif place is not None and place.op_type.rpartition(".")[2] in _STEPS and math.isfinite(error):
            kind, severity = f"{kind} step", None
        evidence = {"relative_l2": error, "limit": ROWS_LIMIT, "rows": rows.rows, "row": rows.mixed_row}
        yield self._finding("rows-mix", [output], evidence, kind, place, severity=severity)

    def batch(self) -> Iterator[Finding]:
        """Outputs that lost the batch, and models that do not run with one."""
        rows = self._report.rows
        for name, shape in rows.lost.items():
            place = self._report.places.get(("batch-not-kept", name))
            evidence: Evidence = {"rows": rows.rows, "shape": str(list(shape)), "declared": rows.declared[name]}
            yield self._finding("batch-not-kept", [name], evidence, place=place)
        if rows.failure:
            where = Where(nodes=(rows.failed_node,) if rows.failed_node else ())
            evidence = {"rows": rows.rows, "rows_that_run": rows.ran}
            yield Finding.of("batch-not-kept", self._origin, where, evidence, kind="fails", failure=rows.failure)


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: (item[1] != item[1], item[1]), default=("", 0.0))
