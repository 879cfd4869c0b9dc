"""Without a tolerance: a model that FP16 breaks does not agree, however large the error of FP16 throughout is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import read_samples
from mptune.diagnosis.sides import FALLBACK_LIMIT, MOST_LIMIT, default_limit
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight


def test_what_fp16_breaks_does_not_agree(tmp_path: Path) -> None:
    """A norm whose squares overflow (x / inf is 0, which is finite), a choice among near ties, and a sound output."""
    graph = """(float[batch,16] x) => (float[batch,4] y, int64[batch] label, float[batch,4] sound)
        <float[1] eps = {1e-3}, float[1] twenty = {20}> {
        ["/body/MatMul"] h = MatMul(x, big) ["/norm/Mul"] squares = Mul(h, h)
        ["/norm/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/norm/Add"] safe = Add(mean, eps) ["/norm/Sqrt"] root = Sqrt(safe) ["/norm/Div"] normal = Div(h, root)
        ["/head/MatMul"] y = MatMul(normal, v)
        ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits) ["/sound/MatMul"] sound = MatMul(x, w)
    }"""
    constants = [weight("big", 16, 16, scale=300.0), weight("v", 16, 4), weight("small", 16, 32, scale=2e-3)]
    path = models.save(text(graph, *constants, weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    with np.errstate(over="ignore"):
        got = recordings.NodeByNode(path).run(data, 24, result=recordings.to_half)
    np.savez(tmp_path / "got.npz", **got)
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.verdict == "differs"
    cause = next(one for one in found.findings if one.code == "precision")
    assert [output.name for output in cause.where.outputs] == ["y", "label"]
    assert "overflow at /norm/" in cause.text
    assert "exceeds" in cause.text or "FP16 ends at 65504" in cause.text
    assert [one.where.outputs[0].name for one in found.findings if one.code == "agrees"] == ["sound"]
    assert found.outputs["y"]["limit"] == 2 * found.outputs["y"]["emulated_fp16"] < 0.01, (
        "all-FP16 has the norm in FP32"
    )
    assert found.outputs["label"]["limit"] == MOST_LIMIT
    labels = got["label"] - recordings.run(path, data, 24)["label"]
    assert found.outputs["label"]["largest_difference"] == np.abs(labels).max(), "of all samples, and not their mean"


@pytest.mark.slow
def test_all_fp16_is_that_of_a_search(tmp_path: Path) -> None:
    """A value beyond FP16 on the data pins its group; a constant beyond it is held as 65504, and the error shows it."""
    graph = """(float[batch,16] x) => (float[batch,16] y, float[batch,4] z) <float large = {1e5}> {
        ["/fc/MatMul"] h = MatMul(x, w) ["/square/Mul"] squares = Mul(h, h)
        ["/mean/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/scale/Div"] scaled = Div(h, large) ["/out/MatMul"] z = MatMul(scaled, v)
        ["/rms/Sqrt"] root = Sqrt(mean) ["/norm/Div"] y = Div(h, root)
    }"""
    path = models.save(text(graph, weight("w", 16, 16, scale=300.0), weight("v", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    run = tmp_path / "run"
    mptune.search(path, data=data, budget=2, out=run, target="jetson-orin-nano-8gb", progress=False)
    searched = next(e for e in mptune.open_run(run).evaluations if e.origin.name == "all-fp16")
    samples = read_samples(run / "data" / "search.npz")
    found = mptune.compare(path, path, data={"x": np.concatenate([sample["x"] for sample in samples])})
    of_each = {name: figures["emulated_fp16"] for name, figures in found.outputs.items()}
    assert max(of_each.values()) == pytest.approx(searched.error_value, rel=1e-6)
    assert of_each["z"] > 0.1
    assert of_each["y"] < 1e-2, "without the pin of a search it would be infinite"


@pytest.mark.slow
def test_random_numbers_are_no_rounding(tmp_path: Path) -> None:
    nodes = '["/fc"] h = MatMul(x, w) ["/noise"] n = RandomNormalLike<scale = 0.1>(h) ["/add"] y = Add(h, n)'
    path = models.save(text(f"(float[batch,16] x) => (float[batch,4] y) {{ {nodes} }}", weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)}
    np.savez(tmp_path / "got.npz", **recordings.run(path, data, 1))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz")
    assert [one.code for one in found.findings] == ["not-deterministic"]
    assert found.findings[0].where.nodes == ("/noise",)


@pytest.mark.parametrize(
    ("change", "code"),
    [(lambda x: x[:, ::-1], "data-do-not-fit"), (lambda x: np.roll(x, 2, 2), None)],
    ids=["BGR", "something else"],
)
def test_a_model_that_fp16_breaks_is_not_the_cause_of_every_difference(
    change: Callable[[np.ndarray], np.ndarray], code: str | None, tmp_path: Path
) -> None:
    graph = """(float[batch,3,4,4] image) => (int64[batch] label) <float twenty = {20}> {
        x = Flatten(image) ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits)
    }"""
    path = models.save(text(graph, weight("small", 48, 32, scale=2e-3)), tmp_path)
    data = {"image": np.random.default_rng(3).standard_normal((48, 3, 4, 4)).astype(np.float32)}
    prepared = {"image": np.ascontiguousarray(change(data["image"]))}
    np.savez(tmp_path / "got.npz", **recordings.run(path, prepared, 24))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.outputs["label"]["judged_fp16"] > 0.1, "FP16 changes labels, too"
    assert found.verdict == "differs"
    assert [one.code for one in found.findings] == ([code] if code else [])


def test_limits_of_fp16() -> None:
    assert default_limit(1e-3) == 2e-3
    assert default_limit(0.7) == MOST_LIMIT
    assert default_limit(math.inf) == FALLBACK_LIMIT
