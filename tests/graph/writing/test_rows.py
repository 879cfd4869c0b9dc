"""What the rewriter must survive: one small model for each way in which some converter breaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mptune.graph.writing.weights
from mptune.graph.facts import node_rule
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.settings import Granularity
from tests.graph import models
from tests.graph.helpers import feeds, plans, relative_l2, run
from tests.graph.models import constant, node, value, weight
from tests.graph.verify import typed_graph, value_types, verify

FLOAT, FLOAT16, INT64, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL


class Case:
    """One model, every node its own group unless groups are given."""

    def __init__(self, proto: onnx.ModelProto | Path, folder: Path, granularity: Granularity | None = None) -> None:
        self.path = proto if isinstance(proto, Path) else models.save(proto, folder)
        self.folder = folder / "weights"
        self.model = load_model(self.path)
        self.groups = find_groups(self.model, granularity) if granularity else self._one_per_node()
        self.grouped = GroupedModel(self.model, self.groups)
        bank = WeightBank.write(self.model, self.folder)
        self.rewriter = Rewriter(self.grouped, bank)
        self.emulator = Emulator(self.grouped, bank)

    def _one_per_node(self) -> tuple[LayerGroup, ...]:
        rules = [(n, node_rule(self.model, n)) for n in self.model.nodes]
        free = [n for n, rule in rules if rule.inputs or rule.outputs]
        return tuple(LayerGroup(f"g{n.index}", n.name, "other", (n.name,), {n.op_type: 1}) for n in free)

    def plan(self, *fp16: str) -> PrecisionPlan:
        """The plan whose FP16 nodes are the named ones; no names: all that can be."""
        known = {name for group in self.groups for name in group.nodes}
        assert known >= set(fp16), "names that no group has"
        chosen = {g.id for g in self.groups if not fp16 or set(g.nodes) & set(fp16)}
        return PrecisionPlan(
            self.model.sha256, {g.id: Precision.named("fp16" if g.id in chosen else "fp32") for g in self.groups}
        )

    def typed(self, plan: PrecisionPlan) -> onnx.GraphProto:
        out = self.rewriter.write(plan, self.folder / "typed.onnx")
        verify(self.rewriter, plan, out)
        return typed_graph(out, self.model)

    def holds(self, *, bound: float | None = 2e-2) -> None:
        """Many plans: valid, ideal, and they run, typed and emulated, near what the model gives."""
        feed = feeds(self.model)
        fp32 = PrecisionPlan.uniform(self.model.sha256, [g.id for g in self.groups], Precision.FP32)
        reference = run(self.rewriter.write(fp32, self.folder / "fp32.onnx"), feed)
        for plan in plans(self.model, self.groups, 6):
            self.typed(plan)
            self.emulator.write(plan, self.folder / "emulated.onnx")
            for name in ("typed.onnx", "emulated.onnx"):
                for output, y in run(self.folder / name, feed).items():
                    assert (y.dtype, y.shape) == (reference[output].dtype, reference[output].shape)
                    if bound is not None and y.dtype.kind == "f" and y.size:
                        assert relative_l2(y, reference[output]) < bound, (name, output)


def sequence_of(graph: onnx.GraphProto) -> list[str]:
    return [n.op_type for n in graph.node]


def mlp(nodes: Sequence[onnx.NodeProto], *extra: onnx.TensorProto, outputs: Sequence[str] = ("y",)) -> onnx.ModelProto:
    """``nodes`` from x to y, all [2, 4], with the weight w."""
    return models.model(nodes, [value("x", [2, 4])], [value(o, [2, 4]) for o in outputs], [weight("w", 4, 4), *extra])


def test_row_01_fp32_to_fp32_never_passes_through_fp16(tmp_path: Path) -> None:
    case = Case(
        mlp(
            [
                node("MatMul", ["x", "w"], "a", "one"),
                node("Relu", ["a"], "b", "two"),
                node("MatMul", ["b", "w"], "y", "three"),
            ]
        ),
        tmp_path,
    )
    assert sequence_of(case.typed(case.plan("three"))) == ["MatMul", "Relu", "Cast", "MatMul", "Cast"]
    branch = Case(
        mlp(
            [
                node("Relu", ["x"], "a", "one"),
                node("Neg", ["a"], "b", "two"),
                node("Exp", ["a"], "c", "three"),
                node("Add", ["b", "c"], "y", "four"),
            ]
        ),
        tmp_path,
    )
    graph = branch.typed(branch.plan("two"))
    assert next(n for n in graph.node if n.name == "three").input[0] == "a"
    branch.holds()


def test_row_02_one_cast_for_many_consumers_and_for_two_uses_in_one(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], "a", "one"),
        node("Mul", ["a", "a"], "b", "square"),
        node("Neg", ["a"], "c", "neg"),
        node("Abs", ["a"], "d", "abs"),
        node("Sum", ["b", "c", "d"], "y", "sum"),
    ]
    case = Case(mlp(nodes), tmp_path)
    assert sequence_of(case.typed(case.plan("square", "neg", "abs", "sum"))).count("Cast") == 2
    case.holds()


def test_row_03_unnamed_and_equally_named_nodes(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], "a", "same"),
        node("Neg", ["a"], "b", "same"),
        node("Abs", ["b"], "c"),
        node("Neg", ["c"], "y"),
    ]
    case = Case(mlp(nodes), tmp_path)
    assert [n.name for n in case.model.nodes][:2] == ["same", "same_2"]
    case.holds()


def test_row_03_equally_named_nodes_of_a_subgraph(tmp_path: Path) -> None:
    inner = [node("Neg", ["a"], "n", "same"), node("Abs", ["n"], "t", "same")]
    then = helper.make_graph(inner, "then", [], [value("t", [2, 4])])
    other = helper.make_graph([node("Abs", ["a"], "e", "same")], "else", [], [value("e", [2, 4])])
    nodes = [node("MatMul", ["x", "w"], "a", "product")]
    nodes.append(node("If", ["flag"], "i", "if", then_branch=then, else_branch=other))
    case = Case(mlp([*nodes, node("Relu", ["i"], "y")], constant("flag", True, np.bool_)), tmp_path)
    for graph in (a.g for n in case.typed(case.plan()).node for a in n.attribute if a.HasField("g")):
        names = [n.name for n in graph.node]
        assert len(set(names)) == len(names)


def branches(outer: str) -> dict[str, onnx.GraphProto]:
    return {
        f"{name}_branch": helper.make_graph([node(op, [outer], name, op)], name, [], [value(name, [2, 4])])
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }


def test_row_04_what_a_subgraph_captures_stays_fp32_under_its_name(tmp_path: Path) -> None:
    proto = models.model(
        [
            node("MatMul", ["x", "w"], "outer", "product"),
            node("If", ["c"], "picked", "if", **branches("outer")),
            node("MatMul", ["picked", "w"], "m", "after"),
            node("Add", ["m", "outer"], "y", "add"),
        ],
        [value("x", [2, 4]), value("c", [], BOOL)],
        [value("y", [2, 4])],
        [weight("w", 4, 4)],
    )
    case = Case(proto, tmp_path)
    graph = case.typed(case.plan())
    assert value_types(graph)["outer"] == FLOAT
    assert sequence_of(graph).index("If") > sequence_of(graph).index("MatMul")
    case.holds()


def test_row_04_a_subgraph_that_captures_through_another(tmp_path: Path) -> None:
    inner = helper.make_graph([node("If", ["c"], "t", "inner", **branches("outer"))], "yes", [], [value("t", [2, 4])])
    other = helper.make_graph([node("Identity", ["outer"], "e")], "no", [], [value("e", [2, 4])])
    proto = models.model(
        [
            node("If", ["c"], "picked", "if", then_branch=inner, else_branch=other),
            node("Add", ["picked", "x"], "y", "add"),
            node("Relu", ["x"], "outer", "relu"),
        ],
        [value("x", [2, 4]), value("c", [], BOOL)],
        [value("y", [2, 4])],
    )
    case = Case(proto, tmp_path)
    assert [n.name for n in case.model.nodes] == ["relu", "if", "add"]
    case.holds()


def test_row_05_loop_and_scan_state_stays_fp32(tmp_path: Path) -> None:
    step = [
        node("Mul", ["state", "state"], "squared"),
        node("Tanh", ["squared"], "next"),
        node("Identity", ["go"], "go_on"),
    ]
    state = [value(n, [2, 4]) for n in ("state", "next")]
    flags = [value(n, [], BOOL) for n in ("go", "go_on")]
    body = helper.make_graph(step, "body", [value("i", [], INT64), flags[0], state[0]], [flags[1], state[1]])
    rows = [node("Add", ["total", "row"], "sum"), node("Identity", ["sum"], "out")]
    scan = helper.make_graph(
        rows, "scan", [value("total", [4]), value("row", [4])], [value("sum", [4]), value("out", [4])]
    )
    proto = mlp(
        [
            node("MatMul", ["x", "w"], "h", "before"),
            node("Loop", ["n", "", "h"], "last", "loop", body=body),
            node("Scan", ["zero", "last"], ["total_", "stack"], "scan", body=scan, num_scan_inputs=1),
            node("MatMul", ["stack", "w"], "y", "after"),
        ],
        constant("n", 3, np.int64),
        constant("zero", np.zeros(4)),
    )
    case = Case(proto, tmp_path)
    assert set(case.rewriter.node_precisions(case.plan())) == {"before", "after"}
    case.holds()


def test_row_05_sequences_and_optionals_stay_fp32(tmp_path: Path) -> None:
    proto = mlp(
        [
            node("MatMul", ["x", "w"], "h", "before"),
            node("SplitToSequence", ["h", "two"], "parts", "split", axis=1),
            node("SequenceInsert", ["parts", "h"], "more", "insert"),
            node("ConcatFromSequence", ["more"], "joined", "concat", axis=1),
            node("SequenceConstruct", ["joined", "joined"], "pair", "construct"),
            node("SequenceAt", ["pair", "zero"], "first", "at"),
            node("Optional", ["first"], "box", "box"),
            node("OptionalGetElement", ["box"], "opened", "open"),
            node("MatMul", ["opened", "w2"], "y", "after"),
        ],
        constant("two", 2, np.int64),
        constant("zero", 0, np.int64),
        weight("w2", 8, 4),
    )
    case = Case(proto, tmp_path)
    assert set(case.rewriter.node_precisions(case.plan())) == {"before", "after"}
    case.holds()


def test_row_06_an_initializer_on_both_sides_exists_once_in_each_type(tmp_path: Path) -> None:
    case = Case(mlp([node("MatMul", ["x", "w"], "a", "one"), node("MatMul", ["a", "w"], "y", "two")]), tmp_path)
    graph = case.typed(case.plan("one"))
    assert {i.name: i.data_type for i in graph.initializer} == {"w": FLOAT, "w__fp16": FLOAT16}
    kept = next(i for i in graph.initializer if i.name == "w")
    assert np.array_equal(numpy_helper.to_array(kept), case.model.initializers["w"].numpy()), "never rounded"
    case.holds()


def test_row_07_initializers_that_are_inputs_or_outputs_and_inputs_that_are_outputs(tmp_path: Path) -> None:
    proto = models.model(
        [
            node("MatMul", ["x", "given"], "a", "one"),
            node("Add", ["a", "shown"], "b", "two"),
            node("Mul", ["b", "x"], "y", "three"),
        ],
        [value("x", [2, 4]), value("given", [4, 4])],
        [value("y", [2, 4]), value("shown", [4]), value("x", [2, 4])],
        [weight("given", 4, 4), weight("shown", 4)],
    )
    case = Case(proto, tmp_path)
    assert [i.name for i in case.model.inputs] == ["x"]
    case.holds()
    out = case.rewriter.write(case.plan(), case.folder / "typed.onnx")
    x, other = np.ones((2, 4), np.float32), np.zeros((4, 4), np.float32)
    given = run(out, {"x": x, "given": other})
    assert np.allclose(given["y"], np.broadcast_to(case.model.initializers["shown"].numpy(), (2, 4)), rtol=1e-3)
    assert np.array_equal(given["shown"], case.model.initializers["shown"].numpy())
    assert np.array_equal(given["x"], x)


def test_row_08_an_output_that_is_also_used_inside_keeps_name_and_type(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], "mid", "one"), node("MatMul", ["mid", "w"], "y", "two")]
    case = Case(mlp(nodes, outputs=("y", "mid")), tmp_path)
    graph = case.typed(case.plan())
    assert next(n for n in graph.node if n.name == "two").input[0] != "mid", "reads the FP16 value, not the output"
    case.holds()


def test_row_09_constant_nodes_are_handled_like_initializers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["a"], "ca", value_float=0.5),
        helper.make_node("Constant", [], ["b"], "cb", value_floats=[1.0, 2.0, 3.0, 4.0]),
        helper.make_node("Constant", [], ["t"], "ct", value=numpy_helper.from_array(np.eye(4, dtype=np.float32))),
        helper.make_node("Constant", [], ["s"], "cs", value_ints=[2, 4]),
        node("MatMul", ["x", "t"], "m", "product"),
        node("Mul", ["m", "a"], "ma", "mul"),
        node("Add", ["ma", "b"], "mb", "add"),
        node("Reshape", ["mb", "s"], "y", "reshape"),
    ]
    case = Case(mlp(nodes), tmp_path)
    graph = case.typed(case.plan())
    assert sequence_of(graph) == ["Cast", "Constant", "MatMul", "Mul", "Add", "Reshape", "Cast"]
    assert {"a__fp16", "b__fp16", "t__fp16"} <= {i.name for i in graph.initializer}
    case.holds()


@pytest.mark.parametrize("filled", [{}, {"value": numpy_helper.from_array(np.full(1, 0.1, np.float32))}])
def test_row_09_filled_tensors_take_the_plans_type(filled: dict[str, onnx.TensorProto], tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["shape"], "fill", "fill", **filled),
        node("Add", ["x", "fill"], "a", "add"),
        node("Sub", ["a", "fill"], "y", "sub"),
    ]
    case = Case(mlp(nodes, constant("shape", [2, 4], np.int64)), tmp_path)
    assert value_types(case.typed(case.plan()))["fill"] == FLOAT16
    assert value_types(case.typed(case.plan("add")))["fill"] == FLOAT
    case.holds()


def test_row_09_what_reads_a_sparse_constant_is_pinned(tmp_path: Path) -> None:
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([[0, 1], [3, 2]], np.int64), "indices")
    proto = mlp([node("MatMul", ["x", "sparse"], "a", "product"), node("Exp", ["a"], "y", "exp")])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 4]))
    case = Case(proto, tmp_path)
    assert set(case.rewriter.node_precisions(case.plan())) == {"exp"}
    case.holds()


def test_row_09_a_sparse_constant_node_is_cast(tmp_path: Path) -> None:
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([1, 2], np.float32), ""),
        numpy_helper.from_array(np.array([1, 14], np.int64), ""),
        [4, 4],
    )
    nodes = [
        helper.make_node("Constant", [], ["s"], "sparse", sparse_value=sparse),
        node("MatMul", ["x", "s"], "a", "product"),
        node("Exp", ["a"], "y", "exp"),
    ]
    case = Case(mlp(nodes), tmp_path)
    assert sequence_of(case.typed(case.plan("product"))) == ["Cast", "Constant", "Cast", "MatMul", "Cast", "Exp"]
    case.holds()


def test_row_10_empty_optional_inputs_empty_tensors_and_scalars(tmp_path: Path) -> None:
    nodes = [
        node("Clip", ["x", "", "top"], "a", "clip"),
        node("Concat", ["a", "nothing"], "b", "concat", axis=1),
        node("Mul", ["b", "scale"], "c", "mul"),
        node("Dropout", ["c", "", ""], ["d", ""], "dropout"),
        node("Slice", ["d", "zero", "zero", "one"], "none", "slice"),
        node("ReduceSum", ["d"], "y", "sum", keepdims=0),
    ]
    proto = models.model(
        nodes,
        [value("x", [2, 4])],
        [value("y", []), value("none", [2, 0])],
        [
            constant("top", 0.5),
            constant("nothing", np.zeros((2, 0))),
            constant("scale", 0.1),
            constant("zero", [0], np.int64),
            constant("one", [1], np.int64),
        ],
    )
    case = Case(proto, tmp_path)
    graph = case.typed(case.plan())
    assert next(n for n in graph.node if n.op_type == "Clip").input[1] == ""
    shapes = {i.name: list(i.dims) for i in graph.initializer}
    assert (shapes["nothing__fp16"], shapes["scale__fp16"]) == ([2, 0], [])
    case.holds()


def test_row_11_a_cast_from_integers_takes_the_plans_type(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["i"], "f", "cast", to=FLOAT),
        node("MatMul", ["f", "w"], "y", "product"),
        node("Cast", ["flag"], "g", "cast_flag", to=FLOAT),
        node("Mul", ["y", "g"], "z", "mul"),
    ]
    proto = models.model(
        nodes, [value("i", [2, 4], INT64), value("flag", [2, 4], BOOL)], [value("z", [2, 4])], [weight("w", 4, 4)]
    )
    case = Case(proto, tmp_path)
    graph = case.typed(case.plan())
    assert sequence_of(graph).count("Cast") == 3, "one more than the model has, for the output"
    assert value_types(graph)["f"] == FLOAT16
    assert value_types(case.typed(case.plan("cast")))["f"] == FLOAT16
    case.holds()


def test_row_11_types_stated_in_attributes_stay_fp32_with_a_cast_after(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "h", "product"),
        node("RandomNormalLike", ["h"], "noise", "noise", dtype=FLOAT, seed=1.0),
        node("RandomUniformLike", ["h"], "more", "more", seed=1.0),
        node("EyeLike", ["w"], "eye", "eye", dtype=FLOAT),
        node("Bernoulli", ["chance"], "coin", "coin", seed=1.0),
        node("RandomNormal", [], "row", "row", shape=[4], seed=1.0),
        node("MatMul", ["h", "eye"], "e", "after"),
        node("Sum", ["e", "noise", "more", "coin", "row"], "y", "sum"),
    ]
    case = Case(mlp(nodes, constant("chance", np.full((2, 4), 0.5))), tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("noise", "more", "eye", "coin", "row")} == {FLOAT}
    case.holds(bound=None)


def test_row_12_inputs_that_must_keep_their_type_do(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], "r", "relu"),
        node("Resize", ["r", "", "scales"], "big", "resize"),
        node("Pow", ["big", "three"], "p", "pow"),
        node("TopK", ["p", "k"], ["values", "indices"], "topk"),
        node("LayerNormalization", ["values", "g"], ["n", "mean", "inv"], "norm"),
        node("Celu", ["n"], "celu", "celu"),
        node("OneHot", ["labels", "depth", "off_on"], "hot", "hot"),
    ]
    proto = models.model(
        nodes,
        [value("x", [1, 1, 4, 4]), value("labels", [3])],
        [
            value("celu", [1, 1, 8, 4]),
            value("mean", [1, 1, 8, 1]),
            value("hot", [3, 5]),
            value("indices", [1, 1, 8, 4], INT64),
        ],
        [
            constant("scales", [1, 1, 2, 2]),
            constant("three", 3, np.int64),
            constant("k", [4], np.int64),
            weight("g", 4),
            constant("depth", 5.0),
            constant("off_on", [0.0, 1.0]),
        ],
    )
    case = Case(proto, tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("scales", "mean", "inv", "celu", "labels", "depth")} == {FLOAT}
    assert {types[n] for n in ("r", "big", "p", "values", "n")} == {FLOAT16}
    case.holds(bound=None)


def test_row_12_lengths_boxes_and_thresholds(tmp_path: Path) -> None:
    nodes = [
        node("LSTM", ["x", "w", "r", "", "lengths"], ["", "h"], "lstm", hidden_size=2),
        node("Reshape", ["h", "to_boxes"], "boxes", "reshape"),
        node("NonMaxSuppression", ["boxes", "scores", "k", "iou", "least"], "kept", "nms"),
        node("Cast", ["kept"], "kept_f", "cast", to=FLOAT),
        node("ReduceSum", ["kept_f"], "total", "sum", keepdims=0),
    ]
    proto = models.model(
        nodes,
        [value("x", [3, 2, 4])],
        [value("total", []), value("h", [1, 2, 2])],
        [
            weight("w", 1, 8, 4),
            weight("r", 1, 8, 2),
            constant("lengths", [3, 2], np.int32),
            constant("to_boxes", [1, 1, 4], np.int64),
            constant("scores", [[[0.9]]]),
            constant("k", [3], np.int64),
            constant("iou", [0.5]),
            constant("least", [0.1]),
        ],
    )
    case = Case(proto, tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("iou", "least", "scores")} == {FLOAT}
    case.holds(bound=None)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="LinearAttention came with opset 27")
def test_row_12_a_state_has_the_type_of_an_input_that_may_be_omitted(tmp_path: Path) -> None:
    """Then ONNX's inference gives it the type of the query, in FP16 too, and the interface would change."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "product"),
        node(
            "LinearAttention",
            ["h", "h", "h"],
            ["y", "state"],
            "attention",
            q_num_heads=2,
            kv_num_heads=2,
            update_rule="linear",
        ),
    ]
    outputs = [value("y", [2, 3, 4]), value("state", [2, 2, 2, 2])]
    proto = models.model(nodes, [value("x", [2, 3, 4])], outputs, [weight("w", 4, 4)], 27)
    case = Case(proto, tmp_path)
    types = value_types(case.typed(case.plan()))
    assert (types["y"], types["state"]) == (FLOAT, FLOAT)


def test_row_12_coordinates_stay_fp32(tmp_path: Path) -> None:
    """And ONNX Runtime fails to run an AffineGrid in FP16 (1.31)."""
    nodes = [
        node("AffineGrid", ["theta", "size"], "grid", "affine"),
        node("Flatten", ["grid"], "flat", "flatten", axis=3),
        node("MatMul", ["flat", "w"], "y", "product"),
    ]
    constants = [constant("size", [1, 1, 2, 3], np.int64), weight("w", 2, 4)]
    proto = models.model(nodes, [value("theta", [1, 2, 3])], [value("y", [6, 4])], constants, 20)
    case = Case(proto, tmp_path)
    types = value_types(case.typed(case.plan()))
    assert types["grid"] == FLOAT
    case.holds()


OUTPUT_TYPES_OF_THEIR_OWN = """
Bernoulli BitCast BlackmanWindow Cast Celu ConcatFromSequence Constant ConstantOfShape CumSum DequantizeLinear
DynamicQuantizeLinear EyeLike HammingWindow HannWindow If LayerNormalization Loop MelWeightMatrix Multinomial
OptionalGetElement RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Scan SequenceAt SequenceMap
TfIdfVectorizer
"""
"""Operators with an FP32 output that follows no input: by an attribute, FP32 always, or the type of a container."""


def test_row_12_the_schemas_say_what_every_other_operator_does() -> None:
    """Of every operator that onnx knows: each FP32 output follows an input, or the operator is looked at above."""
    wanted = {"tensor(float)", "tensor(float16)"}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain or schema.deprecated:
            continue
        allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
        follows = {p.type_str for p in schema.inputs if allowed.get(p.type_str, set()) >= wanted}
        loose = [
            p.name
            for p in schema.outputs
            if "tensor(float)" in allowed.get(p.type_str, {p.type_str}) and p.type_str not in follows
        ]
        old = schema.since_version < 13  # FP16 came later to some operators: their schema keeps them FP32
        assert not loose or schema.name in OUTPUT_TYPES_OF_THEIR_OWN.split() or (old and not follows), (
            schema.name,
            loose,
        )


@pytest.mark.parametrize("opset", [13, 21])
def test_row_13_quantisation_stays_fp32(opset: int, tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], "r", "relu"),
        node("QuantizeLinear", ["r", "scale", "zero"], "q", "q"),
        node("DequantizeLinear", ["q", "scale", "zero"], "d", "dq"),
        node("DequantizeLinear", ["qw", "tiny"], "w_d", "dq_w"),
        node("MatMul", ["d", "w_d"], "y", "product"),
    ]
    proto = models.model(
        nodes,
        [value("x", [2, 4])],
        [value("y", [2, 4])],
        [
            constant("scale", 0.02),
            constant("zero", 0, np.uint8),
            constant("qw", np.arange(-8, 8).reshape(4, 4), np.int8),
            constant("tiny", 1e-9),
        ],
        opset,
    )
    case = Case(proto, tmp_path)
    graph = case.typed(case.plan())
    types = value_types(graph)
    assert {types[n] for n in ("scale", "tiny", "d", "w_d")} == {FLOAT}
    assert next(numpy_helper.to_array(i) for i in graph.initializer if i.name == "tiny") == np.float32(1e-9)
    case.holds(bound=None)


def test_row_14_local_functions_are_inlined(tmp_path: Path) -> None:
    domain, opset = "example.functions", [helper.make_opsetid("", 17)]
    body = [node("MatMul", ["a", "b"], "m", "product"), node("Relu", ["m"], "c", "relu")]
    proto = mlp(
        [
            helper.make_node("Layer", ["x", "w"], ["h"], "first", domain=domain),
            helper.make_node("Layer", ["h", "w"], ["y"], "second", domain=domain),
        ]
    )
    proto.functions.append(helper.make_function(domain, "Layer", ["a", "b"], ["c"], body, opset))
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    case = Case(proto, tmp_path)
    assert [n.op_type for n in case.model.nodes] == ["MatMul", "Relu"] * 2
    case.holds()


@pytest.mark.parametrize("stated", [True, False])
def test_row_15_other_domains_are_pinned_and_never_renamed(stated: bool, tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "a", "before"),
        helper.make_node("Gelu", ["a"], ["g"], "gelu", domain="com.microsoft"),
        node("Add", ["g", "a"], "b", "add"),
        node("Softmax", ["a"], "s", "softmax"),
        node("Mul", ["b", "s"], "y", "mul"),
    ]
    proto = mlp(nodes)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if stated:
        proto.graph.value_info.append(value("g", [2, 4]))
    case = Case(proto, tmp_path)
    free = {"before", "add", "softmax", "mul"} if stated else {"before", "softmax"}
    assert set(case.rewriter.node_precisions(case.plan())) == free, "what reads a value of unknown type is pinned"
    kept = next(n for n in case.typed(case.plan()).node if n.name == "gelu")
    assert (kept.op_type, kept.domain) == ("Gelu", "com.microsoft")
    case.holds()


def test_row_15_an_operator_that_nobody_knows(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "m", "product"),
        helper.make_node("Mystery", ["m"], ["y"], "mystery", domain="com.example"),
    ]
    case = Case(mlp(nodes), tmp_path)
    assert sequence_of(case.typed(case.plan())) == ["Cast", "MatMul", "Cast", "Mystery"]


def test_row_16_weights_keep_signs_and_infinities_and_what_overflows_is_reported(tmp_path: Path) -> None:
    extreme = np.array([[-1e9, -np.inf, 1e5, 1e-9], [65504, -65504, 6e-8, -0.0], *np.eye(2, 4)], np.float32)
    nodes = [node("MatMul", ["x", "extreme"], "a", "product"), node("Add", ["a", "mask"], "y", "add")]
    case = Case(mlp(nodes, constant("extreme", extreme), constant("mask", -1e9)), tmp_path)
    written = {i.name: numpy_helper.to_array(i) for i in case.typed(case.plan()).initializer}
    half = written["extreme__fp16"]
    assert half[0].tolist() == [-65504, -np.inf, 65504, 0]
    assert half[1, :2].tolist() == [65504, -65504]
    assert half[1, 2] > 0
    assert np.signbit(half[1, 3])
    assert np.array_equal(half[2:], np.eye(2, 4))
    hazards = find_hazards(case.grouped)
    assert {h.place.tensor for h in hazards if h.code == "overflow"} == {"extreme", "mask"}
    both = {i.name: numpy_helper.to_array(i) for i in case.typed(case.plan("add")).initializer}
    assert np.array_equal(both["extreme"], extreme)


def island(*more: onnx.NodeProto, outputs: Sequence[onnx.ValueInfoProto] = ()) -> onnx.ModelProto:
    """FP32, an island of FP16 between the model's own Casts, FP32."""
    nodes = [
        node("MatMul", ["x", "w"], "a", "before"),
        node("Cast", ["a"], "half", "down", to=FLOAT16),
        node("Tanh", ["half"], "t", "island"),
        node("Cast", ["t"], "b", "up", to=FLOAT),
        node("MatMul", ["b", "w"], "y", "after"),
        *more,
    ]
    return models.model(nodes, [value("x", [2, 4])], [value("y", [2, 4]), *outputs], [weight("w", 4, 4)])


def test_row_17_an_fp16_island_loses_the_casts_that_a_plan_makes_needless(tmp_path: Path) -> None:
    case = Case(island(), tmp_path)
    assert set(case.rewriter.node_precisions(case.plan())) == {"before", "after"}
    expected = {
        (): ["Cast", "MatMul", "Tanh", "MatMul", "Cast"],
        ("before",): ["Cast", "MatMul", "Tanh", "Cast", "MatMul"],
        ("after",): ["MatMul", "Cast", "Tanh", "MatMul", "Cast"],
    }
    for fp16, ops in expected.items():
        assert sequence_of(case.typed(case.plan(*fp16))) == ops
    case.holds()


def test_row_17_an_island_that_others_read_too(tmp_path: Path) -> None:
    more = [
        node("Neg", ["a"], "n", "reads_before"),
        node("Abs", ["b"], "c", "reads_after"),
        node("Relu", ["half"], "inside", "in_island"),
        node("Cast", ["inside"], "d", "up_again", to=FLOAT),
        node("Sum", ["n", "c", "d"], "z", "sum"),
        node("Shape", ["b"], "s", "shape"),
        node("Cast", ["b"], "i", "integers", to=INT64),
    ]
    outputs = [value("z", [2, 4]), value("s", [2], INT64), value("i", [2, 4], INT64)]
    case = Case(island(*more, outputs=outputs), tmp_path)
    graph = case.typed(case.plan("reads_before"))
    assert sequence_of(graph).count("Cast") == 5, "the model's Cast to FP16 serves the new reader"
    every = [n for g in case.groups for n in g.nodes]
    for count in range(len(every) + 1):
        for fp16 in itertools.combinations(every, count):
            case.typed(case.plan(*fp16) if fp16 else plans(case.model, case.groups, 0)[1])
    case.holds(bound=5e-2)


def test_row_17_casts_that_are_outputs_or_captured_stay(tmp_path: Path) -> None:
    more = [
        node("Neg", ["a"], "n", "reads_before"),
        node("Abs", ["b"], "c", "reads_after"),
        node("Add", ["n", "c"], "z", "add"),
    ]
    outputs = [value("half", [2, 4], FLOAT16), value("b", [2, 4]), value("z", [2, 4])]
    case = Case(island(*more, outputs=outputs), tmp_path)
    graph = case.typed(case.plan("reads_before", "reads_after", "add"))
    assert next(n for n in graph.node if n.name == "reads_before").input[0] == "half"
    assert next(n for n in graph.node if n.name == "reads_after").input[0] == "t"
    case.holds()


def test_row_17_a_value_rounded_on_purpose_stays_rounded(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], "half", "down", to=FLOAT16),
        node("Cast", ["half"], "rounded", "up", to=FLOAT),
        node("Sub", ["x", "rounded"], "rest", "sub"),
        node("Mul", ["rounded", "w2"], "m", "mul"),
        node("Add", ["rest", "m"], "y", "add"),
    ]
    case = Case(mlp(nodes, weight("w2", 4)), tmp_path)
    feed = feeds(case.model)
    for fp16 in (["mul"], ["add"], ["mul", "add"]):
        out = case.rewriter.write(case.plan(*fp16), case.folder / "typed.onnx")
        verify(case.rewriter, case.plan(*fp16), out)
        graph = typed_graph(out, case.model)
        assert list(next(n for n in graph.node if n.name == "sub").input) == ["x", "rounded"]
        assert relative_l2(run(out, feed)["y"], run(case.path, feed)["y"]) < 1e-2
    case.holds()


def test_row_17_casts_of_constants_and_casts_that_change_nothing(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["w"], "w16", "weight_down", to=FLOAT16),
        node("Cast", ["x"], "x16", "down", to=FLOAT16),
        node("MatMul", ["x16", "w16"], "m16", "product"),
        node("Cast", ["m16"], "m", "up", to=FLOAT),
        node("Cast", ["m"], "again", "nothing", to=FLOAT),
        node("MatMul", ["again", "w"], "b", "other"),
        node("Cast", ["w"], "w_same", "weight_same", to=FLOAT),
        node("MatMul", ["b", "w_same"], "c", "third"),
        node("Add", ["c", "x"], "y", "add"),
    ]
    case = Case(mlp(nodes), tmp_path)
    graph = case.typed(case.plan())
    assert sequence_of(graph).count("Cast") == 3, "one at each end, and the one of the weight, which runtimes fold"
    assert {i.name for i in graph.initializer} == {"w", "w__fp16"}
    for fp16 in (["other"], ["third"], ["add"], ["other", "third"]):
        case.typed(case.plan(*fp16))
    case.holds()


def test_row_17_fp64_and_bfloat16_paths_are_left_alone(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "a", "before"),
        node("Cast", ["a"], "wide", "to_double", to=TensorProto.DOUBLE),
        node("Mul", ["wide", "wide"], "squared", "double"),
        node("Cast", ["squared"], "b", "from_double", to=FLOAT),
        node("Cast", ["a"], "short", "to_bfloat16", to=TensorProto.BFLOAT16),
        node("Cast", ["short"], "c", "from_bfloat16", to=FLOAT),
        node("Add", ["b", "c"], "y", "add"),
    ]
    case = Case(mlp(nodes), tmp_path)
    assert "double" not in case.rewriter.node_precisions(case.plan())
    graph = case.typed(case.plan())
    types = value_types(graph)
    assert (types["wide"], types["short"]) == (TensorProto.DOUBLE, TensorProto.BFLOAT16)
    assert sequence_of(graph).count("Cast") == 6, "one more at each end; the others take or give FP16 themselves"
    case.holds()


def test_row_18_old_types_and_invented_dimension_names_are_dropped(tmp_path: Path) -> None:
    """The same name for two different sizes makes ONNX Runtime reuse a buffer that is too small."""
    proto = models.model(
        [
            node("MatMul", ["x", "w"], "a", "one"),
            node("Relu", ["a"], "b", "two"),
            node("MatMul", ["b", "w2"], "y", "three"),
        ],
        [value("x", ["n", 4])],
        [value("y", ["n", 4])],
        [weight("w", 4, 64), weight("w2", 64, 4)],
    )
    proto.graph.value_info.extend([value("a", ["n", "n"]), value("b", ["n", "unk__7"])])
    case = Case(proto, tmp_path)
    feed = {"x": np.ones((5, 4), np.float32)}
    for plan in plans(case.model, case.groups, 4):
        out = case.rewriter.write(plan, case.folder / "typed.onnx")
        assert not onnx.load(out, load_external_data=False).graph.value_info
        verify(case.rewriter, plan, out)
        assert run(out, feed)["y"].shape == (5, 4)


def test_row_19_external_data_is_referred_to_or_taken_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("MatMul", ["x", "big"], "a", "one"), node("MatMul", ["a", "big"], "y", "two")]
    proto = models.model(nodes, [value("x", [2, 64])], [value("y", [2, 64])], [weight("big", 64, 64, scale=0.1)])
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    case = Case(tmp_path / "m.onnx", tmp_path)
    case.holds()
    plan = case.plan("one")
    assert case.rewriter.write(plan, case.folder / "typed.onnx").stat().st_size < 2000
    inside = case.rewriter.export(plan, tmp_path / "inside.onnx")
    monkeypatch.setattr(mptune.graph.writing.weights, "SELF_CONTAINED_LIMIT", 0)  # as if the weights passed 2 GiB
    beside = case.rewriter.export(plan, tmp_path / "beside.onnx")
    assert (tmp_path / "beside.onnx.data").stat().st_size == 64 * 64 * 6
    feed = feeds(case.model)
    assert np.array_equal(run(inside, feed)["y"], run(beside, feed)["y"])


@pytest.mark.parametrize("rms", [False, True])
def test_row_20_a_decomposed_norm_has_one_precision(rms: bool, tmp_path: Path) -> None:
    """Where its nodes differ, ONNX Runtime's LayerNormFusion fails to load the model."""
    case = Case(models.decomposed_norm(rms=rms), tmp_path, "op")
    norm = [n.name for n in case.model.nodes if n.name.startswith("/norm/")]
    assert any(set(norm) <= set(g.nodes) for g in case.groups)
    case.holds()


def test_row_21_every_node_realises_the_plan_and_bytes_repeat(tmp_path: Path) -> None:
    path = models.save(models.attention(-1e4), tmp_path)
    case, again = Case(path, tmp_path, "op"), Case(path, tmp_path, "op")
    pinned = pinned_by_hazards(find_hazards(case.grouped))
    assert not pinned
    for plan in plans(case.model, case.groups, 12):
        first = case.rewriter.write(plan, case.folder / "one.onnx")
        verify(case.rewriter, plan, first)
        assert first.read_bytes() == again.rewriter.write(plan, case.folder / "two.onnx").read_bytes()
        assert (
            case.rewriter.export(plan, case.folder / "a.onnx").read_bytes()
            == again.rewriter.export(plan, case.folder / "b.onnx").read_bytes()
        )
    rules = [node_rule(case.model, node) for node in case.model.nodes]
    assert rules == list(case.rewriter.types.rules)
    case.holds()
