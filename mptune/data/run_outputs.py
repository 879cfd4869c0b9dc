"""``RUN/outputs.json``: what the outputs of the front's plans look like beside the reference, on held-out samples.

The file, every key always there::

    {"format": 1, "metric": NAME, "unit": "sample" | "sequence", "count": held-out samples,
     "indices": [which of the user's samples these are], "names": [their file names] or null,
     "plans": {fingerprint: {"source": "measured" | "emulated", "outputs": {name: SKETCH, the worst first}}},
     "left_out": [fingerprints whose sketches did not fit into the file]}

``SKETCH`` is that of ``mptune.data.sketches.taking``. The chosen plan comes first. A plan is there if it was run on the
held-out samples, and this is its front. The file holds at most ``MOST_BYTES``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mptune.data.sketches.taking import Sketch, load_sketches
from mptune.files import write_text

Source = Literal["measured", "emulated"]

FORMAT = 1

HELD_OUT_NAMES_JSON = "held_out_names.json"
"""In the run's data directory: the file names of the held-out samples, where each was a file."""

MOST_BYTES = 1_000_000
"""Of the file."""


@dataclass(frozen=True)
class RunOutputs:
    """The content of ``outputs.json``.

    Attributes:
        plans: fingerprint -> source of its error, and sketch of each output; the most important plan first.
        indices: which of the user's samples the held-out ones are, 0-based; of sequences where each begins. Empty
            where not known.
        names: their file names, where the user gave a folder that is still there; else empty.
        unit: what a number of a sample counts.
    """

    metric: str
    count: int
    plans: Mapping[str, tuple[Source, Mapping[str, Sketch]]] = field(default_factory=dict)
    indices: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    unit: Literal["sample", "sequence"] = "sample"

    def sample(self, number: int) -> str:
        """What a held-out sample is called: its file's name, else by its index in the user's data."""
        if number < len(self.names):
            return self.names[number]
        if number >= len(self.indices):
            return f"held-out {self.unit} {number}"
        return f"{'sequence from ' if self.unit == 'sequence' else ''}sample {self.indices[number]}"

    @classmethod
    def of_plans(cls, plans: Iterable[tuple[str, Source]], folder: Path, metric: str) -> RunOutputs:
        """The sketches that jobs have left in ``FINGERPRINT.json``, of fingerprints and the sources of their errors.

        What is not there, damaged or of another metric is passed over.
        """
        found: dict[str, tuple[Source, Mapping[str, Sketch]]] = {}
        count = 0
        for fingerprint, source in plans:
            known = None if fingerprint in found else load_sketches(folder / f"{fingerprint}.json", metric)
            if known is not None and known[1]:
                count = known[0]
                found[fingerprint] = source, known[1]
        return cls(metric, count, found)

    def to_json(self) -> dict[str, Any]:
        """The document, as long as it may be: of plans that do not fit the maps are left out, then all."""
        left_out: list[str] = []
        plans: dict[str, Any] = {}
        document = {
            "format": FORMAT,
            "metric": self.metric,
            "unit": self.unit,
            "count": self.count,
            "indices": list(self.indices),
            "names": list(self.names) or None,
            "plans": plans,
            "left_out": left_out,
        }
        room = MOST_BYTES - len(_text(document)) - sum(len(name) + 4 for name in self.plans)
        for fingerprint, (source, sketches) in self.plans.items():
            without_maps = {name: {**sketch, "error_map": None} for name, sketch in sketches.items()}
            for outputs in (sketches, without_maps):
                entry = {"source": source, "outputs": outputs}
                size = len(_text({fingerprint: entry}))
                if size <= room:
                    room -= size
                    plans[fingerprint] = entry
                    break
            else:
                left_out.append(fingerprint)
        return document


def write_run_outputs(path: Path, outputs: RunOutputs) -> None:
    """Write ``outputs.json``, whole or not at all."""
    write_text(path, _text(outputs.to_json()).decode("utf-8") + "\n")


def read_names(path: Path) -> tuple[str, ...]:
    """The names in ``HELD_OUT_NAMES_JSON``; empty where there are none."""
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode("utf-8")
