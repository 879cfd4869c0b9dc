"""What the outputs of plans look like beside the reference: the records behind the page's section "outputs".

A sketch is small whatever the outputs' size: histograms, the largest difference, the worst samples and, where an output
is like an image, where its differences lie. Jobs write one file for each plan that is run on the held-out samples
(``mptune.data.sketches.taking``); ``RUN/outputs.json`` brings those of the front together
(``mptune.data.run_outputs``).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.parts import columns_of_part
from mptune.data.numbers import decode_float, encode_float

HIGHEST_LEVEL = 255
"""An error map holds this many steps above 0; ``ErrorMap.scale`` is the highest."""


@dataclass(frozen=True)
class Histogram:
    """How values are distributed, in bins of equal width.

    Attributes:
        lowest: left edge of the first bin.
        highest: right edge of the last bin, above ``lowest``; the same where all values are equal.
        counts: values in each bin, at most 64.
        below: finite values below ``lowest``.
        above: finite values above ``highest``.
        non_finite: NaN and Inf.
    """

    lowest: float
    highest: float
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0
    non_finite: int = 0

    @property
    def total(self) -> int:
        """All values, in a bin or not."""
        return sum(self.counts) + self.below + self.above + self.non_finite

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        outside = {"below": self.below, "above": self.above, "non_finite": self.non_finite}
        return {"range": [self.lowest, self.highest], "counts": list(self.counts), **outside}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Histogram:
        """Inverse of ``to_json``."""
        lowest, highest = map(float, document["range"])
        outside = (int(document[name]) for name in ("below", "above", "non_finite"))
        return cls(lowest, highest, tuple(map(int, document["counts"])), *outside)


@dataclass(frozen=True)
class LargestDifference:
    """The largest absolute difference of a part on any sample.

    Attributes:
        value: the difference, in the output's unit; inf where the plan's value is NaN or Inf.
        reference: the reference's value there.
        sample: number of the held-out sample.
        index: where in the output of that sample; None where rows are compared as sets.
    """

    value: float
    reference: float
    sample: int
    index: tuple[int, ...] | None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        index = None if self.index is None else list(self.index)
        value, reference = encode_float(self.value), encode_float(self.reference)
        return {"value": value, "reference": reference, "sample": self.sample, "index": index}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LargestDifference:
        """Inverse of ``to_json``."""
        index = None if document["index"] is None else tuple(map(int, document["index"]))
        return cls(decode_float(document["value"]), decode_float(document["reference"]), int(document["sample"]), index)


@dataclass(frozen=True)
class PartSketch:
    """One part of an output (``mptune.data.metrics.parts``), over all held-out samples.

    Attributes:
        statistic: whose part it is: the run's metric where that looks at outputs one by one, else ``worst_part``.
        error: the value of the statistic, the mean over the samples.
        worst_samples: number and error of the held-out samples with the largest errors, the worst first.
        reference: histogram of the reference's values.
        plan: histogram of the plan's values, in the same bins.
        difference: histogram of plan minus reference, where the reference is finite; its bins lie around 0.
        every: histograms are of every so many-th value.
        largest: the largest difference, of all values; None where the part holds none that can be compared.
    """

    statistic: str
    error: float
    worst_samples: tuple[tuple[int, float], ...]
    reference: Histogram
    plan: Histogram
    difference: Histogram
    every: int
    largest: LargestDifference | None

    @property
    def columns(self) -> tuple[int, ...] | None:
        """The columns that the part is of; None where it is the whole output."""
        return columns_of_part(self.statistic)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types, with the columns."""
        return {
            "statistic": self.statistic,
            "columns": None if self.columns is None else list(self.columns),
            "error": encode_float(self.error),
            "worst_samples": [[sample, encode_float(error)] for sample, error in self.worst_samples],
            "reference": self.reference.to_json(),
            "plan": self.plan.to_json(),
            "difference": self.difference.to_json(),
            "every": self.every,
            "largest": None if self.largest is None else self.largest.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PartSketch:
        """Inverse of ``to_json``."""
        return cls(
            str(document["statistic"]),
            decode_float(document["error"]),
            tuple((int(sample), decode_float(error)) for sample, error in document["worst_samples"]),
            Histogram.from_json(document["reference"]),
            Histogram.from_json(document["plan"]),
            Histogram.from_json(document["difference"]),
            int(document["every"]),
            None if document["largest"] is None else LargestDifference.from_json(document["largest"]),
        )


@dataclass(frozen=True, eq=False)
class ErrorMap:
    """Where an output differs on its worst sample: the largest absolute difference in each cell of a grid.

    Attributes:
        sample: number of the held-out sample.
        size: height and width of the output; the grid lies over them.
        scale: the difference that ``HIGHEST_LEVEL`` stands for: the largest finite one.
        levels: shape (rows, columns), at most 64 each: 0 to ``HIGHEST_LEVEL``, in equal steps; NaN and Inf as the
            highest.
    """

    sample: int
    size: tuple[int, int]
    scale: float
    levels: NDArray[np.uint8]

    @property
    def differences(self) -> NDArray[np.float64]:
        """The differences in the output's unit, shape (rows, columns)."""
        return self.levels.astype(np.float64) * (self.scale / HIGHEST_LEVEL)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types: the levels as base64 of one byte each, row by row."""
        levels = base64.b64encode(self.levels.tobytes()).decode("ascii")
        shape = list(self.levels.shape)
        size = list(self.size)
        return {"sample": self.sample, "size": size, "scale": self.scale, "grid": shape, "levels": levels}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ErrorMap:
        """Inverse of ``to_json``."""
        rows, columns = map(int, document["grid"])
        levels = np.frombuffer(base64.b64decode(document["levels"], validate=True), np.uint8).reshape(rows, columns)
        height, width = map(int, document["size"])
        return cls(int(document["sample"]), (height, width), float(document["scale"]), levels)


@dataclass(frozen=True)
class OutputSketch:
    """One output under one plan.

    Attributes:
        shape: of the reference on the first held-out sample.
        as_rows: rows were paired and compared as sets, as where NMS selects them.
        parts: the worst parts first, at most 8.
        part_count: how many parts the output has.
        error_map: where it differs; None where the output is not like an image.
    """

    shape: tuple[int, ...]
    as_rows: bool
    parts: tuple[PartSketch, ...]
    part_count: int
    error_map: ErrorMap | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {
            "shape": list(self.shape),
            "as_rows": self.as_rows,
            "part_count": self.part_count,
            "parts": [part.to_json() for part in self.parts],
            "error_map": None if self.error_map is None else self.error_map.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> OutputSketch:
        """Inverse of ``to_json``."""
        error_map = document["error_map"]
        return cls(
            tuple(map(int, document["shape"])),
            bool(document["as_rows"]),
            tuple(map(PartSketch.from_json, document["parts"])),
            int(document["part_count"]),
            None if error_map is None else ErrorMap.from_json(error_map),
        )


def sketches_to_json(outputs: Mapping[str, OutputSketch]) -> dict[str, Any]:
    """Output name -> sketch, as JSON types."""
    return {name: output.to_json() for name, output in outputs.items()}


def sketches_from_json(document: Mapping[str, Any]) -> dict[str, OutputSketch]:
    """Inverse of ``sketches_to_json``."""
    return {name: OutputSketch.from_json(output) for name, output in document.items()}
