"""Models with operators of ONNX Runtime's own domain, and what its optimiser writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from tests.graph import models
from tests.graph.models import constant, text

BATCH, LENGTH, CHANNELS, HEADS = 2, 8, 32, 2
SIZE = CHANNELS // HEADS
X = f"float[batch,{LENGTH},{CHANNELS}] x"


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return models.weight(name, *shape, scale=shape[0] ** -0.5)


def scales(*names: str) -> list[onnx.TensorProto]:
    return [constant(n, 1 + np.random.default_rng(k).standard_normal(CHANNELS) / 24) for k, n in enumerate(names)]


def between_products(
    operator: str,
    *constants: onnx.TensorProto,
    result: str = "r",
    before: str = "",
    inputs: str = X,
    width: int = CHANNELS,
    opset: int = 17,
) -> onnx.ModelProto:
    """``x @ w1 -> h -> operator -> r -> @ w2``: what stands behind the operator is typed only where its output is."""
    graph = f"""({inputs}) => (float[] y) {{
        ["before"] h = MatMul(x, w1) {before} ["middle"] {result} = {operator} ["behind"] y = MatMul(r, w2) }}"""
    return text(graph, weight("w1", CHANNELS, CHANNELS), weight("w2", width, 16), *constants, opset=opset)


def attention(
    operator: str, *constants: onnx.TensorProto, result: str = "r", more_inputs: str = "", more_outputs: str = ""
) -> onnx.ModelProto:
    """An operator on three projections ``q``, ``k``, ``v``, and a product behind it."""
    graph = f"""(float[{BATCH},{LENGTH},{CHANNELS}] x {more_inputs}) => (float[] y {more_outputs}) {{
        ["to_q"] q = MatMul(x, wq) ["to_k"] k = MatMul(x, wk) ["to_v"] v = MatMul(x, wv)
        ["middle"] {result} = {operator} ["behind"] y = MatMul(r, w2) }}"""
    return text(graph, *(weight(f"w{n}", CHANNELS, CHANNELS) for n in "qkv"), weight("w2", CHANNELS, 16), *constants)


def angles() -> list[onnx.TensorProto]:
    values = np.arange(64)[:, None] / 10.0 ** np.arange(SIZE // 2)[None]
    return [constant("cos", np.cos(values)), constant("sin", np.sin(values))]


def grouped_query(past: Sequence[str]) -> onnx.ModelProto:
    """Without a cache where ``past`` names none; the present keys and values leave the model."""
    return attention(
        f"""com.microsoft.GroupQueryAttention<num_heads = {HEADS}, kv_num_heads = {HEADS}, do_rotary = 1>
            (q, k, v, {", ".join(past)}, lengths, total, cos, sin)""",
        *angles(),
        constant("lengths", [LENGTH - 1] * BATCH, np.int32),
        constant("total", LENGTH, np.int32),
        result="r, present_k, present_v",
        more_inputs="".join(f", float[{BATCH},{HEADS},0,{SIZE}] {name}" for name in past if name),
        more_outputs=", float[] present_k, float[] present_v",
    )


def growing_cache() -> onnx.ModelProto:
    """A decoder whose present keys and values are longer than the past ones, by dynamic axes that it declares."""
    caches = {
        which: ", ".join(f"float[1,{HEADS},{which},{SIZE}] {which}_{n}{k}" for k in (0, 1) for n in "kv")
        for which in ("past", "present")
    }
    layers = "".join(
        f"""["to_q.{k}"] q{k} = MatMul({x}, wq) ["to_k.{k}"] k{k} = MatMul({x}, wk) ["to_v.{k}"] v{k} = MatMul({x}, wv)
        ["attention.{k}"] r{k}, present_k{k}, present_v{k}
            = com.microsoft.GroupQueryAttention<num_heads = {HEADS}, kv_num_heads = {HEADS}>
            (q{k}, k{k}, v{k}, past_k{k}, past_v{k}, lengths, total)"""
        for k, x in enumerate(("x", "r0"))
    )
    graph = f"""(float[1,length,{CHANNELS}] x, int32[1] lengths, int32 total, {caches["past"]})
        => (float[1,length,16] y, {caches["present"]}) {{ {layers} ["behind"] y = MatMul(r1, w2) }}"""
    return text(graph, *(weight(f"w{n}", CHANNELS, CHANNELS) for n in "qkv"), weight("w2", CHANNELS, 16))


def growing_cache_feed(past: int, length: int) -> dict[str, np.ndarray]:
    """What ``growing_cache`` reads with a cache of ``past`` positions and ``length`` new ones."""
    rng = np.random.default_rng(0)
    shapes = {f"past_{n}{k}": (1, HEADS, past, SIZE) for k in (0, 1) for n in "kv"} | {"x": (1, length, CHANNELS)}
    total = past + length
    return {
        "lengths": np.array([total - 1], np.int32),
        "total": np.array(total, np.int32),
        **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
    }


def embedding() -> onnx.ModelProto:
    graph = f"""(int32[batch,{LENGTH}] ids) => (float[] y) {{
        ["middle"] r, mask = com.microsoft.EmbedLayerNormalization(ids, , words, places, , g, b)
        ["behind"] y = MatMul(r, w2) }}"""
    tables = weight("words", 50, CHANNELS), weight("places", LENGTH, CHANNELS), weight("w2", CHANNELS, 16)
    return text(graph, *tables, *scales("g", "b"))


def convolution() -> onnx.ModelProto:
    graph = """(float[batch,3,8,8] x) => (float[] y) {
        ["middle"] r = com.microsoft.FusedConv<activation = "Relu", pads = [1, 1, 1, 1]>(x, w, b)
        ["behind"] y = Conv(r, w2) }"""
    return text(graph, weight("w", 6, 3, 3, 3), weight("b", 6), weight("w2", 4, 6, 1, 1))


def four_bits() -> onnx.ModelProto:
    packed = np.random.default_rng(0).integers(0, 256, (CHANNELS, CHANNELS // 32, 16))
    attributes = f"K = {CHANNELS}, N = {CHANNELS}, bits = 4, block_size = 32"
    return between_products(
        f"com.microsoft.MatMulNBits<{attributes}>(h, packed, s)",
        constant("packed", packed, np.uint8),
        constant("s", [0.02] * CHANNELS),
    )


def of_operator(name: str, inputs: str, *constants: str) -> Callable[[], onnx.ModelProto]:
    return lambda: between_products(f"com.microsoft.{name}({inputs})", *scales(*constants))


BUILDERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "Attention": lambda: between_products(
        f"com.microsoft.Attention<num_heads = {HEADS}>(h, wa, ba)",
        weight("wa", CHANNELS, 3 * CHANNELS),
        constant("ba", np.zeros(3 * CHANNELS)),
    ),
    "MultiHeadAttention": lambda: attention(
        f"com.microsoft.MultiHeadAttention<num_heads = {HEADS}, scale = 0.35>(q, k, v)"
    ),
    "GroupQueryAttention": lambda: grouped_query(["past_k", "past_v"]),
    "GroupQueryAttention without a cache": lambda: grouped_query(["", ""]),
    "RotaryEmbedding": lambda: between_products(
        f"com.microsoft.RotaryEmbedding<num_heads = {HEADS}>(h, places, cos, sin)",
        constant("places", [0], np.int64),
        *angles(),
    ),
    "EmbedLayerNormalization": embedding,
    "SkipLayerNormalization": of_operator("SkipLayerNormalization", "h, x, g, b, c", *"gbc"),
    "SkipSimplifiedLayerNormalization": lambda: between_products(
        "com.microsoft.SkipSimplifiedLayerNormalization(h, x, g)", *scales("g"), result="n, , , r"
    ),
    "SimplifiedLayerNormalization": lambda: between_products(
        "SimplifiedLayerNormalization<axis = -1>(h, g)", *scales("g")
    ),
    "LayerNormalization of opset 14": lambda: between_products(
        "LayerNormalization(h, g, b)", *scales("g", "b"), opset=14
    ),
    "FusedMatMul": lambda: between_products(
        "com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(h, wt)", weight("wt", 24, CHANNELS), width=24
    ),
    "FusedConv": convolution,
    "BiasGelu": of_operator("BiasGelu", "h, b", "b"),
    "FastGelu": of_operator("FastGelu", "h, b", "b"),
    "FastGelu without a bias": of_operator("FastGelu", "h"),
    "Gelu": of_operator("Gelu", "h"),
    "QuickGelu": lambda: between_products("com.microsoft.QuickGelu<alpha = 1.702>(h)"),
    "MatMulNBits": four_bits,
}
"""Name -> a model around one operator that ONNX does not define, and that ONNX Runtime's CPU provider runs in FP32."""

LAYER = """
    q_# = MatMul(x#, wq#) q# = Add(q_#, bq#) qs# = Reshape(q#, split) qh# = Transpose<perm = [0, 2, 1, 3]>(qs#)
    k_# = MatMul(x#, wk#) k# = Add(k_#, bk#) ks# = Reshape(k#, split) kh# = Transpose<perm = [0, 2, 3, 1]>(ks#)
    v_# = MatMul(x#, wv#) v# = Add(v_#, bv#) vs# = Reshape(v#, split) vh# = Transpose<perm = [0, 2, 1, 3]>(vs#)
    scores# = MatMul(qh#, kh#) scaled# = Div(scores#, root) shares# = Softmax<axis = -1>(scaled#)
    read# = MatMul(shares#, vh#) back# = Transpose<perm = [0, 2, 1, 3]>(read#) joined# = Reshape(back#, whole)
    o_# = MatMul(joined#, wo#) o# = Add(o_#, bo#) s# = Add(o#, x#) n# = LayerNormalization<epsilon = 1e-5>(s#, g, b)
    u_# = MatMul(n#, wu#) u# = Add(u_#, bu#) divided# = Div(u#, two) erf# = Erf(divided#) shifted# = Add(erf#, one)
    gated# = Mul(u#, shifted#) gelu# = Mul(gated#, half) d_# = MatMul(gelu#, wd#) d# = Add(d_#, bd#)
    t# = Add(d#, n#) x#1 = LayerNormalization<epsilon = 1e-5>(t#, g, b)
"""


def transformer(layers: int = 2) -> onnx.ModelProto:
    """A post-norm transformer encoder as exporters write it: residuals, GELU in pieces, LayerNormalization."""
    suffixes = ["1" * k for k in range(layers)]
    graph = f"""(float[batch,length,{CHANNELS}] x) => (float[batch,length,10] y) <
        int64[4] split = {{0, 0, {HEADS}, {SIZE}}}, int64[3] whole = {{0, 0, {CHANNELS}}}, float root = {{{SIZE**0.5}}},
        float two = {{{2**0.5}}}, float one = {{1}}, float half = {{0.5}}> {{
        {"".join(LAYER.replace("#", suffix) for suffix in suffixes)}
        y_ = MatMul(x{"1" * layers}, wy) y = Add(y_, by) }}"""
    wide = 4 * CHANNELS
    shapes = {"u": (CHANNELS, wide), "d": (wide, CHANNELS)}
    constants = [weight("wy", CHANNELS, 10), weight("by", 10), *scales("g", "b")]
    for suffix in suffixes:
        for name in "qkvoud":
            rows, columns = shapes.get(name, (CHANNELS, CHANNELS))
            constants += [weight(f"w{name}{suffix}", rows, columns), weight(f"b{name}{suffix}", columns)]
    return text(graph, *constants)


def optimised(model: onnx.ModelProto, folder: Path) -> Path:
    """The model as ONNX Runtime's own optimiser writes it, at its extended level."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    path = folder / "optimised.onnx"
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return path
