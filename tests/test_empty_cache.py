"""A decoder whose key-value cache is empty, as before its first token: it is searched like any other model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import mptune
from mptune.api.deploying import open_run
from mptune.data.archive import save_samples
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ReferenceJob
from mptune.engines.toolchains.measuring import MeasureJob
from mptune.processes.child import WorkerState
from mptune.settings import LatencySettings
from mptune.tuning.baseline import check_reference

WIDTH, HEADS, WORDS, LAYERS = 32, 2, 40, 2
SIZE = WIDTH // HEADS


class _Decoder:
    """RMSNorm in pieces, attention over past and present, a gated product with SiLU."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(5)

    def const(self, value: object, kind: type = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.array(value, kind), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def weight(self, *shape: int) -> str:
        return self.const(self._random.normal(0, shape[0] ** -0.5, shape))

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: object) -> str:
        out = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], f"{kind}_{out}", **attributes))
        return out

    def norm(self, x: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.const(1e-5)))
        return self.op("Mul", self.op("Div", x, root), self.const(np.ones(WIDTH)))

    def heads(self, x: str) -> str:
        split = self.op(
            "Reshape", self.op("MatMul", x, self.weight(WIDTH, WIDTH)), self.const([0, 0, HEADS, SIZE], np.int64)
        )
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def layer(self, x: str, k: int) -> str:
        read = self.norm(x)
        query, key, value = (self.heads(read) for _ in range(3))
        key = self.op("Concat", f"past_key_values.{k}.key", key, axis=2, out=f"present.{k}.key")
        value = self.op("Concat", f"past_key_values.{k}.value", value, axis=2, out=f"present.{k}.value")
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        shares = self.op("Softmax", self.op("Mul", scores, self.const(SIZE**-0.5)), axis=-1)
        together = self.op("Transpose", self.op("MatMul", shares, value), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", together, self.const([0, 0, WIDTH], np.int64))
        x = self.op("Add", x, self.op("MatMul", flat, self.weight(WIDTH, WIDTH)))
        read = self.norm(x)
        gate = self.op("MatMul", read, self.weight(WIDTH, 2 * WIDTH))
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        wide = self.op("Mul", gate, self.op("MatMul", read, self.weight(WIDTH, 2 * WIDTH)))
        return self.op("Add", x, self.op("MatMul", wide, self.weight(2 * WIDTH, WIDTH)))


def decoder(path: Path) -> Path:
    """A small llama with a cache of dynamic length."""
    net = _Decoder()
    x = net.op("Gather", net.weight(WORDS, WIDTH), "input_ids")
    for k in range(LAYERS):
        x = net.layer(x, k)
    net.op("MatMul", net.norm(x), net.weight(WIDTH, WORDS), out="logits")
    caches = [f"{k}.{what}" for k in range(LAYERS) for what in ("key", "value")]
    past, present = (["batch", HEADS, length, SIZE] for length in ("past", "total"))
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    inputs += [helper.make_tensor_value_info(f"past_key_values.{c}", TensorProto.FLOAT, past) for c in caches]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", WORDS])]
    outputs += [helper.make_tensor_value_info(f"present.{c}", TensorProto.FLOAT, present) for c in caches]
    graph = helper.make_graph(net.nodes, "decoder", inputs, outputs, net.constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    return path


def prompts(folder: Path, past: int, count: int = 4) -> Path:
    """One file a sample, the cache of this length."""
    folder.mkdir()
    random = np.random.default_rng(6)
    for k in range(count):
        caches = {
            f"past_key_values.{layer}.{what}": random.normal(size=(1, HEADS, past, SIZE)).astype(np.float32)
            for layer in range(LAYERS)
            for what in ("key", "value")
        }
        np.savez(folder / f"{k}.npz", input_ids=random.integers(0, WORDS, (1, 6)), **caches)
    return folder


def test_a_search_with_an_empty_cache_ends_and_names_the_state(tmp_path: Path) -> None:
    front = mptune.search(
        decoder(tmp_path / "m.onnx"),
        data=prompts(tmp_path / "data", past=0),
        out=tmp_path / "run",
        target="jetson-orin-nano-8gb",
        budget=3,
    )
    assert front.failures == 0
    evaluations = open_run(tmp_path / "run").evaluations
    assert len(evaluations) == 3
    assert all(e.is_finite for e in evaluations)
    assert any(e.error_value > 0 for e in evaluations)
    (finding,) = [f for f in front.findings if f.code == "state-fed-back"]
    assert (finding.severity, finding.origin, finding.evidence["pairs"]) == ("info", "search", 2 * LAYERS)
    pairs = dict(zip((o.name for o in finding.where.outputs), finding.where.inputs, strict=True))
    assert pairs["present.1.value"] == "past_key_values.1.value"
    assert not [f for f in front.findings if f.code == "value-dependent-shape"], "a length that the data have is none"


def test_an_engine_with_an_empty_cache_is_timed(tmp_path: Path) -> None:
    """On the CPU here, as a search with --target cpu does it."""
    model, samples, reference = decoder(tmp_path / "m.onnx"), tmp_path / "samples.npz", tmp_path / "reference.npz"
    files = sorted(prompts(tmp_path / "data", past=0).iterdir())
    save_samples(samples, [dict(np.load(file)) for file in files])
    state = WorkerState()
    report = ReferenceJob(model, samples, reference, "cpu").run(state)
    assert check_reference(report) == ()
    latency = LatencySettings(warmup_ms=1.0, duration_ms=1.0)
    engine = OrtEngine(model, SessionOptions(preset="timed"))
    result = MeasureJob(engine, engine, Scoring(samples, reference), samples, latency=latency).run(state).measurement
    assert result.error.value("relative_l2") == 0
    assert result.latency.median_ms > 0
    state.close()
