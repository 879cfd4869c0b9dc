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
    """Where a hazard is.

    Attributes:
        node: None in a group that only computes what the node reads.
        group: id of the layer group that would be FP16 there; None where no group is.
        samples: indices into the data of the samples that show it.
    """

    node: str | None
    group: str | None
    tensor: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hazard:
    """One such place, and what is wrong there.

    Attributes:
        code: row of ``mptune.finding.CODES``, which has its words for each ``wording``.
        severity: ``error``: the values do not fit FP16, so the group is pinned to FP32; ``warning``: they may not fit;
            ``info``: good to know.
        value: the magnitude that a precision must hold, or another number of the kind.
        words: what the text names beside the place and the evidence.
        precision: BF16 where FP16 has digits enough: it is none in a group that is FP16.
    """

    code: str
    place: HazardPlace
    evidence: Mapping[str, int | float | str] = field(default_factory=dict, hash=False)
    wording: str = ""
    severity: Severity = "warning"
    value: float = 0.0
    words: Mapping[str, object] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16

    @property
    def is_of_range(self) -> bool:
        """Whether a value leaves FP16's range."""
        return self.code in ("overflow", "mask")

    @property
    def is_note(self) -> bool:
        """Whether it is no finding by itself."""
        return (self.code, self.wording) in NOTES

    @property
    def reason(self) -> str:
        """What is wrong, without the place."""
        return self._filled.text

    @property
    def cure(self) -> str:
        """What to do."""
        return self._filled.cure

    @property
    def all_words(self) -> dict[str, object]:
        """What its words name, beside the place and the evidence."""
        place = where_to_keep(self.precision.name)
        words = {"keep_out": f"keep the group {place}", "kept": f"the group is kept {place}"}
        return {"precision": self.precision.name, **words, **self.words}

    @property
    def _filled(self) -> Words:
        place = _where((self,)).first_names()
        return CODES[self.code].say({"kind": self.wording, **place, **self.evidence, **self.all_words})

    def rules_out(self, precision: Precision) -> bool:
        """Whether the group cannot be right in a reduced precision.

        What leaves FP16's range is no hazard to BF16, which has FP32's; all else is to one with as few digits.
        """
        if self.severity != "error" or precision.mantissa_bits > self.precision.mantissa_bits:
            return False
        if self.code == "index-in-float":
            return self.value > precision.exact_integers
        if self.code in ("vanishing-values", "vanishing-epsilon"):
            return precision is self.precision
        return precision is Precision.FP16 or not self.is_of_range or self.value > precision.largest

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
        """As ``mptune inspect --json`` prints it; the code of a note is null."""
        texts = {"code": None if self.is_note else self.code, "reason": self.reason, "cure": self.cure}
        numbers = {"value": encode_float(self.value), "evidence": encode(self.evidence)}
        return {"severity": self.severity, **texts, **vars(self.place), **numbers, "precision": str(self.precision)}


def _where(hazards: Sequence[Hazard]) -> Where:
    first = next((hazard.place for hazard in hazards if hazard.place.node), hazards[0].place)
    return Where(
        nodes=tuple(dict.fromkeys(h.place.node for h in hazards if h.place.node)),
        groups=tuple(dict.fromkeys(h.place.group for h in hazards if h.place.group)),
        tensors=tuple(dict.fromkeys((first.tensor, *(h.place.tensor for h in hazards)))),
        samples=first.samples,
    )


def hazard_findings(hazards: Sequence[Hazard], origin: FindingOrigin) -> tuple[Finding, ...]:
    """The hazards that are no notes, as findings; those of one value with one reason are one finding.

    So are overflows with one reason: the value passes through nodes that leave it as it is.

    A hazard of severity ``error`` pins its group, which repairs it: its finding has the code's severity, as a plan may
    still put the group in FP16. It is ``info`` where all of its hazards are.
    """
    merged: dict[tuple[str, str, str, str], list[Hazard]] = {}
    for hazard in hazards:
        if not hazard.is_note:
            value = "" if hazard.code == "overflow" else hazard.place.tensor
            merged.setdefault((hazard.code, value, hazard.reason, hazard.cure), []).append(hazard)
    findings = []
    for same in merged.values():
        first = next((hazard for hazard in same if hazard.place.node), same[0])
        evidence = first.evidence if first.precision is Precision.FP16 else {**first.evidence, **ONLY_BF16}
        severity: Severity | None = "info" if all(hazard.severity == "info" for hazard in same) else None
        about: dict[str, Any] = {"kind": first.wording, "severity": severity, **first.all_words}
        findings.append(Finding.from_code(first.code, origin, _where(same), evidence, **about))
    return tuple(findings)


def worst_first(hazards: Iterable[Hazard]) -> tuple[Hazard, ...]:
    """Those of the groups with the most severe ones first, which else keep their order; what is info comes last.

    What a group has stays together: an epsilon that is zero in FP16, a warning, is why the next value overflows.
    """
    hazards, worst = list(hazards), dict[str | None, int]()
    for hazard in hazards:
        rank = SEVERITIES.index(hazard.severity)
        worst[hazard.place.group] = min(rank, worst.get(hazard.place.group, rank))
    apart = {id(h): SEVERITIES.index(h.severity) for h in hazards if h.severity == "info" or h.place.group is None}
    return tuple(sorted(hazards, key=lambda hazard: apart.get(id(hazard), worst[hazard.place.group])))


def spacing(value: float, precision: Precision) -> float:
    """Distance of neighbouring values at a magnitude: of FP16 2**-10 of its power of two, and 2**-24 below normal."""
    above = 2.0 ** (math.floor(math.log2(abs(value))) - precision.mantissa_bits) if value else 0.0
    return max(above, precision.smallest)


def touching(types: ValueTypes, tensor: str) -> list[Node]:
    """The nodes that would compute a value in FP16, or read it in that."""
    model = types.model
    indices = [*([model.producer[tensor]] if tensor in model.producer else ()), *model.consumers.get(tensor, ())]
    rules = ((model.nodes[index], types.rules[index]) for index in indices)
    return [
        node
        for node, rule in rules
        if tensor in {node.outputs[k] for k in rule.outputs} | {node.inputs[k] for k in rule.inputs}
    ]


def group_of(types: ValueTypes, node: Node) -> str | None:
    """Id of the group that would be FP16 there; None where none would be under any plan."""
    position = types.group_of[node.index]
    return types.groups[position].id if position >= 0 and types.groups[position].pinned is None else None


# -- what was observed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeFacts(JsonForm):
    """What rounding its operands changes at one node; and other facts about it (``mptune.graph.hazards.probes``).

    Attributes:
        facts: name -> its value on each sample, in the order of the samples.
        precision: that the operands are rounded to.
    """

    node: str
    facts: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16


@dataclass(frozen=True)
class TensorRange(JsonForm):
    """One FP32 value, over all samples or on one.

    Attributes:
        absmax: largest finite magnitude.
        shape: on the first sample.
        lowest: smallest finite element, signed; at most 0 where some are not finite. ``highest`` likewise.
        sample: position of the sample with the largest magnitude among those that were run.
        beyond: how many samples hold a magnitude beyond FP16's largest value.
        samples: how many were run.
        masked_rows: of a value that a softmax is taken of, how many of its rows have no element within FP16's range.
        masked_sample: position of the first sample with one, of ``masked_samples``.
        probes: facts about the node that computes it, or reads it and computes no FP32.
    """

    absmax: float
    shape: tuple[int, ...] = ()
    lowest: float = 0.0
    highest: float = 0.0
    sample: int = 0
    beyond: int = 0
    samples: int = 1
    masked_rows: int = 0
    masked_sample: int = 0
    masked_samples: int = 0
    probes: tuple[NodeFacts, ...] = ()

    @property
    def smallest(self) -> float:
        """The smallest magnitude; 0 where there are values of both signs."""
        return max(self.lowest, -self.highest, 0.0)

    @classmethod
    def over_samples(cls, samples: Sequence[TensorRange], probes: Sequence[NodeFacts] = ()) -> TensorRange:
        """The range over all samples of a value, of its range on each."""
        largest = max(samples, key=lambda each: each.absmax)
        masked = [position for position, each in enumerate(samples) if each.masked_rows]
        return cls(
            largest.absmax,
            samples[0].shape,
            min(each.lowest for each in samples),
            max(each.highest for each in samples),
            samples.index(largest),
            sum(each.beyond for each in samples),
            len(samples),
            sum(each.masked_rows for each in samples),
            min(masked, default=0),
            len(masked),
            tuple(probes),
        )


@dataclass(frozen=True)
class ObservedValues(JsonForm):
    """What runs of the untouched model over the samples showed.

    Attributes:
        ranges: FP32 value -> its range; empty where the model was not run.
        indices: index in the data of each sample that was run; empty where they are all of the data.
    """

    ranges: Mapping[str, TensorRange] = field(default_factory=dict)
    indices: tuple[int, ...] = ()

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
