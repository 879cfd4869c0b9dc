"""What the engine of a plan takes, as a record keeps it. Apart from how it is predicted, which needs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptune.json_form import JsonForm


@dataclass(frozen=True)
class EngineMemory(JsonForm):
    """What one plan's engine takes, in bytes; None where it is not known.

    Attributes:
        engine_bytes: size of the engine's file, which holds its weights.
        context_bytes: memory of the device that an execution context takes for values and scratch: TensorRT's own
            figure, else the most that is alive at once.
        weight_bytes: constants as the plan stores them, computed from the model.
        source: whether ``context_bytes`` is the built engine's own figure.
    """

    engine_bytes: int | None
    context_bytes: int | None
    weight_bytes: int | None
    source: Literal["measured", "predicted"]

    @property
    def total_bytes(self) -> int:
        """What the engine takes when it is loaded: its file or its weights, and the context."""
        return max(self.engine_bytes or 0, self.weight_bytes or 0) + (self.context_bytes or 0)
