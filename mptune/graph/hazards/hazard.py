"""What a hazard is: a place where FP16 cannot hold a value, or where a runtime is known to go wrong.

And what the values of a model were on data (``ObservedValues``), from which most hazards follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mptune.finding import CODES, ONLY_BF16, Finding, FindingOrigin, Where
from mptune.findings.numbers import NOTES, where_to_keep
from mptune.findings.wording import SEVERITIES, Severity, Words
from mptune.graph.loading.model import Node
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes
from mptune.json_form import JsonForm, encode, encode_float

FP16_MAX = Precision.FP16.largest
FP16_TINY, FP16_NORMAL = Precision.FP16.smallest, Precision.FP16.smallest_normal
"""Half of the former rounds to zero; below the latter, values lose digits."""
_OF_DIGITS = frozenset({"stagnation", "cancellation", "spacing", "angle-spacing", "long-sum", "index-in-float"})
"""Codes of too few digits: what FP16 has too few for, BF16 has."""


@dataclass(frozen=True)
class HazardPlace:
    """Where a hazard is."""

    node: str | None  # None in a group that only computes what the node reads
    group: str | None  # id of the layer group that would be FP16 there; None where no group is
    tensor: str
    samples: tuple[int, ...] = ()  # indices into the data of those that show it


@dataclass(frozen=True)
class Hazard:
    """One such place, and what is wrong there."""

    code: str  # row of ``mptune.finding.CODES``, which has its words for each ``wording``
    place: HazardPlace
    evidence: Mapping[str, int | float | str] = field(default_factory=dict, hash=False)
    wording: str = ""
    severity: Severity = "warning"  # ``error`` pins the group to FP32
    value: float = 0.0  # the magnitude that a precision must hold, or another number of the kind
    words: Mapping[str, object] = field(default_factory=dict, hash=False)  # beside the place and the evidence
    precision: Precision = Precision.FP16  # BF16 where FP16 has digits enough: it is none in a group that is FP16

    @property
    def is_of_range(self) -> bool:
        """Whether a value leaves FP16's range."""
        return self.code in ("overflow", "mask")

    @property
    def is_note(self) -> bool:
        """Whether it is no finding by itself."""
        return (self.code, self.wording) in NOTES

    @property
    def all_words(self) -> dict[str, object]:
        """What its words name, beside the place and the evidence."""
        name, place = self.precision.name, where_to_keep(self.precision.name)
        kept = {"keep_out": f"keep the group {place}", "kept": f"the group is kept {place}"}
        return {"kind": self.wording, "precision": name, **kept, **self.words}

    @property
    def reason(self) -> str:
        """What is wrong, without the place."""
        return self._words.text

    @property
    def cure(self) -> str:
        """What to do."""
        return self._words.cure

    @property
    def _words(self) -> Words:
        return CODES[self.code].say({**_where((self,)).first_names(), **self.evidence, **self.all_words})

    def rules_out(self, precision: Precision, *, is_measured: bool = True) -> bool:
        """Whether the group cannot be right in a reduced precision.

        What leaves FP16's range is no hazard to BF16, which has FP32's; all else is to one with as few digits. A
        constant beyond the range is held as the largest finite value, which is the same to a mask or a limit only:
        where outputs are not measured, which show what that does, it rules the precision out, too.
        """
        is_changed = self.severity == "warning" and "held_as" in self.evidence and not is_measured
        if not (self.severity == "error" or is_changed) or precision.mantissa_bits > self.precision.mantissa_bits:
            return False
        if self.code == "index-in-float":
            return self.value > precision.exact_integers
        if self.code in ("vanishing-values", "vanishing-epsilon"):
            return precision is self.precision
        return precision is Precision.FP16 or not self.is_of_range or self.value > precision.largest

    def holds_in(self, precision: Precision) -> bool:
        """Whether it is one in a group that has this precision."""
        has_as_few = precision.mantissa_bits <= self.precision.mantissa_bits
        return precision is self.precision or (has_as_few and self.code in _OF_DIGITS)

    def to_json(self) -> dict[str, Any]:
        """As ``mptune inspect --json`` prints it; the code of a note is null."""
        about: dict[str, Any] = {"severity": self.severity, "code": None if self.is_note else self.code}
        about |= {"reason": self.reason, "cure": self.cure, **vars(self.place), "value": encode_float(self.value)}
        return {**about, "evidence": encode(self.evidence), "precision": str(self.precision)}


def _where(hazards: Sequence[Hazard]) -> Where:
    first = next((hazard.place for hazard in hazards if hazard.place.node), hazards[0].place)
    return Where(
        nodes=tuple(dict.fromkeys(h.place.node for h in hazards if h.place.node)),
        groups=tuple(dict.fromkeys(h.place.group for h in hazards if h.place.group)),
        tensors=tuple(dict.fromkeys((first.tensor, *(h.place.tensor for h in hazards)))),
        samples=first.samples,
    )


def hazard_findings(hazards: Sequence[Hazard], origin: FindingOrigin) -> tuple[Finding, ...]:
    """The hazards that are no notes, as findings: those of one value with one reason are one.

    So are overflows with one reason, of a value that passes through nodes. One that pins its group has the severity of
    its code, as a plan may still put the group in FP16; it is ``info`` where all of its hazards are.
    """
    merged: dict[tuple[str, str, str, str], list[Hazard]] = {}
    for hazard in (hazard for hazard in hazards if not hazard.is_note):
        value = "" if hazard.code == "overflow" else hazard.place.tensor
        merged.setdefault((hazard.code, value, hazard.reason, hazard.cure), []).append(hazard)
    findings = []
    for same in merged.values():
        first = next((hazard for hazard in same if hazard.place.node), same[0])
        evidence = {**first.evidence, **(ONLY_BF16 if first.precision is Precision.BF16 else {})}
        about: Any = {**first.all_words, "severity": "info" if all(h.severity == "info" for h in same) else None}
        findings.append(Finding.from_code(first.code, origin, _where(same), evidence, **about))
    return tuple(findings)


def worst_first(hazards: Iterable[Hazard]) -> tuple[Hazard, ...]:
    """Those of the groups with the most severe ones first, which else keep their order; what is info comes last.

    What a group has stays together: an epsilon that is zero in FP16, a warning, is why the next value overflows.
    """
    ranked = [(SEVERITIES.index(hazard.severity), hazard) for hazard in hazards]
    worst = {h.place.group: rank for rank, h in sorted(ranked, key=lambda each: -each[0])}
    own = [rank if h.severity == "info" or h.place.group is None else worst[h.place.group] for rank, h in ranked]
    return tuple(ranked[k][1] for k in sorted(range(len(own)), key=own.__getitem__))


def spacing(value: float, precision: Precision) -> float:
    """Distance of neighbouring values at a magnitude: of FP16 2**-10 of its power of two, and 2**-24 below normal."""
    above = 2.0 ** (math.floor(math.log2(abs(value))) - precision.mantissa_bits) if value else 0.0
    return max(above, precision.smallest)


def touching(types: ValueTypes, tensor: str) -> list[Node]:
    """The nodes that would compute a value in FP16, or read it in that."""
    model = types.model
    indices = [*([model.producer[tensor]] if tensor in model.producer else ()), *model.consumers.get(tensor, ())]
    rules = ((model.nodes[index], types.rules[index]) for index in indices)
    changed = ((node, {node.outputs[k] for k in r.outputs} | {node.inputs[k] for k in r.inputs}) for node, r in rules)
    return [node for node, values in changed if tensor in values]


def group_of(types: ValueTypes, node: Node, precision: Precision = Precision.FP16) -> str | None:
    """Id of the group that would have a reduced precision there; None where none would under any plan."""
    position = types.group_of[node.index]
    is_free = position >= 0 and types.groups[position].pinned is None and position not in types.lacking(precision)
    return types.groups[position].id if is_free else None


# -- what was observed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeFacts(JsonForm):
    """What rounding its operands changes at one node; and other facts about it (``mptune.graph.hazards.probes``)."""

    node: str
    facts: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)  # name -> its value on each sample
    precision: Precision = Precision.FP16  # that the operands are rounded to


@dataclass(frozen=True)
class TensorRange(JsonForm):
    """One FP32 value, over all samples or on one; samples are positions among those that were run."""

    absmax: float  # largest finite magnitude
    shape: tuple[int, ...] = ()  # on the first sample
    lowest: float = 0.0  # smallest finite element, signed; at most 0 where some are not finite
    highest: float = 0.0  # likewise
    sample: int = 0  # that with the largest magnitude
    beyond: int = 0  # how many samples hold a magnitude beyond FP16's largest value
    samples: int = 1
    masked_rows: int = 0  # where a softmax is taken of it: its rows that have no element within FP16's range
    masked_sample: int = 0  # the first of ``masked_samples`` with one
    masked_samples: int = 0
    probes: tuple[NodeFacts, ...] = ()  # of the node that computes it, or reads it and computes no FP32

    @property
    def smallest(self) -> float:
        """The smallest magnitude; 0 where there are values of both signs."""
        return max(self.lowest, -self.highest, 0.0)

    @classmethod
    def over_samples(cls, samples: Sequence[TensorRange], probes: Sequence[NodeFacts] = ()) -> TensorRange:
        """The range over all samples of a value, of its range on each."""
        largest = max(samples, key=lambda each: each.absmax)
        masked = [position for position, each in enumerate(samples) if each.masked_rows]
        ends = min(each.lowest for each in samples), max(each.highest for each in samples)
        counts = samples.index(largest), sum(each.beyond for each in samples), len(samples)
        rows = sum(each.masked_rows for each in samples), min(masked, default=0), len(masked)
        return cls(largest.absmax, samples[0].shape, *ends, *counts, *rows, tuple(probes))


@dataclass(frozen=True)
class ObservedValues(JsonForm):
    """What runs of the untouched model over the samples showed."""

    ranges: Mapping[str, TensorRange] = field(default_factory=dict)  # of FP32 values; empty where it was not run
    indices: tuple[int, ...] = ()  # in the data, of each sample that was run; empty where they are all of the data

    @cached_property
    def absmax(self) -> dict[str, float]:
        """Value -> largest finite magnitude."""
        return {tensor: values.absmax for tensor, values in self.ranges.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Value -> shape on the first sample."""
        return {tensor: values.shape for tensor, values in self.ranges.items()}

    @cached_property
    def probes(self) -> tuple[NodeFacts, ...]:
        """The facts about all nodes."""
        return tuple(facts for values in self.ranges.values() for facts in values.probes)

    def sample(self, position: int) -> int:
        """Index in the data of a sample that was run."""
        return self.indices[position] if position < len(self.indices) else position
