"""A decoder whose key-value cache is empty, as before its first token: it is searched like any other model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.data.archive import save_samples
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ReferenceJob
from mptune.engines.toolchains.measuring import MeasureJob
from mptune.processes.child import WorkerState
from mptune.settings import LatencySettings
from mptune.tuning.baseline import check_reference
from tests.graph import models

Feed = dict[str, np.ndarray]
WIDTH, HEADS, WORDS, LAYERS = 32, 2, 40, 2
SIZE = WIDTH // HEADS
CACHES = [f"{k}.{what}" for k in range(LAYERS) for what in ("key", "value")]

NORM = """square_Y = Mul(X, X) mean_Y = ReduceMean<axes = [-1], keepdims = 1>(square_Y) safe_Y = Add(mean_Y, eps)
    root_Y = Sqrt(safe_Y) unit_Y = Div(X, root_Y) Y = Mul(unit_Y, gain)"""
HEADS_OF = "Y_flat = MatMul(X, w_Y) Y_split = Reshape(Y_flat, split) Y = Transpose<perm = [0, 2, 1, 3]>(Y_split)"
ATTENTION = """"present.#.key" = Concat<axis = 2>("past.#.key", k#)
    "present.#.value" = Concat<axis = 2>("past.#.value", v#) turned# = Transpose<perm = [0, 1, 3, 2]>("present.#.key")
    scores# = MatMul(q#, turned#) scaled# = Mul(scores#, scale) shares# = Softmax<axis = -1>(scaled#)
    read# = MatMul(shares#, "present.#.value") back# = Transpose<perm = [0, 2, 1, 3]>(read#)
    flat# = Reshape(back#, whole) out# = MatMul(flat#, w_o#) sum# = Add(x#, out#)"""
GATED = """gate# = MatMul(m#, w_g#) sigmoid# = Sigmoid(gate#) silu# = Mul(gate#, sigmoid#) up# = MatMul(m#, w_u#)
    wide# = Mul(silu#, up#) down# = MatMul(wide#, w_d#) NEXT = Add(sum#, down#)"""


def decoder(folder: Path) -> Path:
    """A small llama with a cache of dynamic length."""
    nodes = "x0 = Gather(table, input_ids) "
    constants = [models.weight("table", WORDS, WIDTH), models.weight("head", WIDTH, WORDS, scale=WIDTH**-0.5)]
    for k in range(LAYERS):
        parts = [NORM.replace("X", f"x{k}").replace("Y", f"n{k}")]
        parts += [HEADS_OF.replace("X", f"n{k}").replace("Y", f"{name}{k}") for name in "qkv"]
        parts += [ATTENTION, NORM.replace("X", f"sum{k}").replace("Y", f"m{k}"), GATED.replace("NEXT", f"x{k + 1}")]
        nodes += " ".join(parts).replace("#", str(k)) + " "
        for name, shape in {**dict.fromkeys("qkvo", (1, 1)), "g": (1, 2), "u": (1, 2), "d": (2, 1)}.items():
            rows, columns = shape[0] * WIDTH, shape[1] * WIDTH
            constants.append(models.weight(f"w_{name}{k}", rows, columns, scale=rows**-0.5))
    nodes += NORM.replace("X", f"x{LAYERS}").replace("Y", "last") + " logits = MatMul(last, head)"
    past = "".join(f', float[batch,{HEADS},past,{SIZE}] "past.{cache}"' for cache in CACHES)
    present = "".join(f', float[batch,{HEADS},total,{SIZE}] "present.{cache}"' for cache in CACHES)
    graph = f"""(int64[batch,sequence] input_ids {past}) => (float[batch,sequence,{WORDS}] logits {present}) <
        float eps = {{1e-5}}, float scale = {{{SIZE**-0.5}}},
        int64[4] split = {{0, 0, {HEADS}, {SIZE}}}, int64[3] whole = {{0, 0, {WIDTH}}}> {{ {nodes} }}"""
    return models.save(models.text(graph, models.constant("gain", np.ones(WIDTH)), *constants), folder)


@pytest.fixture
def prompts() -> list[Feed]:
    rng = np.random.default_rng(6)
    caches = {f"past.{cache}": np.zeros((1, HEADS, 0, SIZE), np.float32) for cache in CACHES}
    return [{"input_ids": rng.integers(0, WORDS, (1, 6)), **caches} for _ in range(4)]


def test_a_search_with_an_empty_cache_ends_and_names_the_state(prompts: list[Feed], tmp_path: Path) -> None:
    options = {"data": prompts, "out": tmp_path / "run", "target": "jetson-orin-nano-8gb", "budget": 3}
    front = mptune.search(decoder(tmp_path), **options)  # type: ignore[arg-type]
    assert front.failures == 0
    evaluations = mptune.open_run(tmp_path / "run").evaluations
    assert len(evaluations) == 3
    assert all(e.is_finite for e in evaluations)
    assert any(e.error_value > 0 for e in evaluations)
    (finding,) = [f for f in front.findings if f.code == "state-fed-back"]
    assert (finding.severity, finding.origin, finding.evidence["pairs"]) == ("info", "search", 2 * LAYERS)
    pairs = dict(zip((o.name for o in finding.where.outputs), finding.where.inputs, strict=True))
    assert pairs["present.1.value"] == "past.1.value"
    assert not [f for f in front.findings if f.code == "value-dependent-shape"], "a length that the data have is none"


def test_an_engine_with_an_empty_cache_is_timed(prompts: list[Feed], tmp_path: Path) -> None:
    """On the CPU here, as a search with --target cpu does it."""
    model, samples, reference = decoder(tmp_path), tmp_path / "samples.npz", tmp_path / "reference.npz"
    save_samples(samples, prompts)
    state = WorkerState()
    report = ReferenceJob(model, samples, reference, "cpu").run(state)
    assert check_reference(report) == ()
    latency = LatencySettings(warmup_ms=1.0, duration_ms=1.0)
    engine = OrtEngine(model, SessionOptions(preset="timed"))
    result = MeasureJob(engine, engine, Scoring(samples, reference), samples, latency=latency).run(state).measurement
    assert result.error.value("relative_l2") == 0
    assert result.latency.median_ms > 0
    state.close()
