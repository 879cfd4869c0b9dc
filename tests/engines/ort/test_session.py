"""What sessions of ONNX Runtime are opened with, faults that they steer around, their errors, and runs side by side."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, version_converter

from mptune.data.archive import save_samples
from mptune.engines.base import EngineError, Failure, FailureKind
from mptune.engines.ort import cuda_session, session as side_by_side
from mptune.engines.ort.cuda_session import CudaSession, open_session
from mptune.engines.ort.session import (
    OPTIMISED_MODEL,
    OrtSession,
    Preset,
    SessionOptions,
    SideBySide,
    classify,
    first_words,
)
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ErrorsJob, ReferenceJob
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.parent import Worker
from mptune.settings import WorkerSettings
from tests.graph import models
from tests.graph.helpers import feeds, relative_l2, run
from tests.reporting.infer_support import infer_module

LAYERNORM = Path(__file__).parents[2] / "graph" / "corpus" / "layernorm_13.onnx"


@pytest.mark.parametrize(("preset", "is_fused"), [("reference", True), ("values", False), ("emulation", False)])
def test_where_values_or_epsilons_are_read_norms_are_not_fused(preset: Preset, is_fused: bool, tmp_path: Path) -> None:
    folder = tmp_path / "optimised"
    folder.mkdir()
    options = SessionOptions(preset=preset, optimised_dir=folder)
    OrtSession(models.save(models.decomposed_norm(), tmp_path), options).close()
    graph = onnx.load(folder / OPTIMISED_MODEL, load_external_data=False).graph
    assert ("Pow" in {node.op_type for node in graph.node}) is not is_fused  # a norm's variance


def outputs_of(path: Path | bytes, feeds: dict[str, np.ndarray], preset: Preset = "reference") -> dict[str, np.ndarray]:
    with closing(OrtSession(path, SessionOptions(preset=preset))) as session:
        return session.run(feeds)


def rounded(name: str, zero: str = "zero") -> str:
    """``name_dq``: a value quantised and dequantised."""
    return f"{name}_q = QuantizeLinear ({name}, scale, {zero}) {name}_dq = DequantizeLinear ({name}_q, scale, {zero})"


def test_layers_may_share_an_int8_weight(tmp_path: Path) -> None:
    """As the heads of a detector do, which its levels share; and their products are exact."""
    rng = np.random.default_rng(0)
    weight, scale = rng.integers(-127, 128, (64, 64)), np.float32(0.05)
    constants = [models.constant("scale", scale), models.constant("w", weight, np.int8)]
    graph = f"""(float[4, 64] x) => (float[4, 64] y_dq) <int8 zero = {{0}}> {{
        wf = DequantizeLinear (w, scale, zero)
        {rounded("x")} a = MatMul (x_dq, wf)
        {rounded("a")} {rounded("a_dq")} y = MatMul (a_dq_dq, wf) {rounded("y")}
    }}"""
    x = rng.uniform(-6, 6, (4, 64)).astype(np.float32)
    with closing(OrtSession(models.save(models.text(graph, *constants), tmp_path), SessionOptions())) as session:
        native = (
            session._open_session().get_session_options()
        )  # products saturate on no processor, with VNNI or without
        assert native.get_session_config_entry("session.x64quantprecision") == "1"
        y = session.run({"x": x})["y_dq"]

    def steps(values: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values / scale), -128, 127)

    first = steps(steps(x) @ weight * scale * scale)
    assert np.array_equal(np.rint(y / scale), steps(first @ weight * scale * scale))


def test_a_gemm_of_int8_activations_opens_and_is_exact(tmp_path: Path) -> None:
    """Its weights have a scale for each channel; the product beside it reads UINT8, and must not saturate either."""
    rng = np.random.default_rng(0)
    scale, scales = np.float32(0.05), rng.uniform(0.01, 0.05, 32).astype(np.float32)
    constants = [models.constant(name, rng.integers(-127, 128, (32, 32)), np.int8) for name in ("w", "v")]
    constants += [models.constant("b", rng.integers(-999, 999, 32), np.int32), models.constant("bs", scales * scale)]
    constants += [models.constant("scale", scale), models.constant("scales", scales)]
    constants += [models.constant("zeros", np.zeros(32), np.int8), models.constant("zeros32", np.zeros(32), np.int32)]
    graph = f"""(float[4, 32] x, float[4, 32] u) => (float[4, 32] a_dq, float[4, 32] c_dq)
        <int8 zero = {{0}}, uint8 middle = {{128}}> {{
        wf = DequantizeLinear <axis = 0> (w, scales, zeros)
        vf = DequantizeLinear (v, scale, zero)
        bf = DequantizeLinear <axis = 0> (b, bs, zeros32)
        {rounded("x")} a = Gemm <transB = 1> (x_dq, wf, bf) {rounded("a")}
        {rounded("u", "middle")} c = MatMul (u_dq, vf) {rounded("c", "middle")}
    }}"""
    path, x = models.save(models.text(graph, *constants), tmp_path), rng.uniform(-6, 6, (4, 32)).astype(np.float32)
    reference = outputs_of(path, {"x": x, "u": x})
    for name, plain in outputs_of(path, {"x": x, "u": x}, "values").items():
        apart = np.abs(reference[name] - plain)
        assert apart.max() < 1.01 * scale, name  # one step, where a rounding is a tie
        assert np.count_nonzero(apart > scale / 2) <= 2, name


def test_nodes_may_share_a_name(tmp_path: Path) -> None:
    """ONNX lets them; ONNX Runtime 1.31 does not. Weights outside the file are still found."""
    graph = models.mlp()
    for layer in graph.graph.node:
        layer.name = "layer"
    path = tmp_path / "model.onnx"
    onnx.save(graph, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(Exception, match="same node name"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = {"x": np.ones((2, 8), np.float32)}
    np.testing.assert_allclose(outputs_of(path, x)["y"], outputs_of(models.mlp().SerializeToString(), x)["y"], 1e-5)


def by_script(path: Path, folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What infer.py, which opens a session of its own, computes."""
    opened = infer_module(path, folder)["opened"](path, onnxruntime.SessionOptions(), ["CPUExecutionProvider"], [])
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feeds), strict=True))


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm", "Conv"])
def test_the_session_and_the_script_open_fp8_activations_and_keep_their_relu(op_type: str, tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider fuses them as if they were INT8."""
    shapes = {"Conv": ([1, 16, 4, 4], [8, 16, 1, 1], [1, 8, 4, 4])}
    given, weights, out = shapes.get(op_type, ([4, 16], [16, 8], [4, 8]))
    zero = helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0.0])
    constants = [models.weight("w", *weights), models.constant("scale", 0.05), zero]
    graph = f"""(float{given} x) => (float{out} y_dq) {{
        {rounded("x")} {rounded("w")} product = {op_type} (x_dq, w_dq) y = Relu (product) {rounded("y")}
    }}"""
    path = models.save(models.text(graph, *constants, opset=21), tmp_path)
    with pytest.raises(Exception, match=r"float8|QLinearMatMul"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {"x": np.random.default_rng(0).standard_normal(given).astype(np.float32)}
    expected = outputs_of(path, feeds, "values")["y_dq"]
    assert expected.min() == 0, "a Relu before FP8 is dropped as one before UINT8 is"
    with closing(OrtSession(path, SessionOptions())) as session:
        assert np.array_equal(session.run(feeds)["y_dq"], expected)
        assert "FP8" in session.warnings[0]
    assert np.array_equal(by_script(path, tmp_path, feeds)["y_dq"], expected)


@pytest.mark.parametrize("fp16_norms", [True, False])
def test_the_session_and_the_script_open_mixed_norms(tmp_path: Path, fp16_norms: bool) -> None:
    """Norms written out at opset 17 and up, in another precision than what they read (LayerNormFusion)."""
    raised = tmp_path / "raised.onnx"
    onnx.save(version_converter.convert_version(onnx.load(LAYERNORM), 17), raised)
    model = load_model(raised)
    grouped = GroupedModel(model, find_groups(model))
    norm, other = (Precision.FP16, Precision.FP32) if fp16_norms else (Precision.FP32, Precision.FP16)
    plan = grouped.uniform(other).replace({group.id: norm for group in grouped.groups if group.kind == "norm"})
    typed = Rewriter(grouped, WeightBank.write(model, tmp_path)).write(plan, tmp_path / "typed.onnx")
    with pytest.raises(Exception, match="/LayerNormFusion/"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(typed), providers=["CPUExecutionProvider"])
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 9, 16), np.float32)}
    with closing(OrtSession(typed, SessionOptions())) as session:
        outputs = session.run(feeds)
        assert any("LayerNormFusion" in warning for warning in session.warnings)
    for name, reference in run(raised, feeds).items():
        for computed in (outputs, by_script(typed, tmp_path, feeds)):
            assert relative_l2(computed[name], reference) < 1e-2


def test_the_script_says_which_fusions_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime 1.24 fails on 29 of 98 mixed models with norms written out, 26 times with these words."""
    native, path = onnxruntime.InferenceSession, models.save(models.decomposed_norm(rms=True), tmp_path)

    def opened_by_1_24(*arguments: Any, disabled_optimizers: list[str], **more: Any) -> Any:
        if "SimplifiedLayerNormFusion" not in disabled_optimizers:
            raise RuntimeError("index by a name which does not exist: for node: /norm/Mul/SimplifiedLayerNormFusion/")
        return native(*arguments, disabled_optimizers=disabled_optimizers, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened_by_1_24)
    assert by_script(path, tmp_path, feeds(load_model(path)))["y"].shape == (3, 8)
    assert capsys.readouterr().out.startswith(
        "off       LayerNormFusionL1, LayerNormFusionL2, SimplifiedLayerNormFusion"
    )


def test_an_fp16_norm_before_a_product_neither_crashes_nor_changes_from_run_to_run(tmp_path: Path) -> None:
    """A norm whose result reaches a product through a transpose: what the crashing fusion looks for."""
    graph = """(float[4, 3, 16] x) => (float[3, 4, 16] y) {
        n = LayerNormalization <axis = -1> (x, gamma, beta)
        t = Transpose <perm = [1, 0, 2]> (n)
        y = MatMul (t, w)
    }"""
    weights = [models.weight("gamma", 16), models.weight("beta", 16), models.weight("w", 16, 16)]
    path = models.save(models.text(graph, *weights), tmp_path)
    model = load_model(path)
    grouped = GroupedModel(model, find_groups(model))
    typed = Rewriter(grouped).export(grouped.uniform(Precision.FP16), tmp_path / "typed.onnx")
    sample = {"x": np.random.default_rng(0).standard_normal((4, 3, 16)).astype(np.float32)}
    samples, reference = tmp_path / "samples.npz", tmp_path / "reference.npz"
    save_samples(samples, [sample] * 4)
    with Worker(tmp_path / "logs", WorkerSettings()) as worker:
        assert not isinstance(worker.call(ReferenceJob(path, samples, reference, "cpu"), 60), Failure)
        result = worker.call(ErrorsJob((typed,), Scoring(samples, reference)), 60)
    assert not isinstance(result, Failure), result
    errors = result[0].per_output["y"]["relative_l2"]
    assert len(set(errors)) == 1, "the same sample gives the same error every time"
    assert 0 < errors[0] < 1e-2


CASES = [
    (
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1) node with name 'n'",
        FailureKind.UNSUPPORTED,
        "Could not find an implementation for Foo(1) node with name 'n'",
    ),
    (
        "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/a b/x.onnx failed:Type Error: Type parameter (T) of"
        " Optype (Add) bound to different types (tensor(float) and tensor(float16) in node (n).",
        FailureKind.INVALID_MODEL,
        "Type Error: Type parameter (T) of Optype (Add) bound to different types (tensor(float) and tensor(float16)",
    ),
    (
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node."
        " Name:'c1' Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void*"
        " onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Failed to allocate memory"
        " for requested buffer of size 123\n\nmore",
        FailureKind.OUT_OF_MEMORY,
        "Conv node 'c1': Failed to allocate memory for requested buffer of size 123",
    ),
    (
        "CUDA failure 2: out of memory ; GPU=0 ; hostname=box ; file=/src/cuda_allocator.cc ; line=47 ;"
        " expr=cudaMalloc((void**)&p, size);",
        FailureKind.OUT_OF_MEMORY,
        "CUDA failure 2: out of memory",
    ),
    ("CUDA failure 100: no CUDA-capable device is detected ; GPU=0", FailureKind.DEVICE_LOST, "CUDA failure 100"),
    ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", FailureKind.CRASH, "CUDA failure 700"),
    ("write failed: No space left on device", FailureKind.DISK_FULL, "No space left on device"),
]


@pytest.mark.parametrize(("text", "kind", "words"), CASES)
def test_kind_and_words(text: str, kind: FailureKind, words: str) -> None:
    assert classify(text) is kind
    assert words in first_words(text)
    assert not any(noise in first_words(text) for noise in ("onnxruntime_src", "hostname", "ONNXRuntimeError", "\n"))


def reading(node: str) -> bytes:
    return models.text(f"(float[n] x) => (float y) <int64[1] shape = {{3}}> {{ {node} }}").SerializeToString()


@pytest.mark.parametrize("bad", [b"no model", reading("y = NoSuchOp (x)"), reading("y = Add (x, nowhere)")])
def test_onnx_runtimes_own_refusals(bad: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        open_session(bad, SessionOptions())
    assert caught.value.kind is FailureKind.INVALID_MODEL
    assert caught.value.message


def test_a_failing_node_is_named() -> None:
    with pytest.raises(EngineError, match="the/reshape") as caught:
        outputs_of(reading('["the/reshape"] y = Reshape (x, shape)'), {"x": np.zeros(4, np.float32)})
    assert caught.value.kind is FailureKind.ERROR
    assert ".cc" not in caught.value.message


@pytest.mark.parametrize(("is_once", "captured"), [(True, [2]), (False, [2, 3])])
def test_of_what_runs_once_a_graph_is_captured_for_the_first_shape_alone(
    is_once: bool, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, ran = CudaSession.__new__(CudaSession), list[int]()
    session._has_graph, session._bindings, session.outputs = True, {}, {}
    monkeypatch.setattr(session, "run", lambda feeds: ran.append(len(feeds["x"])) or {})

    def settled(feeds: dict[str, np.ndarray], *, unchanged: bool) -> Mock:
        session._bindings[cuda_session._binding_key(feeds)] = bound = Mock()
        bound.binding.get_outputs.return_value = ()
        return bound

    monkeypatch.setattr(session, "_settled", settled)
    for rows in (2, 3, 2, 3):
        session.replay({"x": np.zeros(rows)}, is_once=is_once)
    assert [key[0][1][0] for key in session._bindings] == captured
    assert ran == [3, 3] * is_once


MIB = 1 << 20


@pytest.mark.parametrize(
    ("runs", "run_bytes", "threads", "expected"),
    [
        (12, MIB, 1, SideBySide(8, 1)),
        (3, MIB, 1, SideBySide(3, 2)),
        (12, 300 * MIB, 1, SideBySide(2, 4)),
        (12, MIB, 4, SideBySide(2, 4)),
        (12, 400 * MIB, 1, SideBySide()),
        (1, MIB, 1, SideBySide()),
        (12, None, 1, SideBySide()),
    ],
)
def test_cores_runs_and_memory_limit_what_goes_at_a_time(
    runs: int, run_bytes: int | None, threads: int, expected: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 8)
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 16 << 30)
    assert SideBySide.for_runs(runs, run_bytes, threads) == expected
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 5 * MIB)
    assert SideBySide.for_runs(12, MIB) == SideBySide(2, 4)


def test_a_run_that_fails_ends_the_others() -> None:
    begun: list[int] = []

    def call(number: int) -> None:
        if number == 0:
            raise ValueError("no memory")
        begun.append(number)
        threading.Event().wait(0.2)  # another thread sees the failure first

    with pytest.raises(ValueError, match="no memory"):
        SideBySide(2, 1).run([partial(call, number) for number in range(51)])
    assert len(begun) < 50
