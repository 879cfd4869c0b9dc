"""Finding: one thing that is wrong or worth knowing, with a code, the place, the numbers that prove it and the cure.

The same record stands in ``front.json``, in ``mptune inspect --json`` and in Python. ``CODES`` lists every code there
is; a code never changes its meaning, so that scripts can rely on it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]
"""error: no plan repairs it. warning: figures or the choice may mislead. info: good to know."""

FindingOrigin = Literal["inspect", "search", "confirm", "compare", "apply"]
"""The command that made a finding."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The most severe first."""


@dataclass(frozen=True)
class CodeInfo:
    """What a code stands for.

    Attributes:
        severity: the default; a finding about a group that the plan keeps in FP32 is ``info`` whatever stands here.
        meaning: one line.
    """

    severity: Severity
    meaning: str


_TABLE: tuple[tuple[str, Severity, str], ...] = (
    # Numbers of the model.
    ("overflow", "warning", "a value beyond 65504 that the plan would hold in FP16"),
    ("vanishing-epsilon", "warning", "an epsilon that is zero in FP16 and guards a denominator that can reach zero"),
    ("spacing", "warning", "values so large that FP16's spacing exceeds the differences that decide downstream"),
    ("stagnation", "warning", "an Add whose smaller side is below half of FP16's spacing at the other: it is lost"),
    ("cancellation", "warning", "a Sub or Add whose result is much smaller than its operands"),
    ("long-sum", "info", "a long one-signed sum that would stop growing if it were accumulated in FP16"),
    ("index-in-float", "warning", "float arithmetic that becomes an index or a size, above 2048 not exact in FP16"),
    ("mask", "warning", "a mask beyond FP16's range that is multiplied, added or meets a fully masked row"),
    ("norm-written-out", "warning", "a normalisation written out in pieces instead of as one operator"),
    ("int64-range", "warning", "an INT64 value that INT32 cannot hold and that is not the end of a Slice"),
    # The model in FP32.
    ("reference-not-finite", "error", "the FP32 reference holds NaN or Inf"),
    ("not-deterministic", "error", "two FP32 runs on the same sample differ"),
    ("reference-zero", "error", "every output of the FP32 reference is zero"),
    ("output-constant", "warning", "an output does not depend on the data"),
    ("rows-mix", "error", "a row of a batch alone differs from the same row among different rows"),
    ("batch-not-kept", "error", "an output does not have as many rows as the input"),
    ("broadcast", "info", "a broadcast at a static batch of 1 that TensorRT has been seen to get wrong"),
    ("value-dependent-shape", "info", "an operator whose output shape depends on values, such as NonZero"),
    ("state-fed-back", "info", "an output that pairs with an input: the error of one step says little"),
    ("size-dependent", "warning", "errors at another declared size are several times those at the size of the data"),
    # The data.
    ("random-data", "warning", "the samples are random numbers, or look like them"),
    ("constant-data", "warning", "an input is the same everywhere in all samples"),
    ("duplicate-samples", "warning", "the same sample is there more than once"),
    ("too-few-samples", "warning", "too few samples to hold any out"),
    ("data-do-not-fit", "warning", "activations before a BatchNorm lie far off its running mean"),
    ("one-sample-decides", "warning", "one sample's error is far above that of the rest"),
    ("held-out-differs", "warning", "the held-out error is far above the error that the search saw"),
    # The plan and its engine.
    ("column-hidden", "warning", "a column of an output moves far more than the whole tensor's error shows"),
    ("near-zero", "info", "a large relative error with a tiny absolute one"),
    ("no-fp16-kernel", "info", "the toolchain has no FP16 kernel for an operator"),
    ("no-bf16-kernel", "info", "the toolchain has no BF16 kernel for an operator"),
    ("quantised-parts", "warning", "quantised patterns of the model stay as they are"),
    ("operators-out-of-reach", "warning", "operators whose precision cannot be searched"),
    ("engine-differs", "error", "the all-FP32 engine differs from the reference beyond rounding"),
    ("reference-depends-on-optimisation", "warning", "ONNX Runtime with optimisations on and off differs"),
    ("target-not-here", "info", "the target is not here, so latency is predicted"),
    ("emulation-differs", "warning", "measured and emulated errors disagree"),
    ("already-mixed", "warning", "the model holds FP16 already"),
    # A comparison.
    ("agrees", "info", "the outputs differ by what FP16 or TF32 rounding gives, or less"),
    ("stale-rows", "warning", "rows equal the reference of another row, such as the one before"),
    ("torn-rows", "warning", "rows are part this and part the previous result"),
    ("tf32-reference", "warning", "the difference is what TF32 in the reference makes"),
    ("tf32-candidate", "warning", "the difference is what TF32 in the candidate makes"),
    ("outputs-permuted", "warning", "outputs, columns or rows are in another order, or have another sign"),
    ("attribute-differs", "warning", "two models differ in an attribute, a constant or their structure"),
    ("first-difference", "warning", "the first group along the graph that leaves the tolerance"),
    ("precision", "warning", "the difference comes from FP16"),
)

ONLY_BF16: Mapping[str, str] = MappingProxyType({"precision": "bf16"})
"""Part of the evidence where BF16 has too few digits and FP16 has enough."""

RANGE_CODES = frozenset({"overflow", "mask", "vanishing-epsilon", "norm-written-out"})
"""Values that leave FP16's range, which BF16 holds."""

CODES: Mapping[str, CodeInfo] = MappingProxyType({code: CodeInfo(severity, text) for code, severity, text in _TABLE})
"""Every code that a finding can have."""


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
    """The places that a finding is about, as far as each applies.

    Attributes:
        nodes: names of nodes.
        groups: ids of layer groups.
        tensors: names of values.
        outputs: of the model.
        inputs: names of inputs of the model.
        samples: indices into the data, 0-based.
    """

    nodes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    outputs: tuple[OutputColumns, ...] = ()
    inputs: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

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
