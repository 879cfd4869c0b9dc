"""Comparison: what ``mptune compare`` and ``mptune check`` show, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mptune.diagnosis.sides import Limit
from mptune.finding import Finding
from mptune.json_form import encode_float

COMPARISON_FORMAT = 1

Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` or ``check`` found, output by output.

    Attributes:
        verdict: ``differs`` where an output is beyond its limit, or has a cause that is no rounding.
        findings: what the difference is, the most severe first.
        outputs: output name -> statistic -> value over all samples. ``error`` is the root mean square difference of a
            sample, divided by the output's standard deviation over all samples, the mean over the samples; of an output
            whose number of rows depends on values, of its rows as pairs, divided by the root mean square.
            ``emulated_fp16`` is the same of the model with FP16 wherever FP16 can be right. ``judged`` is what
            ``limit`` limits: that error, or the largest absolute difference where the tolerance is of that;
            ``judged_fp16`` as before. ``check`` has no figures of FP16 where it explains nothing.
        reference: what the left side is called.
        candidate: what the right side is called.
        samples: how many.
        warnings: that have no code, one line each.
        limits: output name -> the limit of its part that is worst against its own; ``error`` and ``judged`` are of it.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    outputs: Mapping[str, Mapping[str, float]]
    reference: str
    candidate: str
    samples: int
    warnings: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the verdict is ``agrees``."""
        return self.verdict == "agrees"

    def to_json(self) -> dict[str, Any]:
        """What ``mptune compare --json`` prints; numbers that are not finite are texts."""
        return {
            "format": COMPARISON_FORMAT,
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "outputs": {
                name: {key: encode_float(value) for key, value in statistics.items()}
                for name, statistics in self.outputs.items()
            },
            "reference": self.reference,
            "candidate": self.candidate,
            "samples": self.samples,
            "warnings": list(self.warnings),
            "limits": {name: limit.to_json() for name, limit in self.limits.items()},
        }
