"""Indivisible patterns, each as exporters write it. All names are taken away: structure alone must do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.graph.grouping.patterns import Pattern, find_patterns
from mptune.graph.loading.model import Model, load_model
from tests.graph import models
from tests.graph.models import constant, node, value, weight

Nodes = list[onnx.NodeProto]


def found(
    nodes: Sequence[onnx.NodeProto], folder: Path, *, inputs: object = None, outputs: object = None, opset: int = 17
) -> tuple[Model, list[Pattern]]:
    """Load nodes that read ``x`` (2 x 6 x 8) and the constants below, without names; and find their patterns."""
    for proto in nodes:
        proto.name = ""
    constants = [
        *(constant(f"c{v:g}", v) for v in (0.0, 0.5, 1.0, 2.0, 3.0, 6.0, -0.5, 1e-5, 0.044715, 0.7978846, 1.4142135)),
        *(constant(name, np.linspace(0.5, 1.5, 8)) for name in ("gamma", "beta", "bias")),
        *(weight(f"w{k}", 8, 8) for k in range(5)),
        constant("last", [-1], np.int64),
        constant("heads", [2, 6, 2, 4], np.int64),
        constant("whole", [2, 6, 8], np.int64),
        constant("mask", np.triu(np.full((6, 6), -1e4), 1)),
    ]
    proto = models.model(
        nodes,
        inputs or [value("x", [2, 6, 8])],  # type: ignore[arg-type]
        outputs or [value("y", None)],  # type: ignore[arg-type]
        constants,
        opset,
    )
    model = load_model(models.save(proto, folder))
    return model, list(find_patterns(model))


def ops(model: Model, pattern: Pattern) -> list[str]:
    return [model.nodes[i].op_type for i in pattern.nodes]


def product(source: str, k: int, result: str) -> onnx.NodeProto:
    return node("MatMul", [source, f"w{k}"], result)


MEAN = {"axes": [-1]}
NORMS: dict[str, tuple[str, Nodes]] = {
    "layer norm, opset 13": (
        "LayerNorm written out",
        [
            node("ReduceMean", ["a"], "m", **MEAN), node("Sub", ["a", "m"], "d"), node("Pow", ["d", "c2"], "s"),
            node("ReduceMean", ["s"], "v", **MEAN), node("Add", ["v", "c1e-05"], "e"), node("Sqrt", ["e"], "r"),
            node("Div", ["d", "r"], "n"), node("Mul", ["n", "gamma"], "g"), node("Add", ["g", "beta"], "b"),
        ],
    ),
    "layer norm with x.float() around, and a reciprocal": (
        "LayerNorm written out",
        [
            node("Cast", ["a"], "f", to=TensorProto.FLOAT),
            node("ReduceMean", ["f"], "m", **MEAN), node("Sub", ["f", "m"], "d"), node("Mul", ["d", "d"], "s"),
            node("ReduceMean", ["s"], "v", **MEAN), node("Add", ["v", "c1e-05"], "e"), node("Sqrt", ["e"], "r"),
            node("Reciprocal", ["r"], "i"), node("Mul", ["d", "i"], "n"),
            node("Cast", ["n"], "h", to=TensorProto.FLOAT),
            node("Mul", ["h", "gamma"], "g"), node("Add", ["g", "beta"], "b"),
        ],
    ),
    "layer norm as TensorFlow batch-normalises": (
        "LayerNorm written out",
        [
            node("ReduceMean", ["a"], "m", **MEAN), node("Sub", ["a", "m"], "d"), node("Mul", ["d", "d"], "s"),
            node("ReduceMean", ["s"], "v", **MEAN), node("Add", ["v", "c1e-05"], "e"), node("Sqrt", ["e"], "r"),
            node("Reciprocal", ["r"], "i"), node("Mul", ["i", "gamma"], "k"), node("Mul", ["a", "k"], "p"),
            node("Mul", ["m", "k"], "q"), node("Sub", ["beta", "q"], "t"), node("Add", ["p", "t"], "b"),
        ],
    ),
    "variance as difference of means": (
        "LayerNorm written out",
        [
            node("ReduceMean", ["a"], "m", **MEAN), node("Mul", ["a", "a"], "s"),
            node("ReduceMean", ["s"], "v2", **MEAN),
            node("Mul", ["m", "m"], "mm"), node("Sub", ["v2", "mm"], "v"), node("Add", ["v", "c1e-05"], "e"),
            node("Sqrt", ["e"], "r"), node("Sub", ["a", "m"], "d"), node("Div", ["d", "r"], "n"),
            node("Mul", ["n", "gamma"], "b"),
        ],
    ),
    "RMSNorm": (
        "RMSNorm written out",
        [
            node("Pow", ["a", "c2"], "s"), node("ReduceMean", ["s"], "v", **MEAN), node("Add", ["v", "c1e-05"], "e"),
            node("Sqrt", ["e"], "r"), node("Div", ["c1", "r"], "i"), node("Mul", ["a", "i"], "n"),
            node("Mul", ["gamma", "n"], "b"),
        ],
    ),
    "RMSNorm by a negative power": (
        "RMSNorm written out",
        [
            node("Mul", ["a", "a"], "s"), node("ReduceMean", ["s"], "v", **MEAN), node("Add", ["v", "c1e-05"], "e"),
            node("Pow", ["e", "c-0.5"], "r"), node("Mul", ["a", "r"], "n"), node("Mul", ["n", "gamma"], "b"),
        ],
    ),
    "RMSNorm by the sum of squares": (
        "RMSNorm written out",
        [
            node("ReduceSumSquare", ["a"], "s", **MEAN), node("Div", ["s", "c6"], "v"),
            node("Add", ["v", "c1e-05"], "e"),
            node("Sqrt", ["e"], "r"), node("Div", ["a", "r"], "b"),
        ],
    ),
    "L2 norm": (
        "L2 norm written out",
        [
            node("ReduceL2", ["a"], "l", **MEAN), node("Max", ["l", "c1e-05"], "e"), node("Shape", ["a"], "shape"),
            node("Expand", ["e", "shape"], "r"), node("Div", ["a", "r"], "b"),
        ],
    ),
    "instance norm between reshapes": (
        "InstanceNormalization with its scale and shift",
        [
            node("InstanceNormalization", ["a", "six", "six"], "i"), node("Reshape", ["i", "whole"], "n"),
            node("Mul", ["n", "gamma"], "g"), node("Add", ["g", "beta"], "b"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_is_whole(case: str, tmp_path: Path) -> None:
    """From the first node of the norm to its shift; what stands before and the residual after are not in it."""
    name, nodes = NORMS[case]
    if "six" in nodes[0].input:
        nodes = [node("Slice", ["gamma", "zero", "to6"], "six"), *nodes]
        nodes.insert(0, node("Constant", [], "zero", value_ints=[0]))
        nodes.insert(0, node("Constant", [], "to6", value_ints=[6]))
    before = product("x", 0, "a")
    after = [node("Add", ["b", "a"], "z"), product("z", 1, "y")]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    model, patterns = found([before, *copies, *after], tmp_path, opset=13)
    norms = [p for p in patterns if p.kind == "norm"]
    assert [p.name for p in norms] == [name]
    expected = sorted(n.op_type for n in nodes if n.op_type not in ("Shape", "Constant", "Slice"))
    assert sorted(ops(model, norms[0])) == expected
    assert (norms[0].squares != "") == ("InstanceNormalization" not in name)


def test_a_standard_deviation_alone_is_no_norm(tmp_path: Path) -> None:
    nodes = [
        node("Mul", ["x", "x"], "s"), node("ReduceMean", ["s"], "v", **MEAN), node("Sqrt", ["v"], "r"),
        node("MatMul", ["q", "w0"], "y"), node("Expand", ["r", "whole"], "q"),
    ]  # fmt: skip
    assert found(nodes, tmp_path)[1] == []


GELU = [
    node("Div", ["a", "c1.41421"], "u"), node("Erf", ["u"], "f"), node("Add", ["f", "c1"], "o"),
    node("Mul", ["a", "o"], "p"), node("Mul", ["p", "c0.5"], "b"),
]  # fmt: skip
ACTIVATIONS: dict[str, tuple[str, Nodes]] = {
    "GELU": ("GELU written out", GELU),
    "GELU, x halved first": (
        "GELU written out",
        [
            node("Mul", ["a", "c0.5"], "half"), node("Div", ["a", "c1.41421"], "u"), node("Erf", ["u"], "f"),
            node("Add", ["f", "c1"], "o"), node("Mul", ["half", "o"], "b"),
        ],
    ),
    "GELU, tanh": (
        "GELU (tanh) written out",
        [
            node("Pow", ["a", "c3"], "cube"), node("Mul", ["cube", "c0.044715"], "k"), node("Add", ["a", "k"], "s"),
            node("Mul", ["s", "c0.797885"], "u"), node("Tanh", ["u"], "t"), node("Add", ["t", "c1"], "o"),
            node("Mul", ["a", "o"], "p"), node("Mul", ["p", "c0.5"], "b"),
        ],
    ),
    "GELU, tanh, the cube by products": (
        "GELU (tanh) written out",
        [
            node("Mul", ["a", "a"], "sq"), node("Mul", ["sq", "a"], "cube"), node("Mul", ["c0.044715", "cube"], "k"),
            node("Add", ["k", "a"], "s"), node("Mul", ["s", "c0.797885"], "u"), node("Tanh", ["u"], "t"),
            node("Add", ["c1", "t"], "o"), node("Mul", ["a", "c0.5"], "half"), node("Mul", ["half", "o"], "b"),
        ],
    ),
    "SiLU": ("SiLU written out", [node("Sigmoid", ["a"], "s"), node("Mul", ["a", "s"], "b")]),
    "quick GELU": (
        "SiLU written out",
        [node("Mul", ["a", "c1.41421"], "u"), node("Sigmoid", ["u"], "s"), node("Mul", ["s", "a"], "b")],
    ),
    "Mish": (
        "Mish written out",
        [node("Softplus", ["a"], "s"), node("Tanh", ["s"], "t"), node("Mul", ["a", "t"], "b")],
    ),
    "hard swish by Clip": (
        "hard swish written out",
        [
            node("Add", ["a", "c3"], "p"), node("Clip", ["p", "c0", "c6"], "q"), node("Mul", ["a", "q"], "r"),
            node("Div", ["r", "c6"], "b"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_an_activation_is_whole_and_belongs_to_its_layer(case: str, tmp_path: Path) -> None:
    name, nodes = ACTIVATIONS[case]
    _, patterns = found(
        [node("Concat", ["x", "x"], "a0", axis=2), node("Slice", ["a0", "one", "eight", "last"], "a"), *nodes,
         node("Constant", [], "one", value_ints=[0]), node("Constant", [], "eight", value_ints=[8]),
         node("Add", ["b", "a"], "z"), product("z", 1, "y")],
        tmp_path,
    )  # fmt: skip
    assert [(p.kind, p.name) for p in patterns] == [("activation", name)], "with a residual beside it"
    assert len(patterns[0].nodes) == len(nodes)
    layer = [product("x", 0, "m"), node("Add", ["m", "bias"], "a"), *nodes, product("b", 1, "y")]
    _, patterns = found(layer, tmp_path)
    assert [p.name for p in patterns] == ["matrix product with its bias and activation"]
    assert len(patterns[0].nodes) == len(nodes) + 2


def test_a_gate_is_no_activation(tmp_path: Path) -> None:
    """Squeeze and excite, and gated linear units: the sigmoid is of something else than what it scales."""
    nodes = [product("x", 0, "a"), product("x", 1, "g"), node("Sigmoid", ["g"], "s"), node("Mul", ["a", "s"], "y")]
    _, patterns = found(nodes, tmp_path)
    assert [p.name for p in patterns] == ["matrix product with its activation"]


def test_what_others_read_too_ends_a_layer(tmp_path: Path) -> None:
    nodes = [
        product("x", 0, "m"),
        node("Add", ["m", "bias"], "a"),
        node("Relu", ["a"], "r"),
        node("Add", ["r", "a"], "y"),
    ]
    model, (pattern,) = found(nodes, tmp_path)
    assert ops(model, pattern) == ["MatMul", "Add"]
    outputs = [value("m", None), value("y", None)]
    assert found([product("x", 0, "m"), node("Relu", ["m"], "y")], tmp_path, outputs=outputs)[1] == []


def test_an_identity_before_a_shared_weight_hides_nothing(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["w0"], "shared"), node("Identity", ["bias"], "shared_bias"),
        node("MatMul", ["x", "w0"], "a"), node("Add", ["a", "bias"], "b"),
        node("MatMul", ["b", "shared"], "c"), node("Add", ["c", "shared_bias"], "y"),
    ]  # fmt: skip
    _, patterns = found(nodes, tmp_path)
    assert [p.name for p in patterns] == ["matrix product with its bias"] * 2


def heads(source: str, name: str, perm: Sequence[int] = (0, 2, 1, 3)) -> Nodes:
    return [
        node("Reshape", [source, "heads"], f"{name}_r"), node("Transpose", [f"{name}_r"], name, perm=list(perm)),
    ]  # fmt: skip


def core(between: Nodes, last: str, k: str = "kt", v: str = "v") -> Nodes:
    """Scores of q and k, what stands between, softmax, values; 2 heads of 4."""
    return [
        product("x", 0, "q0"), product("x", 1, "k0"), product("x", 2, "v0"),
        *heads("q0", "q"), *heads("k0", "kt", (0, 2, 3, 1)), *heads("v0", "v"),
        node("MatMul", ["q", k], "scores"), *between, node("Softmax", [last], "p", axis=-1),
        node("MatMul", ["p", v], "o"), node("Transpose", ["o"], "ot", perm=[0, 2, 1, 3]),
        node("Reshape", ["ot", "whole"], "om"), product("om", 3, "y"),
    ]  # fmt: skip


CORES: dict[str, tuple[Nodes, str, list[str]]] = {
    "plain": ([], "scores", ["MatMul", "Softmax", "MatMul"]),
    "scale and constant mask": (
        [node("Mul", ["scores", "c0.5"], "s"), node("Add", ["s", "mask"], "t")], "t",
        ["MatMul", "Mul", "Add", "Softmax", "MatMul"],
    ),
    "soft cap": (
        [node("Div", ["scores", "c6"], "s"), node("Tanh", ["s"], "t"), node("Mul", ["t", "c6"], "u")], "u",
        ["MatMul", "Div", "Tanh", "Mul", "Softmax", "MatMul"],
    ),
    "softmax in FP32 by a Cast": (
        [node("Cast", ["scores"], "s", to=TensorProto.FLOAT)], "s", ["MatMul", "Cast", "Softmax", "MatMul"],
    ),
    "position bias from a weighted layer": (
        [product("x", 4, "b0"), node("ReduceMean", ["b0"], "b1", axes=[0, 2]), node("Add", ["scores", "b1"], "t")], "t",
        ["MatMul", "Add", "Softmax", "MatMul"],
    ),
    "scores as a sum of two products": (
        [node("MatMul", ["q", "kt"], "more"), node("Add", ["scores", "more"], "t")], "t",
        ["MatMul", "MatMul", "Add", "Softmax", "MatMul"],
    ),
    "windows: a view, a shift mask, a view back": (
        [
            node("Constant", [], "to5", value_ints=[2, 1, 2, 6, 6]),
            node("Constant", [], "to4", value_ints=[2, 2, 6, 6]),
            node("Reshape", ["scores", "to5"], "s"), node("Add", ["s", "mask"], "t"),
            node("Reshape", ["t", "to4"], "u"),
        ], "u", ["MatMul", "Reshape", "Add", "Reshape", "Softmax", "MatMul"],
    ),
    "a softmax that is guarded against rows without keys": (
        [], "scores", ["MatMul", "Softmax", "IsNaN", "Where", "MatMul"],
    ),
    "a softmax written out": ([], "scores", ["MatMul", "ReduceMax", "Sub", "Exp", "ReduceSum", "Div", "MatMul"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CORES)
def test_an_attention_core_is_whole(case: str, tmp_path: Path) -> None:
    between, last, expected = CORES[case]
    nodes = core(between, last)
    if "guarded" in case:
        at = next(k for k, n in enumerate(nodes) if n.op_type == "Softmax") + 1
        nodes[at : at + 1] = [
            node("IsNaN", ["p"], "bad"), node("Where", ["bad", "c0", "p"], "safe"), node("MatMul", ["safe", "v"], "o"),
        ]  # fmt: skip
    if "written out" in case:
        at = next(k for k, n in enumerate(nodes) if n.op_type == "Softmax")
        nodes[at : at + 1] = [
            node("ReduceMax", ["scores"], "mx", axes=[-1]), node("Sub", ["scores", "mx"], "sh"),
            node("Exp", ["sh"], "ex"),
            node("ReduceSum", ["ex", "last"], "su"), node("Div", ["ex", "su"], "p"),
        ]  # fmt: skip
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    model, patterns = found(copies, tmp_path)
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert sorted(ops(model, pattern)) == sorted(expected)
    assert pattern.name == "attention core"


def test_grouped_queries_and_einsum(tmp_path: Path) -> None:
    """Keys and values stretched over heads by Expand; products by Einsum, the projections too."""
    nodes = [
        node("Einsum", ["x", "w0"], "q0", equation="bnc,cd->bnd"), product("x", 1, "k0"), product("x", 2, "v0"),
        *heads("q0", "q"),
        node("Constant", [], "narrow", value_ints=[2, 6, 1, 8]), node("Constant", [], "wide", value_ints=[2, 6, 2, 8]),
        node("Reshape", ["k0", "narrow"], "k1"), node("Expand", ["k1", "wide"], "k2"),
        node("Constant", [], "cut", value_ints=[2, 12, 2, 4]), node("Reshape", ["k2", "cut"], "k"),
        node("Reshape", ["v0", "narrow"], "v1"), node("Expand", ["v1", "wide"], "v2"),
        node("Reshape", ["v2", "cut"], "v"),
        node("Einsum", ["q", "k"], "s", equation="bhnd,bmhd->bhnm"), node("Mul", ["s", "c0.5"], "t"),
        node("Softmax", ["t"], "p", axis=-1), node("Einsum", ["p", "v"], "y", equation="bhnm,bmhd->bnhd"),
    ]  # fmt: skip
    model, patterns = found(nodes, tmp_path)
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert ops(model, pattern) == ["Einsum", "Mul", "Softmax", "Einsum"]


def test_weights_that_are_looked_at_too_stay_a_core(tmp_path: Path) -> None:
    """need_weights=True: the mean over heads leaves the model, and is not part of the core."""
    nodes = [*core([], "scores"), node("ReduceMean", ["p"], "seen", axes=[1])]
    model, patterns = found(nodes, tmp_path, outputs=[value("y", None), value("seen", None)])
    (pattern,) = (p for p in patterns if p.kind == "attention")
    assert ops(model, pattern) == ["MatMul", "Softmax", "MatMul"]


def test_a_classifier_in_the_middle_is_no_attention(tmp_path: Path) -> None:
    """Gemm, Softmax, Gemm: the product before the softmax is a weighted layer."""
    nodes = [
        node("Gemm", ["x", "w0", "bias"], "a"), node("Mul", ["a", "c0.5"], "s"), node("Softmax", ["s"], "p", axis=-1),
        node("Gemm", ["p", "w1", "bias"], "y"),
    ]  # fmt: skip
    model, patterns = found(nodes, tmp_path, inputs=[value("x", [6, 8])])
    assert [(p.kind, ops(model, p)) for p in patterns] == [("softmax", ["Mul", "Softmax"])]


def test_patterns_never_overlap(tmp_path: Path) -> None:
    for path in sorted((Path(__file__).parents[1] / "exported").glob("*.onnx")):
        patterns = find_patterns(load_model(path))
        indices = [i for p in patterns for i in p.nodes]
        assert len(indices) == len(set(indices))
        assert all(p.anchor in p.nodes for p in patterns)
        assert [p.anchor for p in patterns] == sorted(p.anchor for p in patterns)
