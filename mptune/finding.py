"""Finding: one thing that is wrong or worth knowing, with a code, the place, the numbers that prove it and the cure.

Whatever detects something calls ``Finding.of`` with code, place and evidence; the words come from the table,
``CODES``. A code never changes its meaning, so that scripts can rely on it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]
"""error: no plan repairs it. warning: figures or the choice may mislead. info: good to know."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The most severe first."""

_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Wording:
    """Text and cure of a finding as templates: names in braces; a part in brackets goes where a name in it is unknown.

    The names are those of the evidence; ``node``, ``group``, ``tensor``, ``output`` and ``sample``, the first of each
    in the place; and what else is given to ``Finding.of``.
    """

    text: str
    cure: str = ""
    severity: Severity | None = None

    def filled(self, values: Mapping[str, object]) -> tuple[str, str]:
        """Text and cure with these values."""
        return fill(self.text, values), fill(self.cure, values)


@dataclass(frozen=True)
class CodeInfo:
    """A row of the table.

    Attributes:
        severity: the default; a finding about a group that the plan keeps in FP32 is ``info`` whatever stands here.
        meaning: one line.
        breaks: rank among the codes of values that FP16 cannot hold, 1 for the plainest; 0 for all other codes.
        wordings: by kind; the empty kind stands for those that are not there.
        plain: what an engine in plain FP16 gives there: templates by the evidence that they need, the first that has
            it counts.
    """

    severity: Severity
    meaning: str
    breaks: int = 0
    wordings: Mapping[str, Wording] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)

    def wording(self, kind: str) -> Wording:
        """The wording of a kind."""
        return self.wordings.get(kind) or self.wordings[""]


def fill(template: str, values: Mapping[str, object]) -> str:
    """A template of the table with its names replaced."""

    def part(match: re.Match[str]) -> str:
        names = [name for _, name, _, _ in Formatter().parse(match[1]) if name]
        return match[1] if all(values.get(name) not in (None, "") for name in names) else ""

    return _OPTIONAL.sub(part, template).format_map(values)


_DOWNSTREAM = Wording(
    "the results of {groups} come to {operator} {node!r}, which enlarges their rounding: {outcome} in the outputs, with"
    " {worst} alone in FP16",
    "keep what comes to {operator} {node!r} in FP32",
)

_NOT_FINITE = (
    "the reference is not finite: output {output!r} holds {non_finite} NaN or Inf in FP32, on"
    " [{bad_samples} of {of_samples} samples, first on ]sample {sample}[; it begins at {place}, which gives {value}]"
)
_GUARD = "; guard it in the model, as by an epsilon or a limit, or leave such samples out"
_MASKED = (
    "a row that is -inf throughout, as one that is masked whole, or that holds +inf",
    "mask with a finite value such as -1e4, or leave rows that are masked whole out of the samples",
)
_BEYOND_ONE = "a value beyond -1..1", "limit it to -1..1 in the model"
_NOT_FINITE_CAUSES: Mapping[str, tuple[str, str]] = {
    "Softmax nan": _MASKED,
    "LogSoftmax nan": _MASKED,
    "Div nan": ("0 / 0, or inf / inf", f"see what is zero there{_GUARD}"),
    "Div inf": ("a division by zero, or by nearly zero", f"see what is zero there{_GUARD}"),
    "Reciprocal inf": ("one over zero, or over nearly zero", f"see what is zero there{_GUARD}"),
    "Log inf": ("the logarithm of zero", f"see what is zero there{_GUARD}"),
    "Log nan": ("the logarithm of a negative number", f"see what is negative there{_GUARD}"),
    "Sqrt nan": ("the root of a negative number", f"see what is negative there{_GUARD}"),
    "Exp inf": ("an exponent above 88", "subtract the largest value before the exponential"),
    "Acos nan": _BEYOND_ONE,
    "Asin nan": _BEYOND_ONE,
}
"""Operator and what it gives of finite operands, or of masks -> how that happens, and what to do."""

_EVALUATION = "export the model in evaluation mode (model.eval(), no dropout, no RandomNormal, a fixed seed)"

_ROWS_MIX = {
    "mixed": "a row gives another output alone than among different rows of a batch",
    "alone": "a row gives another output alone than in a larger batch",
    "others": "a row gives another output when the other rows of its batch change",
    "repeated": "identical rows of a batch give different outputs",
}
_ROWS_MEET: Mapping[str, tuple[str, str, Severity | None]] = {
    "": (
        "[; they first meet at {place}]",
        "look for a reshape, a mean or a broadcast over the batch axis; or tune and deploy with --batch 1",
        None,
    ),
    " step": (
        "; they first meet at {place}, which rounds each element to a step: a value near the end of a step may go to"
        " the next one",
        "nothing: kernels round differently at another batch size, and a step enlarges that",
        "info",
    ),
    " sequence": (
        "; {place} takes axis 0 for a sequence, so a row is a step of it and no sample of its own",
        "nothing where axis 0 is the sequence; where it is the batch, export with batch_first",
        "warning",
    ),
    " index": (
        "; {place} takes rows of axis 0 by indices that are fed, as along edges of a graph: a row may be a node, and no"
        " sample",
        "nothing where axis 0 holds the nodes of one graph; where it is the batch, an index reaches another sample",
        "warning",
    ),
}
"""How rows of a batch come to depend on each other: what is added to the text, the cure, and the severity."""

_UNSTEADY = "the engine does not give the same again: run `mptune compare` with --repeat and --stress"

EMULATION_CAUSE = (
    "the engine accumulates in FP16, fuses roundings away, or does not do what the plan says; look at the precisions of"
    " its layers"
)
"""Why a measured error is not the emulated one."""

_LOST = "Inf or NaN from the values that FP16 brings to zero or below"

_TABLE: Mapping[str, CodeInfo] = {
    # Numbers of the model.
    "overflow": CodeInfo(
        "warning",
        "a value beyond 65504 that the plan would hold in FP16",
        breaks=1,
        plain={"held_as": "held as {held_as:g}", "": "Inf"},
    ),
    "vanishing-epsilon": CodeInfo(
        "warning",
        "an epsilon that is zero in FP16 and guards a denominator that can reach zero",
        breaks=2,
        wordings={
            "downstream": _DOWNSTREAM,
            "underflow": Wording(
                "value {tensor!r}[ at node {node!r}]: {seen}",
                "keep the group in FP32, or scale the values up in the model",
            ),
        },
        plain={
            "subnormal": "the epsilon loses digits, and what is divided by it alone leaves FP16's range",
            "": "the epsilon is 0, so that x/0 is Inf, 0/0 NaN, and the logarithm of 0 -Inf",
        },
    ),
    "spacing": CodeInfo(
        "warning",
        "values so large that FP16's spacing exceeds the differences that decide downstream",
        breaks=6,
        wordings={"downstream": _DOWNSTREAM},
        plain={"spacing": "the values are rounded to multiples of {spacing:.3g}"},
    ),
    "stagnation": CodeInfo(
        "warning",
        "an Add whose smaller side is below half of FP16's spacing at the other: it is lost",
        breaks=4,
        plain={"share": "on {share:.0%} of the elements the step is lost"},
    ),
    "cancellation": CodeInfo(
        "warning",
        "a Sub or Add whose result is much smaller than its operands",
        breaks=7,
        wordings={"downstream": _DOWNSTREAM},
        plain={"relative_error": "rounded operands change the result by {relative_error:.1%}"},
    ),
    "long-sum": CodeInfo("info", "a long one-signed sum that would stop growing if it were accumulated in FP16"),
    "index-in-float": CodeInfo(
        "warning",
        "float arithmetic that becomes an index or a size, above 2048 not exact in FP16",
        breaks=5,
        wordings={"downstream": _DOWNSTREAM},
        plain={
            "share": "{share:.0%} of the whole numbers are others, so that another index or size comes out",
            "": "whole numbers above {exact_to} are rounded, so that another index or size comes out",
        },
    ),
    "mask": CodeInfo(
        "warning",
        "a mask beyond FP16's range that is multiplied, added or meets a fully masked row",
        breaks=3,
        plain={
            "masked_rows": "NaN in the rows that are masked whole",
            "": "-Inf, and -Inf times 0, or a row of it alone, is NaN",
        },
    ),
    "norm-written-out": CodeInfo("warning", "a normalisation written out in pieces instead of as one operator"),
    "int64-range": CodeInfo("warning", "an INT64 value that INT32 cannot hold and that is not the end of a Slice"),
    # The model in FP32.
    "reference-not-finite": CodeInfo(
        "error",
        "the FP32 reference holds NaN or Inf",
        wordings={
            "": Wording(
                _NOT_FINITE,
                "check the preprocessing of the calibration data and the model's export; if these are masks, cut that"
                " output off the model",
            ),
            **{kind: Wording(f"{_NOT_FINITE}: {why}", cure) for kind, (why, cure) in _NOT_FINITE_CAUSES.items()},
        },
    ),
    "not-deterministic": CodeInfo(
        "error",
        "two FP32 runs on the same sample differ",
        wordings={
            "": Wording(
                "two FP32 runs on the same sample differ by {relative_l2:.1e}[, first at {place}]: the model is not"
                " deterministic",
                _EVALUATION,
            ),
            "noise": Wording(
                "two FP32 runs on the same sample differ by {relative_l2:.1e}[, first at {place}]: errors below that"
                " are noise",
                severity="warning",
            ),
            "norm": Wording(
                "{operator} {node!r}[ and {more} more] is in training mode: it normalises by the statistics of each"
                " batch, not by the model's own",
                _EVALUATION,
            ),
            "dropout": Wording(
                "{operator} {node!r}[ and {more} more] is in training mode: it sets values to zero at random",
                _EVALUATION,
            ),
            "random": Wording(
                "{operator} {node!r}[ and {more} more] draws random numbers that reach an output", _EVALUATION
            ),
        },
    ),
    "reference-zero": CodeInfo(
        "error",
        "every output of the FP32 reference is zero",
        wordings={
            "": Wording(
                "the reference is all zero in every output[: {place} makes it so]",
                "check that the calibration data are what the model expects (scale, layout, channel order)",
            ),
            "empty": Wording(
                "the reference is empty in every output on every sample: nothing was selected",
                "give calibration data in which the model finds something, or export it with a lower threshold",
            ),
        },
    ),
    "output-constant": CodeInfo(
        "warning",
        "an output does not depend on the data",
        wordings={
            "": Wording(
                "output {output!r} of the reference is the same on all samples, although these differ[: {place} makes"
                " it so]; its error says nothing",
                "give data that make the output respond, or correct the export",
            ),
            "zero": Wording(
                "output {output!r} of the reference is all zero[: {place} makes it so]; its error says nothing",
                "give data that make the output respond, or correct the export",
            ),
            "empty": Wording(
                "output {output!r} of the reference is empty on every sample, so its error says nothing",
                "give data in which the model finds something",
            ),
        },
    ),
    "rows-mix": CodeInfo(
        "error",
        "a row of a batch alone differs from the same row among different rows",
        wordings={
            f"{kind}{meet}": Wording(
                f"{what}: output {{output!r}} differs by {{relative_l2:.1e}} (relative L2) in FP32{added}",
                cure,
                severity,
            )
            for kind, what in _ROWS_MIX.items()
            for meet, (added, cure, severity) in _ROWS_MEET.items()
        },
    ),
    "batch-not-kept": CodeInfo(
        "error",
        "an output does not have as many rows as the input",
        wordings={
            "": Wording(
                "output {output!r} has the shape {shape} for {rows} rows, declared {declared}[: {place} fixes it]",
                "export it with a dynamic batch (a Reshape with -1 or 0 for the batch), or with a batch fixed at 1",
            ),
            "fails": Wording(
                "the model's first dimension is dynamic, but it fails with a batch of {rows} ({failure})",
                "fix it at {rows_that_run}",
                "warning",
            ),
        },
    ),
    "broadcast": CodeInfo("info", "a broadcast at a static batch of 1 that TensorRT has been seen to get wrong"),
    "value-dependent-shape": CodeInfo("info", "an operator whose output shape depends on values, such as NonZero"),
    "state-fed-back": CodeInfo("info", "an output that pairs with an input: the error of one step says little"),
    "size-dependent": CodeInfo(
        "warning", "errors at another declared size are several times those at the size of the data"
    ),
    # The data.
    "random-data": CodeInfo("warning", "the samples are random numbers, or look like them"),
    "constant-data": CodeInfo("warning", "an input is the same everywhere in all samples"),
    "duplicate-samples": CodeInfo("warning", "the same sample is there more than once"),
    "too-few-samples": CodeInfo("warning", "too few samples to hold any out"),
    "data-do-not-fit": CodeInfo("warning", "activations before a BatchNorm lie far off its running mean"),
    "one-sample-decides": CodeInfo(
        "warning",
        "one sample's error is far above that of the rest",
        wordings={
            "": Wording(
                "plan {plan}: sample {sample} of the data has an error of {error:.1e}, the others"
                " {median_of_others:.1e} (median)",
                "look at this sample; where it is as it should be, give more like it",
            )
        },
    ),
    "held-out-differs": CodeInfo(
        "warning",
        "the held-out error is far above the error that the search saw",
        wordings={
            "": Wording(
                "plan {plan}: the held-out error is {held_out:.1e}, that of the search samples {search:.1e}",
                "give more samples, of every kind that the model meets, so that the search sees what they show",
            ),
            "unsteady": Wording(
                "plan {plan}: the held-out error is {held_out:.1e} in one process and {held_out_least:.1e} in another,"
                " on the same samples; that of the search samples is {search:.1e}",
                _UNSTEADY,
            ),
        },
    ),
    # The plan and its engine.
    "column-hidden": CodeInfo(
        "warning",
        "a column of an output moves far more than the whole tensor's error shows",
        wordings={
            "": Wording(
                "plan {plan}: {part} moves by {column_error:.1e} of its own standard deviation, at most by"
                " {max_abs:.2g}, while the relative L2 error of the whole output is {output_relative_l2:.1e}",
                "say how large it may be: `mptune pick {run} --tolerance '{part}=abs:X'`[, or search with --metric"
                " {better_metric}]",
            )
        },
    ),
    "near-zero": CodeInfo(
        "info",
        "a large relative error with a tiny absolute one",
        wordings={
            "": Wording(
                "plan {plan}: {part} has an error of {column_error:.1e} of its own scale, and of {max_abs:.1e} at most"
                " as it is: its values lie near zero, where FP16 has few digits; nothing is wrong"
            )
        },
    ),
    "no-fp16-kernel": CodeInfo("info", "the toolchain has no FP16 kernel for an operator"),
    "no-bf16-kernel": CodeInfo("info", "the toolchain has no BF16 kernel for an operator"),
    "quantised-parts": CodeInfo("warning", "quantised patterns of the model stay as they are"),
    "operators-out-of-reach": CodeInfo("warning", "operators whose precision cannot be searched"),
    "engine-differs": CodeInfo("error", "the all-FP32 engine differs from the reference beyond rounding"),
    "reference-depends-on-optimisation": CodeInfo("warning", "ONNX Runtime with optimisations on and off differs"),
    "target-not-here": CodeInfo("info", "the target is not here, so latency is predicted"),
    "emulation-differs": CodeInfo(
        "warning",
        "measured and emulated errors disagree",
        wordings={
            "": Wording(
                "plan {plan}: the error is {measured:.2e} as measured and {emulated:.2e} as emulated, apart by more"
                " than a factor of {factor:g}",
                EMULATION_CAUSE,
            )
        },
    ),
    "already-mixed": CodeInfo("warning", "the model holds FP16 already"),
    # A comparison.
    "agrees": CodeInfo("info", "the outputs differ by what FP16 or TF32 rounding gives, or less"),
    "stale-rows": CodeInfo("warning", "rows equal the reference of another row, such as the one before"),
    "torn-rows": CodeInfo("warning", "rows are part this and part the previous result"),
    "tf32-reference": CodeInfo("warning", "the difference is what TF32 in the reference makes"),
    "tf32-candidate": CodeInfo("warning", "the difference is what TF32 in the candidate makes"),
    "outputs-permuted": CodeInfo("warning", "outputs, columns or rows are in another order, or have another sign"),
    "attribute-differs": CodeInfo("warning", "two models differ in an attribute, a constant or their structure"),
    "first-difference": CodeInfo("warning", "the first group along the graph that leaves the tolerance"),
    "precision": CodeInfo("warning", "the difference comes from FP16"),
}

CODES: Mapping[str, CodeInfo] = MappingProxyType(dict(_TABLE))
"""Every code that a finding can have."""

BREAKING_CODES = tuple(sorted((code for code, row in CODES.items() if row.breaks), key=lambda code: CODES[code].breaks))
"""Codes of values that FP16 cannot hold, or holds so coarsely that the outputs suffer; the plainest first."""

FP16_CODES = frozenset((*BREAKING_CODES, "long-sum", "norm-written-out", "no-fp16-kernel"))
"""Codes of what FP16 breaks or lacks; the others are about the model in FP32, the data, the target or the run."""

PINNING_CODES = (*BREAKING_CODES, "no-fp16-kernel", "no-bf16-kernel", "quantised-parts")
"""Codes of the findings that pin groups to FP32."""

RANGE_CODES = frozenset({"overflow", "mask", "vanishing-epsilon", "norm-written-out"})
"""Codes of values that leave FP16's range, which BF16 holds."""

_UNGUARDED = 2.0**-25
"""An epsilon up to here rounds to zero in FP16; a larger one is subnormal and loses digits."""


def plain_outcome(code: str, evidence: Mapping[str, float | str], *, is_of_bf16_alone: bool) -> str:
    """What an engine that computes such a place in plain FP16 gives there, as far as the evidence shows it."""
    if code != "overflow" and "lost" in evidence:
        return _LOST
    values: dict[str, object] = {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in evidence.items()}
    if float(evidence.get("epsilon", 0.0)) > _UNGUARDED:
        values["subnormal"] = evidence["epsilon"]
    values["exact_to"] = 256 if is_of_bf16_alone else 2048
    template = next((text for name, text in CODES[code].plain.items() if not name or name in values), "not exact there")
    return fill(template, values)


FindingOrigin = Literal["inspect", "search", "confirm", "compare", "apply"]
"""The command that made a finding."""

ONLY_BF16: Mapping[str, str] = MappingProxyType({"precision": "bf16"})
"""Part of the evidence where BF16 has too few digits and FP16 has enough."""


Evidence = Mapping[str, int | float | str]
"""The numbers that prove a finding, by name."""


@dataclass(frozen=True)
class OutputColumns:
    """An output of the model, or some columns (channels) of it.

    Attributes:
        name: of the output.
        columns: 0-based; None means the whole output.
    """

    name: str
    columns: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """As ``--tolerance`` takes it: ``boxes``, ``boxes[4]``, ``boxes[0:4]``, ``boxes[0,2]``."""
        if self.columns is None:
            return self.name
        first, count = self.columns[0], len(self.columns)
        if count > 1 and self.columns == tuple(range(first, first + count)):
            return f"{self.name}[{first}:{first + count}]"
        return f"{self.name}[{','.join(map(str, self.columns))}]"

    def to_json(self, name: str = "name") -> dict[str, Any]:
        """The output under the key ``name``, and its columns."""
        return {name: self.name, "columns": None if self.columns is None else list(self.columns)}


@dataclass(frozen=True)
class Where:
    """The places that a finding is about: names, ids of groups, and 0-based indices of samples in the data."""

    nodes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    outputs: tuple[OutputColumns, ...] = ()
    inputs: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    def first_names(self) -> dict[str, object]:
        """The first of each kind of place, by its name in the singular."""
        every = {"node": self.nodes, "group": self.groups, "tensor": self.tensors, "sample": self.samples}
        firsts: dict[str, object] = {name: places[0] for name, places in every.items() if places}
        return {**firsts, **({"output": self.outputs[0].name} if self.outputs else {})}

    def to_json(self) -> dict[str, Any]:
        """Every key always there."""
        return {
            "nodes": list(self.nodes),
            "groups": list(self.groups),
            "tensors": list(self.tensors),
            "outputs": [output.to_json() for output in self.outputs],
            "inputs": list(self.inputs),
            "samples": list(self.samples),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Where:
        """Inverse of ``to_json``."""
        return cls(
            nodes=tuple(document["nodes"]),
            groups=tuple(document["groups"]),
            tensors=tuple(document["tensors"]),
            outputs=tuple(
                OutputColumns(output["name"], None if output["columns"] is None else tuple(output["columns"]))
                for output in document["outputs"]
            ),
            inputs=tuple(document["inputs"]),
            samples=tuple(document["samples"]),
        )


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing.

    Attributes:
        code: one of ``CODES``.
        severity: what it means for the result.
        origin: the command that made it.
        where: the places it is about.
        evidence: the numbers that prove it, by name; numbers that are not finite are the texts ``nan``, ``inf`` and
            ``-inf``, since JSON has no others.
        text: what is wrong, in one or two sentences with those numbers, no trailing full stop.
        cure: what to do, with the command line where there is one; empty where there is nothing to do.

    Raises:
        ValueError: a code, severity or origin that does not exist.
    """

    code: str
    severity: Severity
    origin: FindingOrigin
    where: Where
    evidence: Mapping[str, int | float | str] = field(hash=False)
    text: str
    cure: str

    def __post_init__(self) -> None:
        _check("code", self.code, tuple(CODES))
        _check("severity", self.severity, SEVERITIES)
        _check("origin", self.origin, get_args(FindingOrigin))
        object.__setattr__(self, "evidence", {name: _json_value(value) for name, value in self.evidence.items()})

    @classmethod
    def of(
        cls,
        code: str,
        origin: FindingOrigin,
        where: Where,
        evidence: Evidence,
        *,
        kind: str = "",
        severity: Severity | None = None,
        **names: object,
    ) -> Finding:
        """A finding with the words that the table has for its code.

        Args:
            kind: which of the code's wordings.
            severity: where it is not the wording's, or the code's.
            names: what the wording names beside the evidence and the first of each kind of place.
        """
        wording = CODES[code].wording(kind)
        text, cure = wording.filled({**where.first_names(), **evidence, **names})
        return cls(code, severity or wording.severity or CODES[code].severity, origin, where, evidence, text, cure)

    @property
    def message(self) -> str:
        """Text and cure as one line, as warnings are shown."""
        return f"{self.text}; {self.cure}" if self.cure else self.text

    @property
    def is_about_model(self) -> bool:
        """Whether it names places in the model, and not the data, the target or the run as a whole."""
        return bool(self.where.nodes or self.where.groups)

    def under_plan(self, fp32_groups: Collection[str], bf16_groups: Collection[str] = ()) -> Finding:
        """The same as it stands under a plan: a warning whose groups are all FP32 there is ``info``.

        Or BF16, where it is FP16's range that the values leave; or FP16, where only BF16 has too few digits.
        """
        groups = self.where.groups
        if self.is_of_bf16_alone:
            does_no_harm = not any(group in bf16_groups for group in groups)
        else:
            kept = {*fp32_groups, *(bf16_groups if self.code in RANGE_CODES else ())}
            does_no_harm = all(group in kept for group in groups)
        return replace(self, severity="info") if self.severity == "warning" and groups and does_no_harm else self

    @property
    def is_of_bf16_alone(self) -> bool:
        """Whether it does no harm in FP16."""
        return ONLY_BF16.items() <= self.evidence.items()

    def to_json(self) -> dict[str, Any]:
        """Every key always there."""
        return {
            "code": self.code,
            "severity": self.severity,
            "origin": self.origin,
            "where": self.where.to_json(),
            "evidence": dict(self.evidence),
            "text": self.text,
            "cure": self.cure,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Inverse of ``to_json``.

        Raises:
            ValueError: a code, severity or origin that does not exist.
            KeyError: a key is missing.
        """
        return cls(
            code=document["code"],
            severity=document["severity"],
            origin=document["origin"],
            where=Where.from_json(document["where"]),
            evidence=document["evidence"],
            text=document["text"],
            cure=document["cure"],
        )


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _check(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, 1)
        raise ValueError(f"there is no {what} {value!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def _json_value(value: float | str) -> int | float | str:
    """A number that JSON can hold; ``str`` of a non-finite float is ``nan``, ``inf`` or ``-inf``."""
    if isinstance(value, (str, int)):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)
