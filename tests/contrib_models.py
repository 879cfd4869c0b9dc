"""Models with operators of ONNX Runtime's own domain: by onnx.helper, and written by its optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"
BATCH, LENGTH, CHANNELS, HEADS = 2, 8, 32, 2
SIZE = CHANNELS // HEADS


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    opset: int = 17,
    integers: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model; ``integers`` are the inputs of type INT32."""
    code = {name: TensorProto.INT32 if name in integers else TensorProto.FLOAT for name in inputs}
    graph = helper.make_graph(
        list(nodes),
        "contrib",
        [helper.make_tensor_value_info(name, code[name], shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def between_products(
    op_type: str,
    inputs: Sequence[str] = ("h",),
    outputs: Sequence[str] = ("r",),
    weights: Mapping[str, np.ndarray] | None = None,
    more_inputs: Mapping[str, Any] | None = None,
    integers: Sequence[str] = (),
    width: int = CHANNELS,
    domain: str = MS,
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """``x @ w1 -> op_type -> @ w2``: what stands behind the operator is typed only where its output is."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="before"),
        helper.make_node(op_type, list(inputs), list(outputs), name="middle", domain=domain, **attributes),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="behind"),
    ]
    return model_of(
        nodes,
        {"x": ["batch", LENGTH, CHANNELS], **(more_inputs or {})},
        {"y": None},
        {"w1": _values(CHANNELS, CHANNELS), "w2": _values(width, 16, seed=1), **(weights or {})},
        opset,
        integers,
    )


def _norm(*names: str) -> dict[str, np.ndarray]:
    return {name: 1 + _values(CHANNELS, seed=k) / 4 for k, name in enumerate(names)}


def _cache() -> dict[str, np.ndarray]:
    angles = np.arange(64)[:, None] / 10.0 ** np.arange(SIZE // 2)[None]
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def _three() -> list[onnx.NodeProto]:
    return [helper.make_node("MatMul", ["x", f"w{n}"], [n], name=f"to_{n}") for n in "qkv"]


def _attention_model(node: onnx.NodeProto, weights: Mapping[str, np.ndarray], **more: Any) -> onnx.ModelProto:
    """``node`` on three projections ``q``, ``k``, ``v``, and a product behind it."""
    last = helper.make_node("MatMul", ["r", "w2"], ["y"], name="behind")
    w = {f"w{n}": _values(CHANNELS, CHANNELS, seed=k) for k, n in enumerate("qkv")}
    inputs = {"x": [BATCH, LENGTH, CHANNELS], **more.pop("inputs", {})}
    outputs = {"y": None, **more.pop("outputs", {})}
    weights = {**w, "w2": _values(CHANNELS, 16, seed=5), **weights}
    return model_of([*_three(), node, last], inputs, outputs, weights, **more)


def _node(op_type: str, inputs: Sequence[str], outputs: Sequence[str] = ("r",), **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), list(outputs), name="middle", domain=MS, **attributes)


def _grouped_query(past: Sequence[str]) -> onnx.ModelProto:
    """Without a cache where ``past`` names none; the present keys and values leave the model."""
    node = _node(
        "GroupQueryAttention",
        ["q", "k", "v", *past, "lengths", "total", "cos", "sin"],
        ["r", "present_k", "present_v"],
        num_heads=HEADS,
        kv_num_heads=HEADS,
        do_rotary=1,
    )
    constants = {"lengths": np.full(BATCH, LENGTH - 1, np.int32), "total": np.array(LENGTH, np.int32), **_cache()}
    inputs = {name: [BATCH, HEADS, 0, SIZE] for name in past if name}
    outputs = dict.fromkeys(("present_k", "present_v"))
    return _attention_model(node, constants, inputs=inputs, outputs=outputs)


def growing_cache(layers: int = 2) -> onnx.ModelProto:
    """A decoder whose present keys and values are longer than the past ones, by dynamic axes that it declares."""
    past = {f"past_{n}.{k}": [1, HEADS, "past", SIZE] for k in range(layers) for n in "kv"}
    present = {f"present_{n}.{k}": [1, HEADS, "present", SIZE] for k in range(layers) for n in "kv"}
    nodes, x = [], "x"
    for k in range(layers):
        nodes += [helper.make_node("MatMul", [x, f"w{n}"], [f"{n}{k}"], name=f"to_{n}.{k}") for n in "qkv"]
        read = [f"{n}{k}" for n in "qkv"] + [f"past_{n}.{k}" for n in "kv"] + ["lengths", "total"]
        made = [f"r{k}", *(f"present_{n}.{k}" for n in "kv")]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention", read, made, f"attention.{k}", domain=MS, num_heads=HEADS, kv_num_heads=HEADS
            )
        )
        x = f"r{k}"
    nodes.append(helper.make_node("MatMul", [x, "w2"], ["y"], name="behind"))
    weights = {f"w{n}": _values(CHANNELS, CHANNELS, seed=k) for k, n in enumerate("qkv")}
    inputs = {"x": [1, "length", CHANNELS], "lengths": [1], "total": [], **past}
    outputs = {"y": [1, "length", 16], **present}
    weights["w2"] = _values(CHANNELS, 16, seed=5)
    return model_of(nodes, inputs, outputs, weights, integers=("lengths", "total"))


def growing_cache_feed(past: int, length: int, layers: int = 2) -> dict[str, np.ndarray]:
    """What ``growing_cache`` reads with a cache of ``past`` positions and ``length`` new ones."""
    caches = {f"past_{n}.{k}": _values(1, HEADS, past, SIZE, seed=k) for k in range(layers) for n in "kv"}
    total = past + length
    lengths = {"lengths": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
    return {"x": _values(1, length, CHANNELS), **lengths, **caches}


def _embedding() -> onnx.ModelProto:
    weights = {"words": _values(50, CHANNELS), "places": _values(LENGTH, CHANNELS, seed=1), **_norm("g", "b")}
    nodes = [
        _node("EmbedLayerNormalization", ["ids", "", "words", "places", "", "g", "b"], ["r", "mask"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="behind"),
    ]
    weights["w2"] = _values(CHANNELS, 16, seed=2)
    return model_of(nodes, {"ids": ["batch", LENGTH]}, {"y": None}, weights, integers=["ids"])


def _convolution(op_type: str, **attributes: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node(op_type, ["x", "w", "b"], ["r"], name="middle", domain=MS, pads=[1, 1, 1, 1], **attributes),
        helper.make_node("Conv", ["r", "w2"], ["y"], name="behind"),
    ]
    weights = {"w": _values(6, 3, 3, 3), "b": _values(6), "w2": _values(4, 6, 1, 1)}
    return model_of(nodes, {"x": ["batch", 3, 8, 8]}, {"y": None}, weights)


def _bits() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (CHANNELS, CHANNELS // 32, 16), dtype=np.uint8)
    scales = {"packed": packed, "scales": np.full(CHANNELS, 0.02, np.float32)}
    return between_products(
        "MatMulNBits", ["h", "packed", "scales"], weights=scales, K=CHANNELS, N=CHANNELS, bits=4, block_size=32
    )


BUILDERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "Attention": lambda: between_products(
        "Attention",
        ["h", "wa", "ba"],
        weights={"wa": _values(CHANNELS, 3 * CHANNELS), "ba": np.zeros(3 * CHANNELS, np.float32)},
        num_heads=HEADS,
    ),
    "MultiHeadAttention": lambda: _attention_model(
        _node("MultiHeadAttention", ["q", "k", "v"], num_heads=HEADS, scale=0.35), {}
    ),
    "GroupQueryAttention": lambda: _grouped_query(["past_k", "past_v"]),
    "GroupQueryAttention without a cache": lambda: _grouped_query(["", ""]),
    "RotaryEmbedding": lambda: between_products(
        "RotaryEmbedding",
        ["h", "places", "cos", "sin"],
        weights={"places": np.zeros(1, np.int64), **_cache()},
        num_heads=HEADS,
    ),
    "EmbedLayerNormalization": _embedding,
    "SkipLayerNormalization": lambda: between_products(
        "SkipLayerNormalization", ["h", "x", "g", "b", "c"], weights=_norm("g", "b", "c")
    ),
    "SkipSimplifiedLayerNormalization": lambda: between_products(
        "SkipSimplifiedLayerNormalization", ["h", "x", "g"], ["n", "", "", "r"], weights=_norm("g")
    ),
    "SimplifiedLayerNormalization": lambda: between_products(
        "SimplifiedLayerNormalization", ["h", "g"], weights=_norm("g"), domain="", axis=-1
    ),
    "LayerNormalization of opset 14": lambda: between_products(
        "LayerNormalization", ["h", "g", "b"], weights=_norm("g", "b"), domain="", opset=14
    ),
    "FusedMatMul": lambda: between_products(
        "FusedMatMul", ["h", "wt"], weights={"wt": _values(24, CHANNELS)}, width=24, transB=1, alpha=0.5
    ),
    "FusedConv": lambda: _convolution("FusedConv", activation="Relu"),
    "BiasGelu": lambda: between_products("BiasGelu", ["h", "b"], weights=_norm("b")),
    "FastGelu": lambda: between_products("FastGelu", ["h", "b"], weights=_norm("b")),
    "FastGelu without a bias": lambda: between_products("FastGelu"),
    "Gelu": lambda: between_products("Gelu"),
    "QuickGelu": lambda: between_products("QuickGelu", alpha=1.702),
    "MatMulNBits": _bits,
}
"""Name -> a model around one operator that ONNX does not define, and that ONNX Runtime's CPU provider runs in FP32."""


def transformer(layers: int = 2, opset: int = 17) -> onnx.ModelProto:
    """A post-norm transformer encoder as exporters write it: residuals, GELU in pieces, LayerNormalization."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}

    def constant(name: str, value: np.ndarray) -> str:
        weights[name] = value
        return name

    def add(op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def product(x: str, name: str, rows: int, columns: int) -> str:
        weight = constant(f"{name}_w", _values(rows, columns, seed=len(weights)))
        bias = constant(f"{name}_b", _values(columns, seed=len(weights)) / 4)
        return add("Add", [add("MatMul", [x, weight], f"{name}_product"), bias], name)

    def norm(x: str, name: str) -> str:
        scales = [constant(f"{name}_{part}", value) for part, value in _norm("g", "b").items()]
        return add("LayerNormalization", [x, *scales], name, epsilon=1e-5)

    def heads(x: str, name: str, perm: Sequence[int]) -> str:
        shape = constant(f"{name}_shape", np.array([0, 0, HEADS, SIZE], np.int64))
        return add("Transpose", [add("Reshape", [x, shape], f"{name}_split")], f"{name}_heads", perm=perm)

    x = "x"
    for layer in range(layers):
        p = f"layer{layer}"
        q = heads(product(x, f"{p}/q", CHANNELS, CHANNELS), f"{p}/q", [0, 2, 1, 3])
        k = heads(product(x, f"{p}/k", CHANNELS, CHANNELS), f"{p}/k", [0, 2, 3, 1])
        v = heads(product(x, f"{p}/v", CHANNELS, CHANNELS), f"{p}/v", [0, 2, 1, 3])
        root = constant(f"{p}/root", np.array(SIZE**0.5, np.float32))
        scores = add("Div", [add("MatMul", [q, k], f"{p}/scores"), root], f"{p}/scaled")
        read = add("MatMul", [add("Softmax", [scores], f"{p}/softmax", axis=-1), v], f"{p}/read")
        whole = constant(f"{p}/whole", np.array([0, 0, CHANNELS], np.int64))
        read = add("Reshape", [add("Transpose", [read], f"{p}/back", perm=[0, 2, 1, 3]), whole], f"{p}/joined")
        x = norm(add("Add", [product(read, f"{p}/out", CHANNELS, CHANNELS), x], f"{p}/sum1"), f"{p}/norm1")
        h = product(x, f"{p}/up", CHANNELS, 4 * CHANNELS)
        two, one, half = (
            constant(f"{p}/{name}", np.array(value, np.float32))
            for name, value in (("root of 2", 2**0.5), ("one", 1), ("half", 0.5))
        )
        erf = add("Erf", [add("Div", [h, two], f"{p}/divided")], f"{p}/erf")
        gated = add("Mul", [h, add("Add", [erf, one], f"{p}/shifted")], f"{p}/gated")
        h = add("Mul", [gated, half], f"{p}/gelu")
        x = norm(add("Add", [product(h, f"{p}/down", 4 * CHANNELS, CHANNELS), x], f"{p}/sum2"), f"{p}/norm2")
    product(x, "y", CHANNELS, 10)
    return model_of(nodes, {"x": ["batch", "length", CHANNELS]}, {"y": ["batch", "length", 10]}, weights, opset)


def optimised(model: onnx.ModelProto, folder: Path) -> Path:
    """The model as ONNX Runtime's own optimiser writes it, at its extended level."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    path = folder / "optimised.onnx"
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return path
