"""Run and inspect models in tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from mptune.graph.facts import node_rule
from mptune.graph.groups import LayerGroup
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan


def feeds(model: Model, seed: int = 0, batch: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for info in model.inputs:
        shape = [d if isinstance(d, int) else batch for d in info.shape or ()]
        dtype = info.numpy_dtype
        made[info.name] = (
            rng.standard_normal(shape).astype(dtype) if dtype.kind == "f" else rng.integers(0, 2, shape).astype(dtype)
        )
    return made


def run(path: Path, feed: Mapping[str, np.ndarray], disabled: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """On the CPU, without the optimisation that crashes on FP16 products there, and without reused FP16 buffers.

    The plan of reused buffers takes longer than the run itself, as the square of the number of nodes. As in
    ``mptune.engines.ort.session``: the fusion that joins a Cast and the norm behind it goes where it fails.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    opened = partial(ort.InferenceSession, str(path), options, providers=["CPUExecutionProvider"])
    without = ["MatmulTransposeFusion", *disabled]
    try:
        session = opened(disabled_optimizers=without)
    except Exception as error:
        if "LayerNormFusion/" not in str(error):
            raise
        session = opened(
            disabled_optimizers=[*without, "LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion"]
        )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def relative_l2(y: np.ndarray, reference: np.ndarray) -> float:
    y, reference = y.astype(np.float64), reference.astype(np.float64)
    return float(np.linalg.norm(y - reference) / np.linalg.norm(reference))


def plans(
    model: Model,
    groups: tuple[LayerGroup, ...],
    count: int,
    seed: int = 0,
    precisions: tuple[Precision, ...] = (Precision.FP16, Precision.FP32),
) -> list[PrecisionPlan]:
    """The uniform plans, then random ones."""
    rng = random.Random(seed)
    ids = [g.id for g in groups]
    uniform = [PrecisionPlan.uniform(model.sha256, ids, p) for p in precisions]
    return uniform + [PrecisionPlan(model.sha256, {i: rng.choice(precisions) for i in ids}) for _ in range(count)]


def one_per_node(model: Model) -> tuple[LayerGroup, ...]:
    """A group of its own for each node that a plan can reduce."""
    rules = [(n, node_rule(model, n)) for n in model.nodes]
    free = [n for n, rule in rules if rule.inputs or rule.outputs]
    return tuple(LayerGroup(f"g{n.index:03d}", n.name, "other", (n.name,), {n.op_type: 1}) for n in free)


def check(path: Path) -> onnx.ModelProto:
    """Full check with strict inference; returns the typed graph."""
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, check_type=True)
