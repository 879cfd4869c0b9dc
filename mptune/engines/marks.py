"""Values inside the model that engines get as further outputs, since what they are fused into is computed wrongly.

NVIDIA/TensorRT#4813 (FP32), #4854 (FP16) and #4837 (FP16 and BF16, in each block) are such faults of a builder. The
marks of a device lie beside its engines; the model that is written for the user keeps its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mptune.files import read_form, write_json
from mptune.finding import Finding
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import JsonForm

MARKS_JSON = "marks.json"
"""Name of the file in the folder of the engines."""


@dataclass(frozen=True)
class Mark(JsonForm):
    """A value that engines have as one more output, for the plans under which it was seen to cure them."""

    value: str
    """Its name in the model."""
    precision: Mapping[str, Precision]
    """Of the layer groups that write and read it, in those plans."""


@dataclass(frozen=True)
class Marks(JsonForm):
    """What is marked in the engines of one run on one device, and the findings that say why."""

    marks: tuple[Mark, ...] = ()
    findings: tuple[Finding, ...] = ()

    @classmethod
    def load(cls, engines: Path) -> Marks:
        """Read what ``save`` wrote for a folder of engines; no marks where there is no file."""
        hint = "delete it: the search looks for the wrong fusion again"
        return read_form(cls, engines / MARKS_JSON, hint) or cls()

    def save(self, engines: Path) -> None:
        """Write the file that ``load`` reads."""
        write_json(engines / MARKS_JSON, self.to_json())

    def of(self, plan: PrecisionPlan) -> tuple[str, ...]:
        """The values that the engine of a plan has as further outputs."""
        fitting = (m for m in self.marks if all(plan.precision.get(g) is p for g, p in m.precision.items()))
        return tuple(dict.fromkeys(mark.value for mark in fitting))
