"""One variant of a network, in this process: whether it loads, its errors, its task result, its predicted latency."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import objective
from benchmarks.trained.recipes import BY_NAME
from benchmarks.trained.variants import FP32, file_of
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions, first_words
from mptune.graph.groups import GroupedModel, plan_of_nodes
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.targets.roofline import roofline
from mptune.targets.target import load_target
from mptune.tuning.facts import Observations

Outputs = dict[str, np.ndarray]


def held_out(folder: Path) -> list[Outputs]:
    """The samples that only judge."""
    return [dict(np.load(path)) for path in sorted((folder / "held_out").glob("*.npz"))]


def loads(path: Path) -> str | None:
    """Why ONNX Runtime does not load a file on a CPU, as anyone opens it; None where it does."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    try:
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever ONNX Runtime raises
        return first_words(str(error))
    return None


def open_here(path: Path, provider: Provider) -> OrtSession:
    """A session without what is wrong in ONNX Runtime's CPU provider for FP16 (``OrtSession``), for every variant."""
    return open_session(path, SessionOptions(provider, "timed" if provider == "cuda" else "reference"))


def compared(folder: Path, wanted: Sequence[Outputs], got: Sequence[Outputs]) -> dict[str, Any]:
    """Errors and task result of a variant's outputs."""
    error = objective(got, wanted)
    verdict = BY_NAME[folder.name].judge(wanted, got)
    value = error.value("relative_l2")
    return {
        "error": None if math.isnan(value) or math.isinf(value) else value,
        "non_finite": int(error.non_finite),
        "kept": verdict.kept,
        "result": verdict.text,
    }


def predicted_ms(folder: Path, variant: Path) -> float | None:
    """mptune's prediction for a converter's file: its nodes' precisions as a plan of the FP32 model.

    A node is FP16 where a converter's node of its name, or else of its first output, has an FP16 output.
    """
    observations = Observations.load(folder / "run.mptune" / "data" / "observed.json")
    if observations is None:
        return None
    model = load_model(folder / "fp32.onnx")
    converted = load_model(variant)
    nodes = [
        node
        for node in converted.nodes
        if node.op_type != "Cast" and any(converted.info(name).dtype == "float16" for name in node.outputs if name)
    ]
    names, outputs = {node.name for node in nodes}, {node.outputs[0] for node in nodes}
    wanted = {n.name: Precision.FP16 for n in model.nodes if n.name in names or n.outputs[0] in outputs}
    given = plan_of_nodes(model, wanted)
    front = json.loads((folder / "run.mptune" / "front.json").read_text())
    target = load_target(front["target"]["name"])
    terms = roofline(GroupedModel(model, given.groups), target, observations.observed.shapes)
    return terms.predict(given.plan)


def main(folder: Path, variant: str, out: Path) -> None:
    path = file_of(folder, variant)
    row: dict[str, Any] = {"bytes": path.stat().st_size, "stage": "loading"}
    out.write_text(json.dumps(row))
    failure = loads(path)
    if failure is not None:
        row["failure"] = f"loading: {failure}"
    else:
        row["stage"] = "running"
        out.write_text(json.dumps(row))
        samples = held_out(folder)
        fp32, candidate = (open_here(p, "cpu") for p in (file_of(folder, FP32), path))
        wanted = [fp32.run(sample) for sample in samples]
        row |= compared(folder, wanted, [candidate.run(sample) for sample in samples])
        row["predicted_ms"] = predicted_ms(folder, path)
    del row["stage"]
    out.write_text(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
