"""Small models that show one thing each, built with onnx.helper."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str] | str, name: str = "", **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(
        op, list(inputs), [outputs] if isinstance(outputs, str) else list(outputs), name=name, **attributes
    )


def weight(name: str, *shape: int, scale: float = 0.3) -> onnx.TensorProto:
    """Normal values; those of one name and shape are always the same, whatever other tests run before."""
    rng = np.random.default_rng([7, zlib.crc32(name.encode()), *shape])
    return numpy_helper.from_array((rng.standard_normal(shape) * scale).astype(np.float32), name)


def constant(name: str, value: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def value(name: str, shape: Sequence[int | str | None] | None, code: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, code, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
    **graph: object,
) -> onnx.ModelProto:
    proto = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), list(initializers), **graph)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.example", 1)]
    return helper.make_model(proto, opset_imports=imports, ir_version=9, producer_name="tests")


def text(graph: str, *constants: onnx.TensorProto, opset: int = 17) -> onnx.ModelProto:
    """A model in ONNX's text form, from its inputs on, with these constants besides those that it states."""
    domains = f'"" : {opset}, "com.example" : 1, "com.microsoft" : 1'
    proto: onnx.ModelProto = onnx.parser.parse_model(f"<ir_version: 9, opset_import: [{domains}]> test {graph}")
    proto.graph.initializer.extend(constants)
    return proto


def save(proto: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def mlp(opset: int = 17) -> onnx.ModelProto:
    """LayerNorm, two products, softmax: four groups and a residual."""
    return model(
        [
            node("LayerNormalization", ["x", "gamma", "beta"], "n", "/block/norm/LayerNormalization", axis=-1),
            node("MatMul", ["n", "w1"], "h", "/block/fc1/MatMul"),
            node("Add", ["h", "b1"], "hb", "/block/fc1/Add"),
            node("Relu", ["hb"], "r", "/block/act/Relu"),
            node("MatMul", ["r", "w2"], "o", "/block/fc2/MatMul"),
            node("Add", ["o", "x"], "s", "/block/Add"),
            node("Softmax", ["s"], "y", "/head/Softmax", axis=-1),
        ],
        [value("x", ["batch", 8])],
        [value("y", ["batch", 8])],
        [weight("gamma", 8), weight("beta", 8), weight("w1", 8, 16), weight("b1", 16), weight("w2", 16, 8)],
        opset,
    )


def cnn() -> onnx.ModelProto:
    """Convolution, batch norm, pooling, classifier; the batch norm folds into its convolution's group."""
    ones = np.ones(4, np.float32)
    return model(
        [
            node("Conv", ["image", "w"], "c", "/conv/Conv", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", "s", "b", "m", "v"], "n", "/bn/BatchNormalization"),
            node("Relu", ["n"], "r", "/relu/Relu"),
            node("GlobalAveragePool", ["r"], "p", "/pool/GlobalAveragePool"),
            node("Flatten", ["p"], "f", "/Flatten"),
            node("Gemm", ["f", "fw", "fb"], "logits", "/head/Gemm"),
        ],
        [value("image", ["batch", 3, 8, 8])],
        [value("logits", ["batch", 10])],
        [
            weight("w", 4, 3, 3, 3),
            *(numpy_helper.from_array(ones * k, n) for n, k in (("s", 1.5), ("b", 0.1), ("m", 0.2), ("v", 2.0))),
            weight("fw", 4, 10),
            weight("fb", 10),
        ],
    )


def attention(mask: float | None = None) -> onnx.ModelProto:
    """Scaled scores, an optional additive mask from a boolean input, softmax, product with the values."""
    nodes = [
        node("MatMul", ["x", "wq"], "q", "/attn/q/MatMul"),
        node("MatMul", ["x", "wk"], "k", "/attn/k/MatMul"),
        node("MatMul", ["x", "wv"], "v", "/attn/v/MatMul"),
        node("Transpose", ["k"], "kt", "/attn/Transpose", perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], "scores", "/attn/MatMul"),
        node("Mul", ["scores", "scale"], "scaled", "/attn/Mul"),
    ]
    last = "scaled"
    inputs = [value("x", ["batch", 5, 8])]
    if mask is not None:
        inputs.append(value("keep", ["batch", 1, 5], TensorProto.BOOL))
        nodes += [
            node("Cast", ["keep"], "keep_f", "/mask/Cast", to=TensorProto.FLOAT),
            node("Sub", ["one", "keep_f"], "drop", "/mask/Sub"),
            node("Mul", ["drop", "huge"], "bias", "/mask/Mul"),
            node("Add", ["scaled", "bias"], "masked", "/attn/Add"),
        ]
        last = "masked"
    nodes += [
        node("Softmax", [last], "p", "/attn/Softmax", axis=-1),
        node("MatMul", ["p", "v"], "y", "/attn/MatMul_1"),
    ]
    constants = [weight(n, 8, 8) for n in ("wq", "wk", "wv")] + [constant("scale", 8**-0.5), constant("one", 1.0)]
    constants.append(constant("huge", -1e9 if mask is None else mask))
    return model(nodes, inputs, [value("y", ["batch", 5, 8])], constants)


def product(w: object) -> onnx.ModelProto:
    """One matrix product with the given square weight."""
    side = np.asarray(w).shape[0]
    return model(
        [node("MatMul", ["x", "w"], "y", "m")], [value("x", [1, side])], [value("y", [1, side])], [constant("w", w)]
    )


def decomposed_norm(eps: float = 1e-5, rms: bool = False) -> onnx.ModelProto:
    """LayerNorm or RMSNorm written out, between two products."""
    centred = "h" if rms else "d"
    nodes = [node("MatMul", ["x", "w1"], "h", "/fc1/MatMul")]
    if not rms:
        nodes += [
            node("ReduceMean", ["h"], "mu", "/norm/ReduceMean", axes=[-1]),
            node("Sub", ["h", "mu"], "d", "/norm/Sub"),
        ]
    nodes += [
        node("Pow", [centred, "two"], "sq", "/norm/Pow"),
        node("ReduceMean", ["sq"], "var", "/norm/ReduceMean_1", axes=[-1]),
        node("Add", ["var", "eps"], "ve", "/norm/Add"),
        node("Sqrt", ["ve"], "sd", "/norm/Sqrt"),
        node("Div", [centred, "sd"], "n", "/norm/Div"),
        node("Mul", ["n", "gamma"], "g", "/norm/Mul"),
        node("MatMul", ["g", "w2"], "y", "/fc2/MatMul"),
    ]
    constants = [weight("w1", 8, 8), weight("w2", 8, 8), weight("gamma", 8), constant("two", 2.0), constant("eps", eps)]
    return model(nodes, [value("x", ["batch", 8])], [value("y", ["batch", 8])], constants, opset=13)


def detr(level: float = 0.0) -> onnx.ModelProto:
    """A decoder over 20 of 100 candidates, which TopK selects as in RT-DETR: boxes (centre and size), scores, places.

    FP16's spacing at the ``level`` of the scores decides how many candidates it orders otherwise.
    """
    graph = """(float[batch,100,16] x) => (float[batch,20,4] boxes, float[batch,20,6] scores, int64[batch,20] places)
        <int64[1] k = {20}, int64[1] last = {2}, int64[3] four = {1, 1, 4}, int64[3] all = {1, 1, 16}> {
        encoded = MatMul(x, w_e) memory = Tanh(encoded) ranked = MatMul(memory, w_s) lifted = Add(ranked, level)
        rated = ReduceMax<axes = [-1], keepdims = 0>(lifted) ["choose"] best, places = TopK<axis = 1>(rated, k)
        at = Unsqueeze(places, last) at4 = Expand(at, four) at16 = Expand(at, all)
        proposed = MatMul(memory, w_b) box = GatherElements<axis = 1>(proposed, at4)
        query = GatherElements<axis = 1>(memory, at16) turned = Transpose<perm = [0, 2, 1]>(query)
        like = MatMul(query, turned) share = Softmax<axis = -1>(like) read = MatMul(share, query)
        sum = Add(query, read) decoded = MatMul(sum, w_d) hidden = Relu(decoded) move = MatMul(hidden, w_m)
        moved = Add(box, move) boxes = Sigmoid(moved) logits = MatMul(hidden, w_c) scores = Sigmoid(logits) }"""
    widths = {"e": 16, "s": 6, "b": 4, "d": 16, "m": 4, "c": 6}
    return text(graph, constant("level", level), *(weight(f"w_{name}", 16, width) for name, width in widths.items()))
