"""What was observed of the values of the untouched model, one record per value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mptune.graph.hazards.masked_rows import MaskedRows
from mptune.graph.hazards.probes import ProbeRecord
from mptune.graph.hazards.seen import Seen, SeenValue


@dataclass(frozen=True)
class TensorRange:
    """The values of one tensor over the search samples.

    Attributes:
        shape: concrete shape on the first sample.
        non_finite: number of values that were NaN or infinite.
        masked: of a value that a softmax is taken of, its rows that were masked whole; None where there were none.
        beyond: how many samples hold a magnitude beyond FP16's largest value, of ``samples`` that were run.
    """

    absmax: float
    shape: tuple[int, ...]
    non_finite: int = 0
    masked: MaskedRows | None = None
    lowest: float = 0.0
    highest: float = 0.0
    sample: int = 0
    beyond: int = 0
    samples: int = 1
    records: tuple[ProbeRecord, ...] = ()


@dataclass(frozen=True)
class ObservedRanges:
    """What one observing model showed.

    Attributes:
        ranges: value -> what it held.
        doubtful: values whose sum was not finite, so that their range says nothing: to be looked at by element.
    """

    ranges: Mapping[str, TensorRange]
    doubtful: tuple[str, ...] = ()

    def looked_at_again(self, by_element: ObservedRanges) -> Mapping[str, TensorRange]:
        """The ranges, with those of ``by_element`` in place of the doubtful ones; rows and answers of probes stay."""
        again = {
            tensor: replace(seen, masked=self.ranges[tensor].masked, records=self.ranges[tensor].records)
            for tensor, seen in by_element.ranges.items()
        }
        return {**self.ranges, **again}


def seen_of(ranges: Mapping[str, TensorRange], indices: Sequence[int] = ()) -> Seen:
    """What was observed, as hazards are found in it.

    Args:
        ranges: value -> what it held.
        indices: index in the data of each sample; empty where they are all of the data.
    """
    return Seen(
        {
            tensor: SeenValue(seen.lowest, seen.highest, seen.sample, seen.beyond, seen.samples)
            for tensor, seen in ranges.items()
        },
        {tensor: seen.shape for tensor, seen in ranges.items()},
        tuple(record for seen in ranges.values() for record in seen.records),
        tuple(indices),
    )
