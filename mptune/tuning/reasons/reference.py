"""What is wrong with the model in FP32 already, as findings: no plan repairs these, or errors say nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mptune.engines.jobs.reference_report import Place, ReferenceReport, RowReport
from mptune.engines.toolchains.locating import ALONG_SEQUENCE, BY_INDEX
from mptune.finding import CODES, Finding, FindingOrigin, OutputColumns, Severity, Where
from mptune.graph.grouping.lookup import attribute
from mptune.graph.loading.ancestors import needed_nodes
from mptune.graph.loading.model import Model, Node

REPEAT_WARNING = 1e-5
REPEAT_LIMIT = 1e-2
"""Two runs on the same sample that differ by more: the model is not deterministic, and errors mean nothing. Below, a
node that draws random numbers is an error, too, and anything else a warning."""

ROWS_WARNING = 1e-4
ROWS_LIMIT = 1e-2
"""Rows of a batch that depend on the other rows: relative L2."""

_STEPS = frozenset({"QuantizeLinear", "Round", "Floor", "Ceil"})
"""What takes each element to a step by itself: rows that first differ there differ by rounding before it."""

_NO_SAMPLES = {
    ALONG_SEQUENCE: (
        "takes axis 0 for a sequence: a row is a step of it there, and no sample of its own",
        "nothing where axis 0 is the sequence; where it is the batch, export with batch_first",
    ),
    BY_INDEX: (
        "takes rows of axis 0 by indices that are fed, as along edges of a graph: a row may be a node, and no sample",
        "nothing where axis 0 holds the nodes of one graph; where it is the batch, an index reaches another sample",
    ),
}
"""Where rows meet that are no samples -> why, and what to do."""

_DRAWS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
"""Operators that draw random numbers; Dropout in training mode only."""

_EVALUATION = "export the model in evaluation mode (model.eval(), no dropout, no RandomNormal, a fixed seed)"


def reference_findings(
    report: ReferenceReport, origin: FindingOrigin, indices: Sequence[int] = ()
) -> tuple[Finding, ...]:
    """What the reference runs showed.

    Args:
        report: of one set of samples.
        origin: what looked.
        indices: index in the data of each sample of the set; empty where they are all of the data.
    """
    found = _Reference(report, origin, indices)
    return (*found.not_finite(), *found.zero(), *found.constant(), *found.repeats(), *found.rows(), *found.batch())


def without_repetition(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without what runs showed of nodes that the graph alone names: a code and a place are named once."""
    kept: list[Finding] = []
    for finding in findings:
        known = {node for other in kept if other.code == finding.code for node in other.where.nodes}
        if finding.code != "not-deterministic" or not known:
            kept.append(finding)
    return tuple(kept)


def training_findings(model: Model, origin: FindingOrigin, *, is_run: bool) -> tuple[Finding, ...]:
    """Nodes that are left in training mode or draw random numbers, as the graph alone shows them.

    Args:
        model: the model.
        origin: what looked.
        is_run: the model is run twice, too, which shows what random numbers do; what is in training mode may repeat
            in one runtime, and is wrong in another all the same.
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
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    if norms:
        what = "is in training mode: it normalises by the statistics of each batch, not by the model's own"
    elif first.op_type == "Dropout":
        what = "is in training mode: it sets values to zero at random"
    else:
        what = "draws random numbers that reach an output"
    return (
        Finding(
            code="not-deterministic",
            severity=CODES["not-deterministic"].severity,
            origin=origin,
            where=Where(nodes=tuple(node.name for node in nodes)),
            evidence={"nodes": len(nodes), "operator": first.op_type},
            text=f"{first.op_type} {first.name!r}{more} {what}",
            cure=_EVALUATION,
        ),
    )


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


_BEYOND_REPEATS = 10.0
"""How many times more than two runs rows differ, to depend on the other rows."""

_CHECK_ALL = (
    "check the preprocessing of the calibration data and the model's export; if these are masks, cut that output off"
    " the model"
)
_GUARD = "; guard it in the model, as by an epsilon or a limit, or leave such samples out"
_WHY_NOT_FINITE: Mapping[tuple[str, str], tuple[str, str]] = {
    **{
        (operator, "nan"): (
            ": a row that is -inf throughout, as one that is masked whole, or that holds +inf",
            "mask with a finite value such as -1e4, or leave rows that are masked whole out of the samples",
        )
        for operator in ("Softmax", "LogSoftmax")
    },
    ("Div", "nan"): (": 0 / 0, or inf / inf", f"see what is zero there{_GUARD}"),
    ("Div", "inf"): (": a division by zero, or by nearly zero", f"see what is zero there{_GUARD}"),
    ("Reciprocal", "inf"): (": one over zero, or over nearly zero", f"see what is zero there{_GUARD}"),
    ("Log", "inf"): (": the logarithm of zero", f"see what is zero there{_GUARD}"),
    ("Log", "nan"): (": the logarithm of a negative number", f"see what is negative there{_GUARD}"),
    ("Sqrt", "nan"): (": the root of a negative number", f"see what is negative there{_GUARD}"),
    ("Exp", "inf"): (": an exponent above 88", "take the largest value off before the exponential"),
    **{
        (operator, "nan"): (": a value beyond -1..1", "limit it to -1..1 in the model") for operator in ("Acos", "Asin")
    },
}
"""Operator and what it gives of operands that are finite, or of masks -> how it comes to that, and what to do."""


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
        evidence: Mapping[str, int | float | str],
        text: str,
        cure: str,
        place: Place | None = None,
        severity: Severity | None = None,
        samples: tuple[int, ...] = (),
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
        return Finding(code, severity or CODES[code].severity, self._origin, where, evidence, text, cure)

    def not_finite(self) -> Iterator[Finding]:
        """Outputs that hold NaN or Inf."""
        bad = {name: int(facts["non_finite"]) for name, facts in self._report.outputs.items() if facts["non_finite"]}
        if not bad:
            return
        placed = [
            (name, place) for (code, name), place in self._report.places.items() if code == "reference-not-finite"
        ]
        name, place = placed[0] if placed else (next(iter(bad)), None)
        sample = self._sample(int(self._report.outputs[name].get("bad_sample", 0)))
        facts, shown = self._report.outputs[name], f"on sample {sample}"
        if (samples := int(facts.get("bad_samples", 1))) > 1:
            shown = f"on {samples} of {facts['samples']:.0f} samples, first on sample {sample}"
        why, cure = "", _CHECK_ALL
        if place is not None:
            why, cure = _WHY_NOT_FINITE.get((place.op_type, str(place.value).removeprefix("-")), (why, cure))
        at = "" if place is None else f"; it begins at {place.shown}, which gives {place.value}{why}"
        evidence: dict[str, int | float | str] = {"non_finite": bad[name], "sample": sample}
        if place is not None:
            evidence["value"] = place.value
        yield self._finding(
            "reference-not-finite",
            bad,
            evidence,
            f"the reference is not finite: output {name!r} holds {bad[name]} NaN or Inf in FP32, {shown}{at}",
            cure,
            place,
            samples=(sample,),
        )

    def zero(self) -> Iterator[Finding]:
        """Every output empty or all zero."""
        outputs = self._report.outputs
        empty = self._empty()
        if empty and len(empty) == len(outputs):
            yield self._finding(
                "reference-zero",
                empty,
                {"size": 0},
                "the reference is empty in every output on every sample: nothing was selected",
                "give calibration data in which the model finds something, or export it with a lower threshold",
            )
        zero = self._zero()
        if zero and len(zero) == len(outputs):
            place = self._killer(zero)
            at = "" if place is None else f": {place.shown} makes it so"
            yield self._finding(
                "reference-zero",
                zero,
                {"zero_fraction": 1.0},
                f"the reference is all zero in every output{at}",
                "check that the calibration data are what the model expects (scale, layout, channel order)",
                place,
            )

    def constant(self) -> Iterator[Finding]:
        """Single outputs that are empty, zero, or the same on all samples."""
        outputs, empty, zero = self._report.outputs, self._empty(), self._zero()
        if len(empty) < len(outputs):
            for name in empty:
                yield self._finding(
                    "output-constant",
                    [name],
                    {"size": 0},
                    f"output {name!r} of the reference is empty on every sample, so its error says nothing",
                    "give data in which the model finds something",
                )
        if zero and len(zero) == len(outputs):
            return
        for name, facts in outputs.items():
            place = self._report.places.get(("output-constant", name))
            is_zero = name in zero
            # A table that follows from no input, such as anchors, is what it is meant to be.
            if not is_zero and (not facts.get("constant") or place is None):
                continue
            at = "" if place is None else f": {place.shown} makes it so"
            what = "is all zero" if is_zero else "is the same on all samples, although these differ"
            yield self._finding(
                "output-constant",
                [name],
                {"absmax": facts["absmax"], "zero_fraction": facts["zero_fraction"]},
                f"output {name!r} of the reference {what}{at}; its error says nothing",
                "give data that make the output respond, or correct the export",
                place,
            )

    def _empty(self) -> list[str]:
        return [name for name, facts in self._report.outputs.items() if facts.get("size", 1.0) == 0]

    def _zero(self) -> list[str]:
        return [name for name, facts in self._report.outputs.items() if facts["zero_fraction"] >= 1.0]

    def _killer(self, names: Iterable[str]) -> Place | None:
        places = (self._report.places.get(("output-constant", name)) for name in names)
        return next((place for place in places if place is not None), None)

    def repeats(self) -> Iterator[Finding]:
        """Two runs on one sample that differ."""
        error = self._report.repeat_error
        if error <= REPEAT_WARNING:
            return
        place = self._report.places.get(("not-deterministic", ""))
        draws = place is not None and place.op_type in _DRAWS
        is_error = draws or not error <= REPEAT_LIMIT
        at = "" if place is None else f", first at {place.shown}"
        sample = self._sample(0)
        yield self._finding(
            "not-deterministic",
            (),
            {"relative_l2": error, "limit": REPEAT_LIMIT},
            f"two FP32 runs on the same sample differ by {error:.1e}{at}: "
            + ("the model is not deterministic" if is_error else "errors below that are noise"),
            _EVALUATION if is_error else "",
            place,
            "error" if is_error else "warning",
            (sample,),
        )

    def rows(self) -> Iterator[Finding]:
        """Rows that depend on the other rows of their batch."""
        rows = self._report.rows
        candidates = [
            (*rows.worst_mixed, "a row gives another output alone than among different rows of a batch"),
            (*_worst(rows.alone), "a row gives another output alone than in a larger batch"),
            (*_worst(rows.repeated), "identical rows of a batch give different outputs"),
        ]
        if rows.mixed and not rows.alone:
            candidates[0] = (*rows.worst_mixed, "a row gives another output when the other rows of its batch change")
        # Rows that differ as two runs do say nothing of their batch.
        least = max(ROWS_WARNING, _BEYOND_REPEATS * self._report.repeat_error)
        wrong = [one for one in candidates if not one[1] <= least]
        if not wrong:
            return
        # The first that is beyond the limit, else the first: what is named is what a user does, feed different rows.
        output, error, what = next((one for one in wrong if not one[1] <= ROWS_LIMIT), wrong[0])
        place = self._report.places.get(("rows-mix", output))
        at = "" if place is None else f"; they first meet at {place.shown}"
        severity: Severity = "warning" if error <= ROWS_LIMIT else "error"
        cure = "look for a reshape, a mean or a broadcast over the batch axis; or tune and deploy with --batch 1"
        if place is not None and place.op_type.rpartition(".")[2] in _STEPS and math.isfinite(error):
            severity, cure = (
                "info",
                "nothing: kernels round otherwise at another batch size, and a step makes that larger",
            )
            at += (
                ", which takes each element to a step by itself: rounding takes one near the end of a step to the next"
            )
        if place is not None and place.value in _NO_SAMPLES:
            severity, (why, cure) = "warning", _NO_SAMPLES[str(place.value)]
            at = f"; {place.shown} {why}"
        yield self._finding(
            "rows-mix",
            [output],
            {"relative_l2": error, "limit": ROWS_LIMIT, "rows": rows.rows, "row": rows.mixed_row},
            f"{what}: output {output!r} differs by {error:.1e} (relative L2) in FP32{at}",
            cure,
            place,
            severity,
        )

    def batch(self) -> Iterator[Finding]:
        """Outputs that lost the batch, and models that do not run with one."""
        rows = self._report.rows
        for name, shape in rows.lost.items():
            place = self._report.places.get(("batch-not-kept", name))
            at = "" if place is None else f": {place.shown} fixes it"
            yield self._finding(
                "batch-not-kept",
                [name],
                {"rows": rows.rows, "shape": str(list(shape)), "declared": rows.declared[name]},
                f"output {name!r} has the shape {list(shape)} for {rows.rows} rows, declared {rows.declared[name]}{at}",
                "export it with a dynamic batch (a Reshape with -1 or 0 for the batch), or with a batch fixed at 1",
                place,
            )
        if rows.failure:
            yield _failing(rows, self._origin)


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: (item[1] != item[1], item[1]), default=("", 0.0))


def _failing(rows: RowReport, origin: FindingOrigin) -> Finding:
    node = rows.failed_node
    return Finding(
        code="batch-not-kept",
        severity="warning",
        origin=origin,
        where=Where(nodes=(node,) if node else ()),
        evidence={"rows": rows.rows, "rows_that_run": rows.ran},
        text=f"the model's first dimension is dynamic, but it fails with {rows.rows} row{'s' * (rows.rows != 1)}"
        f" ({rows.failure})",
        cure=f"fix it at {rows.ran}",
    )
