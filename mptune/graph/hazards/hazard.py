"""What a hazard is: a place where FP16 cannot hold a value, or where a runtime is known to go wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mptune.finding import CODES, ONLY_BF16, Finding, FindingOrigin, Where
from mptune.findings.numbers import where_to_keep
from mptune.findings.wording import AT, SEVERITIES, Severity, Wording, fill
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Node
from mptune.graph.plan import Precision
from mptune.json_form import encode_float

FP16_MAX, BF16_MAX = Precision.FP16.largest, Precision.BF16.largest
"""FP32's largest value, 3.4028e38, rounds to infinity in BF16, too."""
FP16_TINY = Precision.FP16.smallest
"""Smallest FP16 value above zero (subnormal); half of it rounds to zero."""
FP16_NORMAL = Precision.FP16.smallest_normal
"""Smallest normal FP16 value: below it, values lose digits."""

_OF_RANGE = frozenset({"overflow", "range"})
"""Kinds of hazards of severity ``error`` whose value leaves FP16's range."""

_OF_DIGITS = frozenset({"stagnation", "cancellation", "spacing", "long-sum", "index-in-float"})
"""Codes of too few digits: what FP16 has too few for, BF16 has."""


@dataclass(frozen=True)
class Hazard:
    """One place where FP16 cannot hold a value, or where a runtime is known to go wrong.

    Attributes:
        kind: of check that names it.
        row: of ``mptune.finding.CODES``, which has its words; ``wording`` says which of them.
        group: id of the layer group that would be FP16 there; None where no group is.
        value: its magnitude, or what the reason says.
        severity: ``error``: the values do not fit FP16, so the group is pinned to FP32; ``warning``: they may not fit;
            ``info``: good to know.
        names: what the words name beside the place and the evidence.
        samples: indices into the data of the samples that show it.
        precision: BF16 where FP16 has digits enough: it is none in a group that is FP16.
    """

    kind: str
    row: str
    group: str | None
    node: str | None
    tensor: str
    value: float
    evidence: Mapping[str, int | float | str] = field(default_factory=dict, hash=False)
    wording: str = ""
    severity: Severity = field(default="warning", kw_only=True)
    names: Mapping[str, object] = field(default_factory=dict, hash=False, kw_only=True)
    samples: tuple[int, ...] = field(default=(), kw_only=True)
    precision: Precision = field(default=Precision.FP16, kw_only=True)

    @property
    def code(self) -> str | None:
        """Of the finding that it is; None where it is none."""
        return None if self._wording.is_note else self.row

    @property
    def reason(self) -> str:
        """What is wrong, without the place."""
        return fill(self._wording.text, self._values)

    @property
    def cure(self) -> str:
        """What to do."""
        return fill(self._wording.cure, self._values)

    @property
    def _wording(self) -> Wording:
        return CODES[self.row].wording(self.wording)

    @property
    def words(self) -> dict[str, object]:
        """What its wording names beside the place and the evidence."""
        place = where_to_keep(self.precision.name)
        words = {"keep_out": f"keep the group {place}", "kept": f"the group is kept {place}"}
        return {"precision": self.precision.name, **words, **self.names}

    @property
    def _values(self) -> dict[str, object]:
        return {**self._where((self,)).first_names(), **self.evidence, **self.words}

    @staticmethod
    def _where(places: Sequence[Hazard]) -> Where:
        first = next((hazard for hazard in places if hazard.node), places[0])
        return Where(
            nodes=tuple(dict.fromkeys(h.node for h in places if h.node)),
            groups=tuple(dict.fromkeys(h.group for h in places if h.group)),
            tensors=(first.tensor,),
            samples=first.samples,
        )

    @classmethod
    def finding(cls, places: Sequence[Hazard], origin: FindingOrigin) -> Finding:
        """The finding that hazards of one value are; of severity ``info`` where all of them are."""
        first = next((hazard for hazard in places if hazard.node), places[0])
        is_harmless = all(hazard.severity == "info" for hazard in places)
        return Finding.of(
            first.row,
            origin,
            cls._where(places),
            first.evidence if first.precision is Precision.FP16 else {**first.evidence, **ONLY_BF16},
            kind=first.wording,
            severity="info" if is_harmless else None,
            **first.words,
        )

    def rules_out(self, precision: Precision) -> bool:
        """Whether the group cannot be right in a reduced precision.

        What leaves FP16's range is no hazard to BF16, which has FP32's; all else is to one with as few digits.
        """
        if self.severity != "error" or precision.mantissa_bits > self.precision.mantissa_bits:
            return False
        if self.kind == "index":
            return self.value > precision.exact_integers
        if self.kind == "pole":
            return precision is self.precision
        return precision is Precision.FP16 or self.kind not in _OF_RANGE or self.value > precision.largest

    def changes_constant(self, precision: Precision) -> bool:
        """Whether the group holds a constant that a reduced precision changes, because it is beyond its range.

        It is held as the largest finite value, which is the same to a mask or a limit only; outputs show what it does.
        """
        if self.severity != "warning" or "held_as" not in self.evidence or precision is Precision.FP32:
            return False
        return precision is Precision.FP16 or self.value > precision.largest

    def holds_in(self, precision: Precision) -> bool:
        """Whether it is one in a group that has this precision."""
        has_as_few = precision.mantissa_bits <= self.precision.mantissa_bits
        return precision is self.precision or (has_as_few and self.code in _OF_DIGITS)

    def to_json(self) -> dict[str, Any]:
        """As ``mptune inspect --json`` prints it."""
        names = ("severity", "kind", "group", "node", "tensor", "reason", "cure", "code", "samples")
        fields = {name: getattr(self, name) for name in names}
        numbers = {"value": encode_float(self.value), "evidence": dict(self.evidence)}
        return {**fields, **numbers, "precision": str(self.precision)}


def worst_first(hazards: Iterable[Hazard]) -> tuple[Hazard, ...]:
    """Those of the groups with the most severe ones first, which else keep their order; what is info comes last.

    What a group has stays together: an epsilon that is zero in FP16, a warning, is why the next value overflows.
    """
    hazards = list(hazards)
    ranks = [SEVERITIES.index(hazard.severity) for hazard in hazards]
    worst: dict[str | None, int] = {}
    for hazard, rank in zip(hazards, ranks, strict=True):
        worst[hazard.group] = min(rank, worst.get(hazard.group, rank))

    def key(index: int) -> int:
        is_apart = hazards[index].severity == "info" or hazards[index].group is None
        return ranks[index] if is_apart else worst[hazards[index].group]

    return tuple(hazards[index] for index in sorted(range(len(hazards)), key=key))


def hazard_findings(hazards: Sequence[Hazard], origin: FindingOrigin) -> tuple[Finding, ...]:
    """The hazards that have a code, as findings; those of one value with one reason are one finding.

    A hazard of severity ``error`` pins its group, which repairs it: its finding has the code's severity, as a plan may
    still put the group in FP16.
    """
    merged: dict[tuple[str, str, str, str], list[Hazard]] = {}
    for hazard in hazards:
        if hazard.code is not None:
            merged.setdefault((hazard.code, hazard.tensor, hazard.reason, hazard.cure), []).append(hazard)
    return tuple(Hazard.finding(places, origin) for places in merged.values())


def near_the_end(hazards: Sequence[Hazard]) -> tuple[str, ...]:
    """One line of what is finite in FP16 on the samples and near its end: other data may go beyond. None of nothing."""
    near = [h for h in hazards if (h.kind, h.severity, h.code) == ("range", "warning", None) and h.value <= FP16_MAX]
    if not near:
        return ()
    largest = max(near, key=lambda hazard: hazard.value)
    others = len({hazard.tensor for hazard in near}) - 1
    more = f"; so for {others} more value{'s' * (others > 1)}" if others else ""
    return (f"{fill(AT, vars(largest))}{largest.reason}{more}: {largest.cure}",)


def spacing(value: float, precision: Precision) -> float:
    """Distance of neighbouring values at a magnitude.

    Of FP16 2**-10 of its power of two, and 2**-24 for subnormals; of BF16 2**-7, and 2**-133.
    """
    digits, tiny = precision.mantissa_bits, precision.smallest
    return max(2.0 ** (math.floor(math.log2(abs(value))) - digits), tiny) if value else tiny


def readers_in_fp16(types: ValueTypes, tensor: str) -> list[Node]:
    """The nodes that would read a value in FP16."""
    nodes = (types.model.nodes[i] for i in types.model.consumers.get(tensor, ()))
    return [n for n in nodes if any(n.inputs[slot] == tensor for slot in types.rules[n.index].inputs)]


def group_of(types: ValueTypes, node: Node) -> LayerGroup | None:
    """The group that would be FP16 there; None where none would be under any plan."""
    position = types.group_of[node.index]
    return types.groups[position] if position >= 0 and types.groups[position].pinned is None else None


def largest(values: Sequence[float]) -> int:
    """Position of the largest finite value."""
    return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)
