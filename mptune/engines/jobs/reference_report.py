"""What the reference runs of the untouched model showed, and which node is to blame for a fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where in the model something goes wrong; ``node`` is "" where a value that is fed is wrong already."""

    node: str
    op_type: str
    tensor: str
    value: float | str
    """What stands there, such as ``nan`` or the relative L2 of two runs."""
    sample: int | None = None

    @property
    def shown(self) -> str:
        """Operator and name, as texts name a node."""
        return f"{self.op_type} {self.node!r}" if self.node else f"input {self.tensor!r}"


@dataclass(frozen=True)
class RowReport:
    """What a batch of rows showed."""

    rows: int = 0
    mixed: Mapping[str, float] = field(default_factory=dict)
    """Output -> largest relative L2 between a row alone and the same row among different rows; where the batch is
    fixed, between a row among copies of itself and the same row among different ones."""
    mixed_row: int = 0
    is_fixed: bool = False
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Output -> its shape for ``rows`` rows, where it does not have as many rows although it is declared to."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """Output -> its declared shape, of those in ``lost``."""
    failure: str = ""
    """The error where a dynamic batch fails with ``rows`` rows."""
    ran: int = 0
    """How many rows the samples have, with which it does not fail; 0 where nothing failed."""

    @property
    def failed_node(self) -> str:
        """The node that ONNX Runtime's message names; "" where it names none."""
        match = re.search(r"Name:'([^']+)'", self.failure)
        return match.group(1) if match else ""

    @property
    def worst_mixed(self) -> tuple[str, float]:
        """The output whose rows depend most on the others, and by how much; ("", 0.0) where none was compared."""
        # NaN, as of a batch whose rows are not finite, counts as the worst.
        return max(self.mixed.items(), key=lambda item: (item[1] != item[1], item[1]), default=("", 0.0))


@dataclass(frozen=True)
class ReferenceReport:
    """What the reference runs showed, for the checks before the search."""

    provider: str
    """ONNX Runtime's execution provider, such as ``CUDAExecutionProvider``; TF32 is always off."""
    outputs: Mapping[str, Mapping[str, float]]
    """Output name -> {"size", "non_finite", "zero_fraction", "absmax"} over all samples; and where it applies
    {"bad_sample"}, the first that is not finite, {"bad_samples"}, how many of {"samples"} are not, {"constant"}, 1
    where samples differ and the output does not."""
    repeat_error: float
    """Largest relative L2 between two runs on the same sample, over outputs."""
    rows: RowReport = RowReport()
    places: Mapping[tuple[str, str], Place] = field(default_factory=dict)
    """(finding's code, output) -> the node to blame."""
    optimisation_error: Mapping[str, float] = field(default_factory=dict)
    """Floating-point output name -> relative L2 between ONNX Runtime with and without graph optimisations on the first
    sample; empty where that was not taken."""
