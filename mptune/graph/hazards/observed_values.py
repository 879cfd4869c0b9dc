"""What the values of a model were on data: records that reports read without loading onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mptune.graph.plan import Precision
from mptune.json_form import JsonForm


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
        masked = [position for position, each in enumerate(samples) if each.masked_rows]
        return cls(
            max(each.absmax for each in samples),
            samples[0].shape,
            min(each.lowest for each in samples),
            max(each.highest for each in samples),
            sample=max(range(len(samples)), key=lambda position: samples[position].absmax),
            beyond=sum(each.beyond for each in samples),
            samples=len(samples),
            masked_rows=sum(each.masked_rows for each in samples),
            masked_sample=min(masked, default=0),
            masked_samples=len(masked),
            probes=tuple(probes),
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
