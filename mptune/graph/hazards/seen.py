"""What the values of a model were on data: records that reports read without loading onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mptune.graph.plan import Precision
from mptune.json_form import JsonForm


@dataclass(frozen=True)
class MaskedRows:
    """Rows of a value that a softmax is taken of, in which no element lies within FP16's range.

    Attributes:
        rows: how many, over all samples.
        sample: index of the first sample with one.
        samples: how many samples have one.
    """

    rows: int
    sample: int = 0
    samples: int = 1


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
    """One FP32 value over all samples.

    Attributes:
        absmax: largest finite magnitude.
        shape: on the first sample.
        non_finite: how many elements were NaN or infinite.
        lowest: smallest finite element, signed; at most 0 where some are not finite. ``highest`` likewise.
        sample: position of the sample with the largest magnitude among those that were run.
        beyond: how many samples hold a magnitude beyond FP16's largest value.
        samples: how many were run.
        masked: of a value that a softmax is taken of, its rows that are masked whole; None where there are none.
        probes: facts about the node that computes it, or reads it and computes no FP32.
    """

    absmax: float
    shape: tuple[int, ...] = ()
    non_finite: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    sample: int = 0
    beyond: int = 0
    samples: int = 1
    masked: MaskedRows | None = None
    probes: tuple[NodeFacts, ...] = ()

    @property
    def smallest(self) -> float:
        """The smallest magnitude; 0 where there are values of both signs."""
        return max(self.lowest, -self.highest, 0.0)

    @classmethod
    def over_samples(cls, samples: Sequence[TensorRange], probes: Sequence[NodeFacts] = ()) -> TensorRange:
        """The range over all samples of a value, of its range on each."""
        masked = [(position, each.masked) for position, each in enumerate(samples) if each.masked]
        return cls(
            absmax=max(each.absmax for each in samples),
            shape=samples[0].shape,
            non_finite=sum(each.non_finite for each in samples),
            lowest=min(each.lowest for each in samples),
            highest=max(each.highest for each in samples),
            sample=max(range(len(samples)), key=lambda position: samples[position].absmax),
            beyond=sum(each.beyond for each in samples),
            samples=len(samples),
            masked=MaskedRows(sum(rows.rows for _, rows in masked), masked[0][0], len(masked)) if masked else None,
            probes=tuple(probes),
        )


@dataclass(frozen=True)
class Seen(JsonForm):
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
