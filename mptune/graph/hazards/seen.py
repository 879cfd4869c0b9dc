"""What the values of a model were seen to be on data: records that reports read without loading onnx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mptune.graph.plan import Precision
from mptune.json_form import JsonForm, decode_float, encode_float

ProbeKind = Literal[
    "sum",
    "norm",
    "softmax",
    "largest",
    "comparison",
    "pole",
    "batch-norm",
]


@dataclass(frozen=True)
class MaskedRows:
    """What was seen of one value that a softmax is taken of.

    Attributes:
        rows: how many rows had no element within FP16's range, over all samples.
        sample: index of the first sample with one.
    """

    rows: int
    sample: int
    samples: int = 1


@dataclass(frozen=True)
class ProbeRecord(JsonForm):
    """The answer.

    Attributes:
        scalars: fact -> its value on each sample, in the order of the samples;
            ``mptune.graph.writing.observe`` lists the facts.
        vectors: fact -> its mean over the samples, [channels].
    """

    kind: ProbeKind
    node: str
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16


@dataclass(frozen=True)
class SeenValue:
    """One FP32 value over all samples.

    Attributes:
        lowest: smallest finite value, signed; 0 where some are not finite and all others are above it.
        sample: position of the sample with the largest magnitude among those that were run.
        beyond: how many samples hold a magnitude beyond FP16's largest value.
    """

    lowest: float = 0.0
    highest: float = 0.0
    sample: int = 0
    beyond: int = 0
    samples: int = 1

    @property
    def smallest(self) -> float:
        """The smallest magnitude; 0 where there are values of both signs."""
        return max(self.lowest, -self.highest, 0.0)


@dataclass(frozen=True)
class Seen:
    """What one run of the model over the samples showed.

    Attributes:
        shapes: FP32 value -> its shape on the first sample.
        indices: index in the data of each sample that was run; empty where they are all of the data.
    """

    values: Mapping[str, SeenValue] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    records: tuple[ProbeRecord, ...] = ()
    indices: tuple[int, ...] = ()

    def of(self, *kinds: ProbeKind) -> Iterator[ProbeRecord]:
        """The answers to some kinds of probes."""
        return (record for record in self.records if record.kind in kinds)

    def sample(self, position: int) -> int:
        """Index in the data of a sample that was run."""
        return self.indices[position] if position < len(self.indices) else position

    def to_json(self) -> dict[str, Any]:
        """Everything but the shapes, which are kept elsewhere."""
        return {
            "values": {
                tensor: [encode_float(seen.lowest), encode_float(seen.highest), seen.sample, seen.beyond, seen.samples]
                for tensor, seen in self.values.items()
            },
            "records": [record.to_json() for record in self.records],
            "indices": list(self.indices),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Seen:
        """Inverse of ``to_json``."""
        values = {
            tensor: SeenValue(decode_float(low), decode_float(high), *map(int, counts))
            for tensor, (low, high, *counts) in document["values"].items()
        }
        records = tuple(map(ProbeRecord.from_json, document["records"]))
        return cls(values, records=records, indices=tuple(document["indices"]))
