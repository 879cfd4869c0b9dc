"""Models and data of which a plan shows a finding when it is evaluated, each with a sound twin; made with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from mptune.data.metrics.accuracy import Reference, compare_outputs
from mptune.data.metrics.parts import find_parts
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from mptune.tuning.evaluation import Evaluation
from tests.graph.models import constant, text
from tests.tuning.factory import make_evaluation
from tests.zoo import detector
from tests.zoo.numbers import Show, rows, weights

SEARCH = 8
"""Samples that a search sees; those after them are held out."""


def _gated(*outliers: int) -> Show:
    """Features beside a gate that only outliers open: then both are in the thousands, where FP16 steps by 4."""
    graph = """(float[1,16] x) => (float[1,8] y) <float five = {5}, float thousand = {1000}> {
        h = MatMul(x, w) f = MatMul(x, first) s = Sub(f, five) g = Relu(s) k = Mul(g, thousand)
        z = Add(h, k) y = Sub(z, k)
    }"""
    x = rows(16, samples=12)
    x[:, 0] = np.clip(x[:, 0], -1, 1)
    x[list(outliers), 0] = 10.0
    return Show(text(graph, weights("w", 16, 8), constant("first", np.eye(16, 1))), {"x": x})


def _two_scales(scale: float) -> Show:
    """Six columns near 1 and two of ``scale``."""
    v = np.random.default_rng(5).normal(0, 0.25, (16, 8)).astype(np.float32)
    v[:, 6:] *= scale
    graph = "(float[1,16] x) => (float[1,8] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v) }"
    return Show(text(graph, weights("w", 16, 16), constant("v", v)), {"x": rows(16, samples=12)})


def _detections(layout: detector.Layout) -> Show:
    return Show(detector.detector(layout), {"image": detector.images(12)})


def _detections_alike() -> Show:
    """Channels of one scale, each as exact as the whole."""
    graph = "(float[1,3,32,32] image) => (float[1,8,32,32] y) { c = Conv(image, w) y = Tanh(c) }"
    return Show(text(graph, weights("w", 8, 3, 1, 1)), {"image": detector.images(12)})


PLANS: dict[str, tuple[Callable[[], Show], Callable[[], Show]]] = {
    "one-sample-decides": (lambda: _gated(3), _gated),
    "held-out-differs": (lambda: _gated(8, 9, 10, 11), _gated),
    "column-hidden": (lambda: _detections("rows"), lambda: _two_scales(0.5)),
    "column-hidden in a channel": (lambda: _detections("heatmap"), _detections_alike),
    "near-zero": (lambda: _two_scales(2e-7), lambda: _two_scales(0.5)),
}
"""Code, with what distinguishes two of one code after a blank -> what shows it under all-FP16, and its sound twin."""


def emulator_of(path: Path) -> tuple[GroupedModel, Emulator]:
    """The groups of a model, and what writes it with the roundings of a plan, beside the model's ``bank``."""
    model = load_model(path)
    groups = GroupedModel(model, find_groups(model))
    return groups, Emulator(groups, WeightBank.write(model, path.parent / "bank"))


def emulated(path: Path, plan: PrecisionPlan, feeds: Iterable[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The outputs under a plan, as its roundings give them."""
    written = emulator_of(path)[1].write(plan, path.parent / "bank" / f"{plan.fingerprint}.onnx")
    session = onnxruntime.InferenceSession(str(written), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(None, dict(feed)), strict=True)) for feed in feeds]


def evaluated(show: Show, folder: Path) -> Evaluation:
    """All-FP16 by emulation, on the search samples and on those that are held out."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(show.proto, path)
    groups, _ = emulator_of(path)
    feeds = [{name: array[k : k + 1] for name, array in show.data.items()} for k in range(12)]
    exact, half = (emulated(path, groups.uniform(p), feeds) for p in (Precision.FP32, Precision.FP16))
    parts = find_parts(exact[:SEARCH])
    sides = (slice(SEARCH), slice(SEARCH, None))
    error, held_out = (compare_outputs(half[side], Reference(exact[side], parts)) for side in sides)
    return replace(make_evaluation(1.0, 1e-3), error=error, held_out=held_out, metric="worst_part")
