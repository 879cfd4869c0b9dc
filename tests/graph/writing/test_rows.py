"""What the rewriter must survive: one small model for each way in which some converter breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mptune.graph.facts import node_rule
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import load_model
from mptune.graph.loading.tensors import all_tensors, is_external
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import feeds, one_per_node, plans, relative_l2, run
from tests.graph.models import constant, text, value, weight
from tests.graph.verify import typed_graph, value_types, verify

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
W = weight("w", 4, 4)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


class Case:
    """One model, every node its own group."""

    def __init__(self, proto: onnx.ModelProto, folder: Path) -> None:
        self.path = models.save(proto, folder)
        self.folder = folder / "weights"
        self.model = load_model(self.path)
        self.groups = one_per_node(self.model)
        self.grouped = GroupedModel(self.model, self.groups)
        bank = WeightBank.write(self.model, self.folder)
        self.rewriter = Rewriter(self.grouped, bank)
        self.emulator = Emulator(self.grouped, bank)

    def plan(self, *fp16: str) -> PrecisionPlan:
        """The plan whose FP16 nodes are the named ones; no names: all that can be."""
        names = {name for group in self.groups for name in group.nodes}
        assert names >= set(fp16), "names that no group has"
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


def ops(graph: onnx.GraphProto) -> list[str]:
    return [n.op_type for n in graph.node]


def mlp(nodes: str, *constants: onnx.TensorProto, outputs: Sequence[str] = ("y",)) -> onnx.ModelProto:
    """``nodes`` from x to y, all [2, 4], with the weight w."""
    ends = ", ".join(f"float[2,4] {name}" for name in outputs)
    return text(f"(float[2,4] x) => ({ends}) {{ {nodes} }}", W, *constants)


def test_row_01_fp32_to_fp32_never_passes_through_fp16(tmp_path: Path) -> None:
    case = Case(mlp("a = MatMul(x, w) b = Relu(a) [three] y = MatMul(b, w)"), tmp_path)
    assert ops(case.typed(case.plan("three"))) == ["MatMul", "Relu", "Cast", "MatMul", "Cast"]
    branch = Case(mlp("a = Relu(x) [two] b = Neg(a) [three] c = Exp(a) y = Add(b, c)"), tmp_path)
    graph = branch.typed(branch.plan("two"))
    assert next(n for n in graph.node if n.name == "three").input[0] == "a"
    branch.holds()


def test_row_02_one_cast_for_many_consumers_and_for_two_uses_in_one(tmp_path: Path) -> None:
    case = Case(mlp("[r] a = Relu(x) [m] b = Mul(a, a) [n] c = Neg(a) [a] d = Abs(a) [s] y = Sum(b, c, d)"), tmp_path)
    assert ops(case.typed(case.plan("m", "n", "a", "s"))).count("Cast") == 2
    case.holds()


def test_row_03_unnamed_and_equally_named_nodes(tmp_path: Path) -> None:
    case = Case(mlp("[same] a = Relu(x) [same] b = Neg(a) c = Abs(b) y = Neg(c)"), tmp_path)
    assert [n.name for n in case.model.nodes][:2] == ["same", "same_2"]
    case.holds()
    branches = (
        "then_branch: graph = t () => (float[2,4] t) { [same] n = Neg(a) [same] t = Abs(n) },"
        " else_branch: graph = e () => (float[2,4] e) { [same] e = Abs(a) }"
    )
    nodes = f"a = MatMul(x, w) i = If(flag) <{branches}> y = Relu(i)"
    case = Case(mlp(nodes, constant("flag", True, np.bool_)), tmp_path)
    for graph in (a.g for n in case.typed(case.plan()).node for a in n.attribute if a.HasField("g")):
        names = [n.name for n in graph.node]
        assert len(set(names)) == len(names)


BRANCHES = (
    "then_branch: graph = t () => (float[2,4] then) { then = Neg(outer) },"
    " else_branch: graph = e () => (float[2,4] else) { else = Abs(outer) }"
)


def test_row_04_what_a_subgraph_captures_stays_fp32_under_its_name(tmp_path: Path) -> None:
    nodes = f"outer = MatMul(x, w) p = If(c) <{BRANCHES}> m = MatMul(p, w) y = Add(m, outer)"
    case = Case(text(f"(float[2,4] x, bool c) => (float[2,4] y) {{ {nodes} }}", W), tmp_path)
    graph = case.typed(case.plan())
    assert value_types(graph)["outer"] == FLOAT
    assert ops(graph).index("If") > ops(graph).index("MatMul")
    case.holds()


def test_row_04_a_subgraph_that_captures_through_another(tmp_path: Path) -> None:
    """And nodes that do not stand in topological order."""
    inner = (
        f"then_branch: graph = yes () => (float[2,4] t) {{ t = If(c) <{BRANCHES}> }},"
        " else_branch: graph = no () => (float[2,4] e) { e = Identity(outer) }"
    )
    nodes = f"[if] p = If(c) <{inner}> [add] y = Add(p, x) [relu] outer = Relu(x)"
    case = Case(text(f"(float[2,4] x, bool c) => (float[2,4] y) {{ {nodes} }}"), tmp_path)
    assert [n.name for n in case.model.nodes] == ["relu", "if", "add"]
    case.holds()


def test_row_05_loop_scan_sequences_and_optionals_stay_fp32(tmp_path: Path) -> None:
    body = (
        "body: graph = b (int64 i, bool go, float[2,4] state) => (bool go_on, float[2,4] next)"
        " { squared = Mul(state, state) next = Tanh(squared) go_on = Identity(go) }"
    )
    rows = (
        "num_scan_inputs = 1, body: graph = s (float[4] total, float[4] row) => (float[4] sum, float[4] out)"
        " { sum = Add(total, row) out = Identity(sum) }"
    )
    loops = f"last = Loop(n, , h) <{body}> end, stack = Scan(zero, last) <{rows}> [after] y = MatMul(stack, w)"
    sequences = """
        parts = SplitToSequence<axis = 1>(h, n) more = SequenceInsert(parts, h)
        joined = ConcatFromSequence<axis = 1>(more) pair = SequenceConstruct(joined, joined)
        first = SequenceAt(pair, none) box = Optional(first) opened = OptionalGetElement(box)
        [after] y = MatMul(opened, w2)
    """
    constants = [constant("n", 2, np.int64), constant("none", 0, np.int64), constant("zero", np.zeros(4))]
    for nodes in (loops, sequences):
        read = [c for c in (*constants, weight("w2", 8, 4)) if c.name in nodes]
        case = Case(mlp(f"[before] h = MatMul(x, w) {nodes}", *read), tmp_path)
        assert set(case.rewriter.types.node_precisions(case.plan())) == {"before", "after"}
        case.holds()


def test_row_06_an_initializer_on_both_sides_exists_once_in_each_type(tmp_path: Path) -> None:
    case = Case(mlp("[one] a = MatMul(x, w) y = MatMul(a, w)"), tmp_path)
    graph = case.typed(case.plan("one"))
    assert {i.name: i.data_type for i in graph.initializer} == {"w": FLOAT, "w__fp16": FLOAT16}
    fp32 = next(i for i in graph.initializer if i.name == "w")
    assert np.array_equal(numpy_helper.to_array(fp32), case.model.initializers["w"].numpy()), "never rounded"
    case.holds()


def test_row_07_initializers_that_are_inputs_or_outputs_and_inputs_that_are_outputs(tmp_path: Path) -> None:
    ends = "(float[2,4] x, float[4,4] given) => (float[2,4] y, float[4] shown, float[2,4] x)"
    nodes = "a = MatMul(x, given) b = Add(a, shown) y = Mul(b, x)"
    case = Case(text(f"{ends} {{ {nodes} }}", weight("given", 4, 4), weight("shown", 4)), tmp_path)
    assert [i.name for i in case.model.inputs] == ["x"]
    case.holds()
    out = case.rewriter.write(case.plan(), case.folder / "typed.onnx")
    x, other = np.ones((2, 4), np.float32), np.zeros((4, 4), np.float32)
    given = run(out, {"x": x, "given": other})
    assert np.allclose(given["y"], np.broadcast_to(case.model.initializers["shown"].numpy(), (2, 4)), rtol=1e-3)
    assert np.array_equal(given["shown"], case.model.initializers["shown"].numpy())
    assert np.array_equal(given["x"], x)


def test_row_09_constant_nodes_are_handled_like_initializers(tmp_path: Path) -> None:
    nodes = """
        a = Constant<value_float = 0.5>() b = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>()
        t = Constant<value = float[4,1] {1, 0, 2, 1}>() s = Constant<value_ints = [2, 4]>()
        m = MatMul(x, t) ma = Mul(m, a) mb = Add(ma, b) y = Reshape(mb, s)
    """
    case = Case(mlp(nodes), tmp_path)
    graph = case.typed(case.plan())
    assert ops(graph) == ["Cast", "Constant", "MatMul", "Mul", "Add", "Reshape", "Cast"]
    assert {"a__fp16", "b__fp16", "t__fp16"} <= {i.name for i in graph.initializer}
    case.holds()


@pytest.mark.parametrize("filled", ["", "<value = float[1] {0.1}>"])
def test_row_09_filled_tensors_take_the_plans_type(filled: str, tmp_path: Path) -> None:
    nodes = f"fill = ConstantOfShape{filled}(shape) [add] a = Add(x, fill) y = Sub(a, fill)"
    case = Case(mlp(nodes, constant("shape", [2, 4], np.int64)), tmp_path)
    assert value_types(case.typed(case.plan()))["fill"] == FLOAT16
    assert value_types(case.typed(case.plan("add")))["fill"] == FLOAT
    case.holds()


def test_row_09_sparse_constants(tmp_path: Path) -> None:
    """What reads a sparse initializer is pinned; the result of a sparse Constant node is cast."""
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([[0, 1], [3, 2]], np.int64), "indices")
    proto = mlp("a = MatMul(x, sparse) [exp] y = Exp(a)")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 4]))
    case = Case(proto, tmp_path)
    assert set(case.rewriter.types.node_precisions(case.plan())) == {"exp"}
    case.holds()
    flat = numpy_helper.from_array(np.array([1, 14], np.int64), "")
    proto = mlp("[product] a = MatMul(x, s) y = Exp(a)")
    stated = helper.make_sparse_tensor(numpy_helper.from_array(np.array([1, 2], np.float32), ""), flat, [4, 4])
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["s"], sparse_value=stated))
    case = Case(proto, tmp_path)
    assert ops(case.typed(case.plan("product"))) == ["Cast", "Constant", "Cast", "MatMul", "Cast", "Exp"]
    case.holds()


def test_row_10_empty_optional_inputs_empty_tensors_and_scalars(tmp_path: Path) -> None:
    nodes = """
        a = Clip(x, , top) b = Concat<axis = 1>(a, nothing) c = Mul(b, scale) d = Dropout(c, , )
        none = Slice(d, zero, zero, one) y = ReduceSum<keepdims = 0>(d)
    """
    constants = [constant("top", 0.5), constant("nothing", np.zeros((2, 0))), constant("scale", 0.1)]
    constants += [constant("zero", [0], np.int64), constant("one", [1], np.int64)]
    case = Case(text(f"(float[2,4] x) => (float y, float[2,0] none) {{ {nodes} }}", *constants), tmp_path)
    graph = case.typed(case.plan())
    assert next(n for n in graph.node if n.op_type == "Clip").input[1] == ""
    shapes = {i.name: list(i.dims) for i in graph.initializer}
    assert (shapes["nothing__fp16"], shapes["scale__fp16"]) == ([2, 0], [])
    case.holds()


def test_row_11_a_cast_from_integers_takes_the_plans_type(tmp_path: Path) -> None:
    nodes = "[cast] f = Cast<to = 1>(i) y = MatMul(f, w) g = Cast<to = 1>(flag) z = Mul(y, g)"
    case = Case(text(f"(int64[2,4] i, bool[2,4] flag) => (float[2,4] z) {{ {nodes} }}", W), tmp_path)
    graph = case.typed(case.plan())
    assert ops(graph).count("Cast") == 3, "one more than the model has, for the output"
    assert value_types(graph)["f"] == FLOAT16
    assert value_types(case.typed(case.plan("cast")))["f"] == FLOAT16
    case.holds()


def test_row_11_types_stated_in_attributes_stay_fp32_with_a_cast_after(tmp_path: Path) -> None:
    nodes = """
        h = MatMul(x, w) noise = RandomNormalLike<dtype = 1, seed = 1.0>(h) more = RandomUniformLike<seed = 1.0>(h)
        eye = EyeLike<dtype = 1>(w) coin = Bernoulli<seed = 1.0>(chance)
        row = RandomNormal<shape = [4], seed = 1.0>() e = MatMul(h, eye) y = Sum(e, noise, more, coin, row)
    """
    case = Case(mlp(nodes, constant("chance", np.full((2, 4), 0.5))), tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("noise", "more", "eye", "coin", "row")} == {FLOAT}
    case.holds(bound=None)


def test_row_12_inputs_that_must_keep_their_type_do(tmp_path: Path) -> None:
    graph = """(float[1,1,4,4] x, float[3] labels)
        => (float[1,1,8,4] celu, float[1,1,8,1] mean, float[3,5] hot, int64[1,1,8,4] indices)
        <float[4] scales = {1, 1, 2, 2}, int64 three = {3}, int64[1] k = {4}, float depth = {5}, float[2] ends = {0, 1}>
    {
        r = Relu(x) big = Resize(r, , scales) p = Pow(big, three) values, indices = TopK(p, k)
        n, mean, inv = LayerNormalization(values, g) celu = Celu(n) hot = OneHot(labels, depth, ends)
    }"""
    case = Case(text(graph, weight("g", 4)), tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("scales", "mean", "inv", "celu", "labels", "depth")} == {FLOAT}
    assert {types[n] for n in ("r", "big", "p", "values", "n")} == {FLOAT16}
    case.holds(bound=None)


def test_row_12_lengths_boxes_and_thresholds(tmp_path: Path) -> None:
    graph = """(float[3,2,4] x) => (float total, float[1,2,2] h)
        <int32[2] lengths = {3, 2}, int64[3] shape = {1, 1, 4}, float[1,1,1] scores = {0.9}, int64[1] k = {3},
         float[1] iou = {0.5}, float[1] least = {0.1}> {
        skip, h = LSTM<hidden_size = 2>(x, w, r, , lengths) boxes = Reshape(h, shape)
        chosen = NonMaxSuppression(boxes, scores, k, iou, least)
        f = Cast<to = 1>(chosen) total = ReduceSum<keepdims = 0>(f)
    }"""
    case = Case(text(graph, weight("w", 1, 8, 4), weight("r", 1, 8, 2)), tmp_path)
    types = value_types(case.typed(case.plan()))
    assert {types[n] for n in ("iou", "least", "scores")} == {FLOAT}
    case.holds(bound=None)


@pytest.mark.parametrize("opset", [13, 21])
def test_row_13_quantisation_stays_fp32(opset: int, tmp_path: Path) -> None:
    graph = """(float[2,4] x) => (float[2,4] y) <float scale = {0.02}, uint8 zero = {0}> {
        r = Relu(x) q = QuantizeLinear(r, scale, zero) d = DequantizeLinear(q, scale, zero)
        w_d = DequantizeLinear(qw, tiny) y = MatMul(d, w_d)
    }"""
    constants = [constant("qw", np.arange(-8, 8).reshape(4, 4), np.int8), constant("tiny", 1e-9)]
    case = Case(text(graph, *constants, opset=opset), tmp_path)
    typed = case.typed(case.plan())
    types = value_types(typed)
    assert {types[n] for n in ("scale", "tiny", "d", "w_d")} == {FLOAT}
    assert next(numpy_helper.to_array(i) for i in typed.initializer if i.name == "tiny") == np.float32(1e-9)
    case.holds(bound=None)


@pytest.mark.parametrize("stated", [True, False])
def test_row_15_other_domains_are_pinned_and_never_renamed(stated: bool, tmp_path: Path) -> None:
    nodes = "[before] a = MatMul(x, w) [gelu] g = com.microsoft.Gelu(a) [add] b = Add(g, a)"
    proto = mlp(f"{nodes} [softmax] s = Softmax(a) [mul] y = Mul(b, s)")
    if stated:
        proto.graph.value_info.append(value("g", [2, 4]))
    case = Case(proto, tmp_path)
    free = {"before", "add", "softmax", "mul"} if stated else {"before", "softmax"}
    assert set(case.rewriter.types.node_precisions(case.plan())) == free, "what reads a value of unknown type is pinned"
    gelu = next(n for n in case.typed(case.plan()).node if n.name == "gelu")
    assert (gelu.op_type, gelu.domain) == ("Gelu", "com.microsoft")
    case.holds()
    case = Case(mlp("m = MatMul(x, w) y = com.example.Mystery(m)"), tmp_path)
    assert ops(case.typed(case.plan())) == ["Cast", "MatMul", "Cast", "Mystery"]


ISLAND = """
    [before] a = MatMul(x, w) [down] half = Cast<to = 10>(a) [island] t = Tanh(half) [up] b = Cast<to = 1>(t)
    [after] y = MatMul(b, w)
"""
"""FP32, an island of FP16 between the model's own Casts, FP32."""


def test_row_17_an_fp16_island_loses_the_casts_that_a_plan_makes_needless(tmp_path: Path) -> None:
    case = Case(mlp(ISLAND), tmp_path)
    assert set(case.rewriter.types.node_precisions(case.plan())) == {"before", "after"}
    expected = {
        (): ["Cast", "MatMul", "Tanh", "MatMul", "Cast"],
        ("before",): ["Cast", "MatMul", "Tanh", "Cast", "MatMul"],
        ("after",): ["MatMul", "Cast", "Tanh", "MatMul", "Cast"],
    }
    for fp16, written in expected.items():
        assert ops(case.typed(case.plan(*fp16))) == written
    case.holds()


def test_row_17_a_value_rounded_on_purpose_stays_rounded(tmp_path: Path) -> None:
    nodes = """
        half = Cast<to = 10>(x) rounded = Cast<to = 1>(half) [sub] rest = Sub(x, rounded)
        [mul] m = Mul(rounded, w2) [add] y = Add(rest, m)
    """
    case = Case(mlp(nodes, weight("w2", 4)), tmp_path)
    feed = feeds(case.model)
    for fp16 in (["mul"], ["add"], ["mul", "add"]):
        graph = case.typed(case.plan(*fp16))
        assert list(next(n for n in graph.node if n.name == "sub").input) == ["x", "rounded"]
        assert relative_l2(run(case.folder / "typed.onnx", feed)["y"], run(case.path, feed)["y"]) < 1e-2
    case.holds()


def test_row_17_fp64_and_bfloat16_paths_are_left_alone(tmp_path: Path) -> None:
    nodes = """
        a = MatMul(x, w) wide = Cast<to = 11>(a) [double] squared = Mul(wide, wide) b = Cast<to = 1>(squared)
        short = Cast<to = 16>(a) c = Cast<to = 1>(short) y = Add(b, c)
    """
    case = Case(mlp(nodes), tmp_path)
    assert "double" not in case.rewriter.types.node_precisions(case.plan())
    graph = case.typed(case.plan())
    types = value_types(graph)
    assert (types["wide"], types["short"]) == (TensorProto.DOUBLE, TensorProto.BFLOAT16)
    assert ops(graph).count("Cast") == 6, "one more at each end; the others take or give FP16 themselves"
    case.holds()


def test_row_18_old_types_and_invented_dimension_names_are_dropped(tmp_path: Path) -> None:
    """The same name for two different sizes makes ONNX Runtime reuse a buffer that is too small."""
    graph = "(float[n,4] x) => (float[n,4] y) { a = MatMul(x, wide) b = Relu(a) y = MatMul(b, back) }"
    proto = text(graph, weight("wide", 4, 64), weight("back", 64, 4))
    proto.graph.value_info.extend([value("a", ["n", "n"]), value("b", ["n", "unk__7"])])
    case = Case(proto, tmp_path)
    for plan in plans(case.model, case.groups, 4):
        out = case.rewriter.write(plan, case.folder / "typed.onnx")
        assert not onnx.load(out, load_external_data=False).graph.value_info
        verify(case.rewriter, plan, out)
        assert run(out, {"x": np.ones((5, 4), np.float32)})["y"].shape == (5, 4)


def test_row_22_below_ir_4_constants_are_no_inputs(tmp_path: Path) -> None:
    """ONNX wanted every constant among the inputs then."""
    ends = "(float[2,4] x, float[4,4] w, int64[2] shape) => (float[8] y, float[4] shown)"
    proto = text(f"{ends} {{ h = MatMul(x, w) a = Add(h, shown) y = Reshape(a, flat) }}", W, weight("shown", 4))
    proto.graph.initializer.extend([constant("shape", [2, 4], np.int64), constant("flat", [8], np.int64)])
    proto.ir_version = 3
    case = Case(proto, tmp_path)
    graph = case.typed(case.plan())
    assert [given.name for given in graph.input] == ["x"]
    assert {i.name: i.data_type for i in graph.initializer}.items() >= {
        "w__fp16": FLOAT16,
        "shown__fp16": FLOAT16,
    }.items()
    case.holds()


def test_row_23_external_data_in_subgraphs_constant_nodes_and_functions(tmp_path: Path) -> None:
    then = "then_branch: graph = t () => (float[2,64] p) { k = Constant<value = float[1] {0}>() p = MatMul(h, k) }"
    other = "else_branch: graph = e () => (float[2,64] q) { q = MatMul(h, inside) }"
    nodes = f"""{{
        large = Constant<value = float[1] {{0}}>() small = Constant<value = float[1] {{0}}>() h = MatMul(x, large)
        i = If(c) <{then}, {other}> a = Add(i, small) [last] y = local.product(a)
    }}"""
    function = "product (v) => (z) { k = Constant<value = float[1] {0}>() z = MatMul(v, k) }"
    imports = '["" : 17, "local" : 1]'
    proto = onnx.parser.parse_model(
        f"<ir_version: 9, opset_import: {imports}> test (float[2,64] x, bool c) => (float[2,64] y) {nodes}"
        f' <domain: "local", opset_import: {imports}> {function}'
    )
    branch, inside = proto.graph.node[3].attribute, weight("inside", 64, 64)
    branch[1].g.initializer.append(inside)
    constants = (proto.graph.node[0], proto.graph.node[1], branch[0].g.node[0], proto.functions[0].node[0])
    for node, shape in zip(constants, ((64, 64), (64,), (64, 64), (64, 64)), strict=True):
        node.attribute[0].t.CopyFrom(weight("", *shape))
    more = {"save_as_external_data": True, "convert_attribute": True, "size_threshold": 0}
    onnx.save(proto, tmp_path / "model.onnx", location="w.bin", **more)
    case = Case(onnx.load(tmp_path / "model.onnx", load_external_data=False), tmp_path)
    assert case.model.data_files == (tmp_path.resolve() / "w.bin",)
    left = [tensor.dims[:] for tensor in all_tensors(case.model.proto.graph) if is_external(tensor)]
    assert left == [[64, 64]] * 2, "large Constant nodes, which are read where they are wanted"
    assert {"large__fp16", "small__fp16"} <= {i.name for i in case.typed(case.plan()).initializer}
    case.holds()
    feed = feeds(case.model)
    for plan in plans(case.model, case.groups, 0):
        written = case.rewriter.export(plan, tmp_path / "alone" / "m.onnx")
        assert relative_l2(run(written, feed)["y"], run(case.path, feed)["y"]) < 2e-3


@pytest.mark.parametrize("opset", [10, 13, 17, 21])
def test_row_25_lengths_of_sequences_and_an_fp32_constant_inside(opset: int, tmp_path: Path) -> None:
    """Each layer once with lengths and once without."""
    ends = {0: ", , lengths", 1: ""}
    layers = [f"{op}{n} = {op}<hidden_size = 2>(x, w{op}, r{op} {end})" for op in GATES for n, end in ends.items()]
    norm = "n = MeanVarianceNormalization<axes = [0, 2]>(x) z = Mul(n, w) y = Transpose<perm = [1, 0, 2]>(z)"
    graph = f"(float[3,2,4] x, int32[2] lengths) => (float[2,3,4] y) {{ {' '.join(layers)} {norm} }}"
    weights = [weight(f"{side}{op}", 1, 2 * n, size) for op, n in GATES.items() for side, size in (("w", 4), ("r", 2))]
    proto = text(graph, weight("w", 4), *weights, opset=opset)
    proto.graph.output.extend(value(f"{op}{n}", [3, 1, 2, 2]) for op in GATES for n in ends)
    case = Case(proto, tmp_path)
    reasons = {node.outputs[0]: node_rule(case.model, node).fixed or "" for node in case.model.nodes}
    assert [("sequence_lens" in reasons[f"{op}0"], reasons[f"{op}1"]) for op in GATES] == [(True, "")] * 3
    assert "FP32 constant" in reasons["n"]
    case.holds()


def test_row_26_a_comparison_is_fp16_only_where_its_operands_are(tmp_path: Path) -> None:
    """2093.75 is 2094 in FP16."""
    nodes = """
        [m] a = MatMul(x, w) [n] b = Neg(a) i = Cast<to = 1>(ids) [held] p = Less(a, half) [two] q = Greater(a, b)
        [edge] r = Less(a, edge) [ints] s = Less(a, i) [ends] t = Less(edge, x)
        pq = Or(p, q) pqr = Or(pq, r) pqrs = Or(pqr, s) u = Xor(pqrs, t) y = Where(u, a, b)
    """
    constants = [W, constant("half", 0.5), constant("edge", 2093.75)]
    ends = "(float[2,4] x, int64[2,4] ids) => (float[2,4] y, bool[2,4] t)"
    case = Case(text(f"{ends} {{ {nodes} }}", *constants), tmp_path)
    for reduced, expected in (((), {"held", "two"}), (("m", "held", "two"), {"held"}), (("n", "held", "two"), set())):
        graph = case.typed(case.plan(*reduced))
        types, compared = value_types(graph), [n for n in graph.node if n.op_type in ("Less", "Greater")]
        read = {node.name: {types[name] for name in node.input} for node in compared}
        assert read == {name: {FLOAT16 if name in expected else FLOAT} for name in read}
    case.holds()
    feed = {"x": np.full((2, 4), 2093.9, np.float32), "ids": np.zeros((2, 4), np.int64)}
    for name in ("typed.onnx", "emulated.onnx"):
        assert run(case.folder / name, feed)["t"].all()


def test_row_27_documentation_stays_where_the_type_does(tmp_path: Path) -> None:
    proto = mlp("[one] a = MatMul(x, w) [two] b = Relu(a) [three] y = MatMul(b, v)", weight("v", 4, 4))
    proto.graph.value_info.extend([value("a", ["invented", 4]), value("b", [2, 4])])
    onnx.save(proto, tmp_path / "outside.onnx", save_as_external_data=True, size_threshold=0)
    proto = onnx.load(tmp_path / "outside.onnx", load_external_data=False)
    graph = proto.graph
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.doc_string = f"of {part.name}"
        part.metadata_props.add(key="name", value=part.name)
    case = Case(proto, tmp_path)
    for fp16, constants, values in ((["two"], "wv", "a"), (["one", "two", "three"], "", ""), (["three"], "w", "ab")):
        case.rewriter.export(case.plan(*fp16), tmp_path / "mixed.onnx")
        written = onnx.load(tmp_path / "mixed.onnx")
        sides = (written.graph.node, written.graph.initializer, written.graph.value_info)
        names = [{part.name for part in side if part.doc_string == f"of {part.name}"} for side in sides]
        assert names == [{"one", "two", "three"}, {*constants}, {*values}]
        documented = [part for side in sides for part in side if part.doc_string]
        assert all(part.metadata_props[0].value == part.name for part in documented)
        assert all(part.type == value("", [2, 4]).type for part in written.graph.value_info)
        ends = (written.graph.input, written.graph.output)
        assert (*map(list, ends),) == (list(graph.input), list(graph.output))
        assert list(written.graph.metadata_props) == list(graph.metadata_props)


def test_row_28_a_declared_output_of_a_wrong_shape(tmp_path: Path) -> None:
    """ONNX Runtime goes by what it infers."""
    for shape in ([], [2, 5], ["n", 6, 1]):
        proto = mlp("a = MatMul(x, w) y = Relu(a)", outputs=("y", "a"))
        proto.graph.output[0].CopyFrom(value("y", shape))
        case = Case(proto, tmp_path)
        assert (case.model.reshaped, [o.shape for o in case.model.outputs]) == (("y",), [(2, 4)] * 2)
        case.holds()
