"""Finding: one thing that is wrong or worth knowing, with a code, the place, the numbers that prove it and the cure.

Whatever detects something calls ``Finding.from_code`` with code, place and evidence; the words come from the table,
``CODES`` (``mptune/findings``). A code never changes its meaning, so that scripts can rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from mptune.findings.comparison import COMPARISON
from mptune.findings.data import DATA
from mptune.findings.engine import ENGINE
from mptune.findings.numbers import NUMBERS
from mptune.findings.reference import REFERENCE
from mptune.findings.wording import SEVERITIES, CodeInfo, Severity, located
from mptune.json_form import JsonForm

CODES: Mapping[str, CodeInfo] = MappingProxyType({**NUMBERS, **REFERENCE, **DATA, **ENGINE, **COMPARISON})
"""Every code that a finding can have."""
_AT_VALUE = frozenset({*NUMBERS, "broadcast", "data-do-not-fit"})
"""Codes whose text begins with the value and the node, where the finding has them."""
BREAKING_CODES = (
    *("overflow", "vanishing-epsilon", "vanishing-values", "mask", "stagnation", "index-in-float", "spacing"),
    *("angle-spacing", "cancellation"),
)
"""Codes of values that FP16 cannot hold, or holds so coarsely that the outputs suffer; the plainest first."""
FP16_CODES = frozenset((*BREAKING_CODES, "long-sum", "norm-written-out", "no-fp16-kernel"))
"""Codes of what FP16 breaks or lacks; the others are about the model in FP32, the data, the target or the run."""
RANGE_CODES = frozenset({"overflow", "mask", "vanishing-epsilon", "vanishing-values", "norm-written-out"})
"""Codes of values that leave FP16's range, which BF16 holds."""
FindingOrigin = Literal["inspect", "search", "confirm", "compare", "apply"]  # the command that made a finding
ONLY_BF16: Mapping[str, str] = MappingProxyType({"precision": "bf16"})
"""Part of the evidence where BF16 has too few digits and FP16 has enough."""
Evidence = Mapping[str, int | float | str]  # the numbers that prove a finding, by name


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
class Where(JsonForm):
    """The places that a finding is about: names, ids of groups, and 0-based indices of samples in the data."""

    nodes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    outputs: tuple[OutputColumns, ...] = ()
    inputs: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    def first_names(self) -> dict[str, object]:
        """The first of each kind of place, by its name in the singular."""
        names: dict[str, object] = {name[:-1]: places[0] for name, places in vars(self).items() if places}
        return {**names, "output": self.outputs[0].name} if self.outputs else names


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
        allowed = {"code": CODES, "severity": SEVERITIES, "origin": get_args(FindingOrigin)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"there is no {name} {getattr(self, name)!r}")
        evidence = {n: v if isinstance(v, (str, int)) else float(v) for n, v in self.evidence.items()}
        # JSON has no numbers that are not finite.
        evidence = {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in evidence.items()}
        object.__setattr__(self, "evidence", evidence)

    @classmethod
    def from_code(
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
            kind: which of the code's circumstances.
            severity: where it is not that of the words, or the code's.
            names: what the words name beside the evidence and the first of each kind of place.
        """
        row = CODES[code]
        words = row.say({"kind": kind, **where.first_names(), **evidence, **names})
        is_at_value = code in _AT_VALUE and where.tensors
        text = located(where.tensors[0], next(iter(where.nodes), None)) + words.text if is_at_value else words.text
        return cls(code, severity or words.severity or row.severity, origin, where, evidence, text, words.cure)

    @property
    def message(self) -> str:
        """Text and cure as one line, as warnings are shown."""
        return f"{self.text}; {self.cure}" if self.cure else self.text

    @property
    def is_about_model(self) -> bool:
        """Whether it names places in the model, and not the data, the target or the run as a whole."""
        return bool(self.where.nodes or self.where.groups)

    @property
    def is_breaking(self) -> bool:
        """Whether it is about a value that FP16 cannot hold; not a mask that is held as -65504, and masks as well."""
        return self.code in BREAKING_CODES and not (self.code == "mask" and "held_as" in self.evidence)

    def on_held_out_samples(self) -> Finding:
        """The same, seen on the held-out samples alone."""
        return replace(self, text=f"held-out samples: {self.text}")

    def under_plan(self, fp32_groups: Collection[str], bf16_groups: Collection[str] = ()) -> Finding:
        """The same as it stands under a plan: a warning whose groups are all FP32 there is ``info``.

        Or BF16, where it is FP16's range that the values leave; or FP16, where only BF16 has too few digits.
        """
        groups = self.where.groups
        if self.is_of_bf16_alone:
            does_no_harm = not any(group in bf16_groups for group in groups)
        else:
            unreduced = {*fp32_groups, *(bf16_groups if self.code in RANGE_CODES else ())}
            does_no_harm = all(group in unreduced for group in groups)
        return replace(self, severity="info") if self.severity == "warning" and groups and does_no_harm else self

    @property
    def is_of_bf16_alone(self) -> bool:
        """Whether it does no harm in FP16."""
        return ONLY_BF16.items() <= self.evidence.items()

    def to_json(self) -> dict[str, Any]:
        """Every key always there."""
        return {**vars(self), "where": self.where.to_json(), "evidence": dict(self.evidence)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        """Inverse of ``to_json``.

        Raises:
            ValueError: a code, severity or origin that does not exist.
            KeyError: a key is missing.
        """
        values = {each.name: document[each.name] for each in fields(cls)}
        return cls(**{**values, "where": Where.from_json(document["where"])})


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
