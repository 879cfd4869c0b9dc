"""``chosen/check.npz``: a few samples with their reference outputs, and the error that ``infer.py --check`` must find.

The member ``header`` is JSON in UTF-8 bytes (``collect_check`` has its keys, which are always there), non-finite
numbers as in ``mptune.json_form``. ``input_RUN_K`` is input K of a run, ``reference_SAMPLE_K`` output K of a sample; a
sample has ``steps`` runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mptune.data.archive import read_samples
from mptune.data.metrics.accuracy import UNMATCHED, OutputError
from mptune.data.metrics.parts import WORST_PART, belongs_to, columns_of_part, load_parts, parts_path
from mptune.data.rollout import Rollout
from mptune.errors import DataError
from mptune.json_form import encode, encode_float

FORMAT = 1

MOST_SAMPLES = 8
MOST_BYTES, LARGEST_SAMPLE = 16 << 20, 64 << 20  # of inputs and references together; of a single sample
_PLAIN = ("relative_l2", "max_abs")  # statistics that are checked beside ``worst_part``


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
) -> dict[str, np.ndarray] | None:
    """The arrays of ``check.npz``: the first few samples of a set, with the error of one plan on them.

    None where the samples are gone or too large, or no output can be compared value by value.
    """
    reference = data / f"{which}_reference.npz"
    steps, most = 1 if rollout is None else rollout.steps, min(MOST_SAMPLES, error.sample_count)
    try:
        inputs, references = read_samples(data / f"{which}.npz", most * steps), read_samples(reference, most)
    except DataError:
        return None
    count = total_bytes = 0
    for number, outputs in enumerate(references):
        feeds = (outputs, *inputs[number * steps : (number + 1) * steps])
        total_bytes += sum(array.nbytes for feed in feeds for array in feed.values())
        if total_bytes > (MOST_BYTES if count else LARGEST_SAMPLE):
            break
        count += 1
    inputs, references = inputs[: count * steps], references[:count]
    compared = [name for name in references[0] if name not in ignored] if inputs else []
    # Value by value: no sets of rows, and numbers on every sample.
    by_name = {name: error.per_output.get(name, {}) for name in compared}
    names = [name for name, by in by_name.items() if "relative_l2" in by and UNMATCHED not in by]
    if not names:
        return None
    parts, first = load_parts(parts_path(reference)) or {}, error.of_first(count)
    counted, overall = OutputError({name: first.per_output[name] for name in names}), error.without(ignored)

    def output(name: str) -> dict[str, Any]:
        """The mean of each statistic that is checked, and where its part lies."""
        places, errors, part = dict[str, Any](), first.per_output[name], parts.get(name)
        for statistic in errors:
            if part is not None and belongs_to(statistic, WORST_PART):
                axis, start, stop, scales = None, 0, 0, [part.divisor]
                if columns := columns_of_part(statistic):
                    axis, start, stop = part.axis, columns[0], columns[-1] + 1
                    scales = [float(part.divisors[k]) for k in columns]
                places[statistic] = encode({"axis": axis, "start": start, "stop": stop, "scales": scales})
        checked = {statistic: values for statistic, values in errors.items() if statistic in (*_PLAIN, *places)}
        figures = {statistic: encode_float(float(sum(values)) / len(values)) for statistic, values in checked.items()}
        return {"name": name, "figures": figures, "parts": places}

    is_own = metric in _PLAIN or (metric == WORST_PART and all(name in parts for name in names))
    header = {
        "format": FORMAT,
        "plan": plan,
        "metric": metric,
        "set": which.replace("_", "-"),
        "samples": count,
        "of": error.sample_count,
        "source": source,  # "measured" or "emulated"
        "engine": engine,
        "provider": provider,  # of ONNX Runtime where it measured
        "figure": encode_float(counted.value(metric)) if is_own and counted.has(metric) else None,  # on these samples
        "reported": encode_float(overall.value(metric)) if overall.has(metric) else None,  # on the whole set
        "unchecked": [name for name in compared if name not in names],
        "inputs": list(inputs[0]),
        "feedback": [] if rollout is None else [list(pair) for pair in rollout.pairs],
        "steps": steps,
        "checkpoints": [] if rollout is None else list(rollout.checkpoints),
        "outputs": [output(name) for name in names],
    }
    arrays = {"header": np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)}
    for number, feed in enumerate(inputs):
        arrays |= {f"input_{number}_{k}": array for k, array in enumerate(feed[name] for name in inputs[0])}
    for number, outputs in enumerate(references):
        arrays |= {f"reference_{number}_{k}": outputs[name] for k, name in enumerate(names)}
    return arrays
