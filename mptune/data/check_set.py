"""``chosen/check.npz``: a few samples with their reference outputs, and the error that ``infer.py --check`` must find.

The member ``header`` is JSON in UTF-8 bytes, every key always there, non-finite numbers as in ``mptune.json_form``::

    {"format": 1, "plan": fingerprint, "metric": NAME, "set": "held-out" | "search", "samples": n, "of": n of the set,
     "source": "measured" | "emulated", "engine": NAME,
     "provider": "cpu" | "cuda" where ONNX Runtime measured, else null, "figure": error on these samples or null,
     "reported": error on the whole set, "unchecked": [outputs that cannot be compared value by value],
     "inputs": [NAME], "feedback": [[OUTPUT, INPUT]], "steps": runs of a sample, "checkpoints": [steps],
     "outputs": [{"name", "figures": {statistic: x}, "parts": {statistic: {"axis", "start", "stop", "scales"}}}]}

``input_RUN_K`` is input K of a run, ``reference_SAMPLE_K`` output K of a sample; a sample has ``steps`` runs.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mptune.data.archive import read_samples, write_arrays
from mptune.data.metrics.accuracy import ALL_OUTPUTS, UNMATCHED, OutputError
from mptune.data.metrics.parts import WORST_PART, OutputParts, belongs_to, columns_of_part, load_parts, parts_path
from mptune.data.rollout import Rollout
from mptune.errors import DataError
from mptune.files import writing
from mptune.json_form import encode_float

FORMAT = 1

MOST_SAMPLES = 8
MOST_BYTES = 16 << 20
"""Of inputs and references together, before they are compressed. A single sample may take ``LARGEST_SAMPLE``."""

LARGEST_SAMPLE = 64 << 20

_PLAIN = ("relative_l2", "max_abs")
"""Statistics that are checked beside ``worst_part``."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class CheckSet:
    """What ``check.npz`` holds."""

    header: Mapping[str, Any]
    inputs: Sequence[Arrays]
    references: Sequence[Arrays]

    def save(self, path: Path) -> None:
        """Write the file; the same content gives the same bytes."""
        members = {"header": np.frombuffer(json.dumps(self.header, allow_nan=False).encode(), np.uint8)}
        for number, feed in enumerate(self.inputs):
            members.update({f"input_{number}_{k}": feed[name] for k, name in enumerate(self.header["inputs"])})
        for number, outputs in enumerate(self.references):
            names = [output["name"] for output in self.header["outputs"]]
            members.update({f"reference_{number}_{k}": outputs[name] for k, name in enumerate(names)})
        with writing(path):
            write_arrays(path, members.items(), zipfile.ZIP_DEFLATED)


def collect_check(
    data: Path,
    error: OutputError,
    which: Literal["search", "held_out"],
    *,
    plan: str,
    metric: str,
    source: str,
    engine: str,
    provider: Literal["cpu", "cuda"] | None = None,
    ignored: Sequence[str] = (),
    rollout: Rollout | None = None,
) -> CheckSet | None:
    """The first few samples of a set, with the error of one plan on them.

    None where the samples are gone or too large, or no output can be compared value by value.
    """
    samples, reference = data / f"{which}.npz", data / f"{which}_reference.npz"
    steps = 1 if rollout is None else rollout.steps
    try:
        most = min(MOST_SAMPLES, error.sample_count)
        inputs, references = read_samples(samples, most * steps), read_samples(reference, most)
    except DataError:
        return None
    count = _count(inputs, references, steps)
    if not count or not inputs:
        return None
    inputs, references = inputs[: count * steps], references[:count]
    every = [name for name in references[0] if name not in ignored]
    names = [name for name in every if _is_plain(name, error, references)]
    if not names:
        return None
    parts, first = load_parts(parts_path(reference)) or {}, error.of_first(count)
    counted = OutputError({name: first.per_output[name] for name in names})
    has_parts = all(name in parts for name in names)
    can_check = counted.has(metric) and (metric in _PLAIN or (metric == WORST_PART and has_parts))
    overall = error.without(ignored)
    header = {
        "format": FORMAT,
        "plan": plan,
        "metric": metric,
        "set": which.replace("_", "-"),
        "samples": count,
        "of": error.sample_count,
        "source": source,
        "engine": engine,
        "provider": provider,
        "figure": encode_float(counted.value(metric)) if can_check else None,
        "reported": encode_float(overall.value(metric)) if overall.has(metric) else None,
        "unchecked": [name for name in every if name not in names],
        "inputs": list(inputs[0]),
        "feedback": [] if rollout is None else [list(pair) for pair in rollout.pairs],
        "steps": steps,
        "checkpoints": [] if rollout is None else list(rollout.checkpoints),
        "outputs": [_output(name, first, parts.get(name)) for name in names],
    }
    return CheckSet(header, inputs, references)


def _count(inputs: Sequence[Arrays], references: Sequence[Arrays], steps: int) -> int:
    """How many samples are kept."""
    total = count = 0
    for number, outputs in enumerate(references):
        feeds = (outputs, *inputs[number * steps : (number + 1) * steps])
        total += sum(array.nbytes for feed in feeds for array in feed.values())
        if total > (MOST_BYTES if count else LARGEST_SAMPLE):
            break
        count += 1
    return count


def _is_plain(name: str, error: OutputError, references: Sequence[Arrays]) -> bool:
    """Whether an output is compared value by value."""
    statistics = error.per_output.get(name, {})
    is_number = all(name in sample and sample[name].dtype.kind in "fiub" for sample in references)
    return name != ALL_OUTPUTS and is_number and UNMATCHED not in statistics and "relative_l2" in statistics


def _output(name: str, error: OutputError, parts: OutputParts | None) -> dict[str, Any]:
    statistics = error.per_output[name]
    wanted = [each for each in statistics if each in _PLAIN or (parts is not None and belongs_to(each, WORST_PART))]
    return {
        "name": name,
        "figures": {each: encode_float(float(sum(statistics[each])) / len(statistics[each])) for each in wanted},
        "parts": {each: _part(each, parts) for each in wanted if parts is not None and each not in _PLAIN},
    }


def _part(statistic: str, parts: OutputParts) -> dict[str, Any]:
    columns = columns_of_part(statistic)
    if columns is None:
        return {"axis": None, "start": 0, "stop": 0, "scales": [encode_float(parts.divisor)]}
    scales = [encode_float(float(parts.divisors[k])) for k in columns]
    return {"axis": parts.axis, "start": columns[0], "stop": columns[-1] + 1, "scales": scales}
