"""What the first timing on a device fixes for all later ones of a run, also where it is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mptune.engines.timing.latency import Repetitions
from mptune.files import parse_json, whole_file
from mptune.settings import LatencySettings

DRIFT_TEXT = "the FP32 baseline takes"
"""How the warning of a measurement begins whose baseline has drifted."""


@dataclass(frozen=True)
class TimingRecord:
    """Repetitions and baseline latency of the first timing.

    Attributes:
        baseline_ms: median of the FP32 baseline at the first timing.
    """

    repetitions: Repetitions
    baseline_ms: float

    @classmethod
    def read(cls, path: Path, settings: LatencySettings) -> TimingRecord | None:
        """The record of an earlier process; None where there is none or its latency settings were others."""
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
            if document["settings"] != asdict(settings):
                return None
            return cls(Repetitions.from_json(document["repetitions"]), float(document["baseline_ms"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path, settings: LatencySettings) -> None:
        """Write the record whole or not at all."""
        document = {
            "repetitions": self.repetitions.to_json(),
            "baseline_ms": self.baseline_ms,
            "settings": asdict(settings),
        }
        with whole_file(path) as partial:
            partial.write_text(json.dumps(document, indent=2), encoding="utf-8")
