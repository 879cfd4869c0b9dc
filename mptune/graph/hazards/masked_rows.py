"""What was seen of a softmax whose rows are masked whole: a record that reports read without loading onnx."""

from __future__ import annotations

from dataclasses import dataclass


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
