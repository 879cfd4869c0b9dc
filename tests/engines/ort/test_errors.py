from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions, classify, first_words

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
        "Type Error: Type parameter (T) of Optype (Add) bound to different types (tensor(float) and tensor(float16)"
        " in node (n).",
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
    (
        "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. Error in Node:n",
        FailureKind.INVALID_MODEL,
        "This is an invalid model. Error in Node:n",
    ),
    (
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x",
        FailureKind.ERROR,
        "Got invalid dimensions for input: x",
    ),
    ("write failed: No space left on device", FailureKind.DISK_FULL, "No space left on device"),
]


@pytest.mark.parametrize(("text", "kind", "words"), CASES)
def test_kind_and_words(text: str, kind: FailureKind, words: str) -> None:
    assert classify(text) is kind
    assert words in first_words(text)
    assert not any(noise in first_words(text) for noise in ("onnxruntime_src", "hostname", "ONNXRuntimeError", "\n"))


def model(node: object, opset: int = 17) -> bytes:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8).SerializeToString()


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b"not a model", FailureKind.INVALID_MODEL),
        (model(helper.make_node("NoSuchOp", ["x"], ["y"], "n")), FailureKind.INVALID_MODEL),
        (model(helper.make_node("Add", ["x", "nowhere"], ["y"], "n")), FailureKind.INVALID_MODEL),
    ],
)
def test_onnx_runtimes_own_refusals(bad: bytes, kind: FailureKind) -> None:
    with pytest.raises(EngineError) as caught:
        open_session(bad, SessionOptions())
    assert caught.value.kind is kind
    assert caught.value.message


def test_a_failing_node_is_named() -> None:
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [3])
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], "the/reshape")], "g", info, out, [shape]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = open_session(proto.SerializeToString(), SessionOptions())
    with pytest.raises(EngineError, match="the/reshape") as caught:
        session.run({"x": np.zeros(4, np.float32)})
    assert caught.value.kind is FailureKind.ERROR
    assert ".cc" not in caught.value.message
    session.close()
