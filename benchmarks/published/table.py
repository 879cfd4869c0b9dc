"""The published latencies of ``tensorrt.csv``: facts of others, each with the source that states it."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("tensorrt.csv")

PRECISIONS = {"FP16": "FP16", "TF32-allowed": "TF32", "FP32 true": "FP32"}
"""Precision of the file -> its short name. FP16 is all-FP16 with FP32 inputs and outputs."""

_NOT_STATED = "?"
_UNSTATED_MODES = "jetson-orin-nano-8gb"
"""Its figures without a power mode lie 1.6 times off those of the same module with one."""


@dataclass(frozen=True)
class Published:
    """One published latency.

    Attributes:
        source: repository or page.
        target: name of mptune's profile.
        precision: ``FP16``, ``TF32`` or ``FP32`` (without TF32).
        network: names the architecture, see ``architectures``.
        size: height and width of the image.
        family: of architectures, left out of the fit together.
        ms: of one inference of the whole batch.
        is_fitted: it counts when the roofline's constant is chosen.
    """

    source: str
    target: str
    precision: str
    network: str
    size: tuple[int, int]
    batch: int
    family: str
    ms: float
    is_fitted: bool

    @property
    def module(self) -> str:
        """The profile, apart where the power mode is not stated and the constant is not chosen by it."""
        return self.target if self.is_fitted else f"{self.target}, power mode not stated"


def read_table(path: Path = TABLE) -> list[Published]:
    """Read the table; a row that is damaged ends the program with its line."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                rows.append(_row(row))
            except (KeyError, TypeError, ValueError) as error:
                line = len(rows) + 2
                raise SystemExit(f"{path}, row {line}: {error}\nhint: compare it with benchmarks/published") from error
    return rows


def _row(row: dict[str, str]) -> Published:
    height, _, width = row["input"].partition("x")
    ms = float(row["ms"])
    if not (math.isfinite(ms) and ms > 0):
        raise ValueError(f"ms is {row['ms']}, and must be a positive number")
    target = row["mptune_target"]
    return Published(
        source=row["source"],
        target=target,
        precision=PRECISIONS[row["precision"]],
        network=row["onnx"],
        size=(int(height), int(width or height)),
        batch=int(row["batch"]),
        family=row["family"],
        ms=ms,
        is_fitted=not (target == _UNSTATED_MODES and row["power_mode"] == _NOT_STATED),
    )
