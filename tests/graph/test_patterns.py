"""Indivisible patterns, each as exporters write it, without names: structure alone must do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.loading.model import Model, load_model
from mptune.graph.patterns import Pattern, find_patterns
from tests.graph import models
from tests.graph.models import constant, text, weight

NUMBERS = {
    "zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "six": 6.0, "minus_half": -0.5, "eps": 1e-5,
    "cubic": 0.044715, "root_pi": 0.7978846, "root2": 1.4142135,
}  # fmt: skip
CONSTANTS = [
    *(constant(name, number) for name, number in NUMBERS.items()),
    *(constant(name, np.linspace(0.5, 1.5, 8)) for name in ("gamma", "beta", "bias")),
    *(weight(f"w{k}", 8, 8) for k in range(5)),
    constant("last", [-1], np.int64),
    constant("heads", [2, 6, 2, 4], np.int64),
    constant("whole", [2, 6, 8], np.int64),
    constant("mask", np.triu(np.full((6, 6), -1e4), 1)),
]


def patterns_of(
    nodes: str, folder: Path, inputs: str = "float[2,6,8] x", outputs: str = "float[] y", opset: int = 17
) -> tuple[Model, list[Pattern]]:
    """Load nodes that read ``x`` and the constants above, and find their patterns."""
    proto = text(f"({inputs}) => ({outputs}) {{ {nodes} }}", *CONSTANTS, opset=opset)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    model = load_model(models.save(proto, folder))
    return model, list(find_patterns(model))


def ops(model: Model, pattern: Pattern) -> list[str]:
    return [model.nodes[i].op_type for i in pattern.nodes]


MEAN = "ReduceMean<axes = [-1]>"
NORMS = {
    "layer norm, opset 13": (
        "LayerNorm written out",
        f"m = {MEAN}(a) d = Sub(a, m) s = Pow(d, two) v = {MEAN}(s) e = Add(v, eps) r = Sqrt(e)"
        " n = Div(d, r) g = Mul(n, gamma) b = Add(g, beta)",
    ),
    "layer norm with x.float() around, and a reciprocal": (
        "LayerNorm written out",
        f"f = Cast<to = 1>(a) m = {MEAN}(f) d = Sub(f, m) s = Mul(d, d) v = {MEAN}(s) e = Add(v, eps) r = Sqrt(e)"
        " i = Reciprocal(r) n = Mul(d, i) h = Cast<to = 1>(n) g = Mul(h, gamma) b = Add(g, beta)",
    ),
    "layer norm as TensorFlow batch-normalises": (
        "LayerNorm written out",
        f"m = {MEAN}(a) d = Sub(a, m) s = Mul(d, d) v = {MEAN}(s) e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r)"
        " k = Mul(i, gamma) p = Mul(a, k) q = Mul(m, k) t = Sub(beta, q) b = Add(p, t)",
    ),
    "RMSNorm": (
        "RMSNorm written out",
        f"s = Pow(a, two) v = {MEAN}(s) e = Add(v, eps) r = Sqrt(e) i = Div(one, r) n = Mul(a, i) b = Mul(gamma, n)",
    ),
    "RMSNorm by the sum of squares": (
        "RMSNorm written out",
        "s = ReduceSumSquare<axes = [-1]>(a) v = Div(s, six) e = Add(v, eps) r = Sqrt(e) b = Div(a, r)",
    ),
    "L2 norm": (
        "L2 norm written out",
        "i = Identity(a) l = ReduceL2<axes = [-1]>(i) e = Max(l, eps)"
        " shape = Shape(a) r = Expand(e, shape) b = Div(a, r)",
    ),
    "instance norm between reshapes": (
        "InstanceNormalization with its scale and shift",
        "to6 = Constant<value_ints = [6]>() start = Constant<value_ints = [0]>() six_ones = Slice(gamma, start, to6)"
        " i = InstanceNormalization(a, six_ones, six_ones) n = Reshape(i, whole) g = Mul(n, gamma) b = Add(g, beta)",
    ),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_is_whole(case: str, tmp_path: Path) -> None:
    """From the first node of the norm to its shift; what stands before and the residual after are not in it."""
    name, nodes = NORMS[case]
    whole = f"a = MatMul(x, w0) {nodes} z = Add(b, a) y = MatMul(z, w1)"
    model, patterns = patterns_of(whole, tmp_path, opset=13)
    norms = [p for p in patterns if p.kind == "norm"]
    assert [p.name for p in norms] == [name]
    outside = {"a", "z", "y", "shape", "to6", "start", "six_ones"}
    assert {model.nodes[i].outputs[0] for i in norms[0].nodes} == {n.outputs[0] for n in model.nodes} - outside
    assert (norms[0].squares != "") == ("InstanceNormalization" not in name)


def test_a_standard_deviation_alone_is_no_norm(tmp_path: Path) -> None:
    nodes = f"s = Mul(x, x) v = {MEAN}(s) r = Sqrt(v) y = MatMul(q, w0) q = Expand(r, whole)"
    assert patterns_of(nodes, tmp_path)[1] == []


ACTIVATIONS = {
    "GELU": "u = Div(a, root2) f = Erf(u) o = Add(f, one) p = Mul(a, o) b = Mul(p, half)",
    "GELU, x halved first": "h = Mul(a, half) u = Div(a, root2) f = Erf(u) o = Add(f, one) b = Mul(h, o)",
    "GELU, tanh": (
        "cube = Pow(a, three) k = Mul(cube, cubic) s = Add(a, k) u = Mul(s, root_pi) t = Tanh(u) o = Add(t, one)"
        " p = Mul(a, o) b = Mul(p, half)"
    ),
    "SiLU": "s = Sigmoid(a) b = Mul(a, s)",
    "Mish": "s = Softplus(a) t = Tanh(s) b = Mul(a, t)",
    "hard swish by Clip": "p = Add(a, three) q = Clip(p, zero, six) r = Mul(a, q) b = Div(r, six)",
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_an_activation_is_whole_and_belongs_to_its_layer(case: str, tmp_path: Path) -> None:
    nodes = ACTIVATIONS[case]
    count = nodes.count("=")
    alone = f"""
        a0 = Concat<axis = 2>(x, x) start = Constant<value_ints = [0]>() end = Constant<value_ints = [8]>()
        a = Slice(a0, start, end, last) {nodes} z = Add(b, a) y = MatMul(z, w1)
    """
    _, patterns = patterns_of(alone, tmp_path)
    assert [(p.kind, len(p.nodes)) for p in patterns] == [("activation", count)], "a residual beside it"
    _, patterns = patterns_of(f"m = MatMul(x, w0) a = Add(m, bias) {nodes} y = MatMul(b, w1)", tmp_path)
    assert [p.kind for p in patterns] == ["matmul"]
    assert len(patterns[0].nodes) == count + 2


def test_where_a_layer_ends(tmp_path: Path) -> None:
    """At a gate, whose sigmoid is of something else than what it scales; at what others read, too, or is an output."""
    model, (pattern,) = patterns_of("a = MatMul(x, w0) g = MatMul(x, w1) s = Sigmoid(g) y = Mul(a, s)", tmp_path)
    assert ops(model, pattern) == ["MatMul", "Sigmoid"]
    model, (pattern,) = patterns_of("m = MatMul(x, w0) a = Add(m, bias) r = Relu(a) y = Add(r, a)", tmp_path)
    assert ops(model, pattern) == ["MatMul", "Add"]
    assert patterns_of("m = MatMul(x, w0) y = Relu(m)", tmp_path, outputs="float[] m, float[] y")[1] == []


CORE = """
    q0 = MatMul(x, w0) k0 = MatMul(x, w1) v0 = MatMul(x, w2)
    q_r = Reshape(q0, heads) q = Transpose<perm = [0, 2, 1, 3]>(q_r)
    k_r = Reshape(k0, heads) kt = Transpose<perm = [0, 2, 3, 1]>(k_r)
    v_r = Reshape(v0, heads) v = Transpose<perm = [0, 2, 1, 3]>(v_r)
    scores = MatMul(q, kt) {} o = MatMul(p, v)
    ot = Transpose<perm = [0, 2, 1, 3]>(o) om = Reshape(ot, whole) y = MatMul(om, w3)
"""
SOFTMAX = "p = Softmax<axis = -1>"
CORES = {
    "plain": (f"{SOFTMAX}(scores)", "Softmax"),
    "scale and constant mask": (f"s = Mul(scores, half) t = Add(s, mask) {SOFTMAX}(t)", "Mul Add Softmax"),
    "soft cap": (
        f"s = Div(scores, six) t = Tanh(s) u = Mul(t, six) {SOFTMAX}(u)",
        "Div Tanh Mul Softmax",
    ),
    "softmax in FP32 by a Cast": (f"s = Cast<to = 1>(scores) {SOFTMAX}(s)", "Cast Softmax"),
    "position bias from a weighted layer": (
        f"b0 = MatMul(x, w4) b1 = ReduceMean<axes = [0, 2]>(b0) t = Add(scores, b1) {SOFTMAX}(t)",
        "Add Softmax",
    ),
    "windows: a view, a shift mask, a view back": (
        "to5 = Constant<value_ints = [2, 1, 2, 6, 6]>() to4 = Constant<value_ints = [2, 2, 6, 6]>()"
        f" s = Reshape(scores, to5) t = Add(s, mask) u = Reshape(t, to4) {SOFTMAX}(u)",
        "Reshape Add Reshape Softmax",
    ),
    "a softmax that is guarded against rows without keys": (
        "soft = Softmax<axis = -1>(scores) bad = IsNaN(soft) p = Where(bad, zero, soft)",
        "Softmax IsNaN Where",
    ),
}


@pytest.mark.parametrize("case", CORES)
def test_an_attention_core_is_whole(case: str, tmp_path: Path) -> None:
    between, expected = CORES[case]
    model, patterns = patterns_of(CORE.format(between), tmp_path)
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert ops(model, pattern) == ["MatMul", *expected.split(), "MatMul"]


def test_grouped_queries_and_einsum(tmp_path: Path) -> None:
    """Keys and values stretched over heads by Expand; products by Einsum, the projections too."""
    nodes = """
        q0 = Einsum<equation = "bnc,cd->bnd">(x, w0) k0 = MatMul(x, w1) v0 = MatMul(x, w2)
        q_r = Reshape(q0, heads) q = Transpose<perm = [0, 2, 1, 3]>(q_r)
        narrow = Constant<value_ints = [2, 6, 1, 8]>() wide = Constant<value_ints = [2, 6, 2, 8]>()
        cut = Constant<value_ints = [2, 12, 2, 4]>()
        k1 = Reshape(k0, narrow) k2 = Expand(k1, wide) k = Reshape(k2, cut)
        v1 = Reshape(v0, narrow) v2 = Expand(v1, wide) v = Reshape(v2, cut)
        s = Einsum<equation = "bhnd,bmhd->bhnm">(q, k) t = Mul(s, half) p = Softmax<axis = -1>(t)
        y = Einsum<equation = "bhnm,bmhd->bnhd">(p, v)
    """
    model, patterns = patterns_of(nodes, tmp_path)
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert ops(model, pattern) == ["Einsum", "Mul", "Softmax", "Einsum"]


def test_what_is_beside_a_core_and_what_is_none(tmp_path: Path) -> None:
    """need_weights=True: the mean over heads leaves the model. Gemm, Softmax, Gemm: the first is a weighted layer."""
    nodes = CORE.format(f"{SOFTMAX}(scores) mean = ReduceMean<axes = [1]>(p)")
    model, patterns = patterns_of(nodes, tmp_path, outputs="float[] y, float[] mean")
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert ops(model, pattern) == ["MatMul", "Softmax", "MatMul"]
    nodes = f"a = Gemm(x, w0, bias) s = Mul(a, half) {SOFTMAX}(s) y = Gemm(p, w1, bias)"
    model, patterns = patterns_of(nodes, tmp_path, inputs="float[6,8] x")
    assert [(p.kind, ops(model, p)) for p in patterns] == [("softmax", ["Mul", "Softmax"])]
