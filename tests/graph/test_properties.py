"""Any plan of any small graph: branches, shared constants, several outputs, integer paths, an If, Casts."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.interface import with_reduced_interface
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import one_per_node, run
from tests.graph.models import node, value
from tests.graph.verify import same_graph, verify

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SHAPE = (2, 4)
UNIT = 2.0**-11
"""Half the distance from 1 to the next FP16 value, relative (IEEE 754-2008, binary16)."""
TINY = 2.0**-24
"""The smallest positive FP16 value: no rounding is off by more near zero."""
LARGE = 1e3

CHECKED = settings(
    max_examples=int(os.environ.get("MPTUNE_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Known:
    """What a value is, exactly, and how far any plan may move it."""

    exact: np.ndarray
    error: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """The largest magnitude that any plan can give it."""
        return np.abs(self.exact) + self.error


def rounded(exact: np.ndarray, error: np.ndarray) -> Known:
    """One rounding to FP16 of a value that is off by ``error`` already."""
    return Known(exact, error + UNIT * (np.abs(exact) + error) + TINY)


@dataclass
class Growth:
    """A graph under construction, with what every value is under the worst plan.

    First-order error analysis (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3): every operation
    passes on its inputs' errors and rounds once; a product of n terms may accumulate in FP16 as well.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)
    count: int = 0

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def add(self, op: str, inputs: list[str], known: Known, **attributes: object) -> str:
        name = self.hidden(op, inputs, **attributes)
        self.known[name] = known
        self.floats.append(name)
        return name

    def hidden(self, op: str, inputs: list[str], **attributes: object) -> str:
        """A node whose value is no float of the usual shape."""
        name = self.fresh(op.lower())
        self.nodes.append(node(op, inputs, name, f"/{name}", **attributes))
        return name


def apply_unary(op: str, a: Known) -> Known:
    """Functions with a slope of at most 1."""
    functions = {
        "Relu": lambda x: np.maximum(x, 0),
        "Tanh": np.tanh,
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Neg": np.negative,
        "Abs": np.abs,
        "Identity": lambda x: x,
    }
    # The runtime's own Tanh and Sigmoid are approximations, good to about 1e-6.
    return rounded(functions[op](a.exact), a.error + 1e-6)


def apply_binary(op: str, a: Known, b: Known) -> Known:
    if op == "Mul":
        return rounded(a.exact * b.exact, a.size * b.size - np.abs(a.exact * b.exact))
    exact = {"Add": np.add, "Sub": np.subtract, "Max": np.maximum}[op](a.exact, b.exact)
    return rounded(exact, a.error + b.error)


def apply_product(a: Known, w: Known) -> Known:
    terms = a.exact.shape[-1]
    passed_on = a.size @ w.size - np.abs(a.exact) @ np.abs(w.exact)
    return rounded(a.exact @ w.exact, passed_on + terms * UNIT * (a.size @ w.size))


@st.composite
def grown(draw: st.DrawFn) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, Known]]:
    """A model, its feed, and what each output is."""
    seed = draw(st.integers(0, 9))
    rng = np.random.default_rng(seed)
    growth = Growth()
    feed = {
        "x": rng.standard_normal(SHAPE).astype(np.float32),
        "z": rng.standard_normal(SHAPE).astype(np.float32),
        "i": rng.integers(-3, 4, SHAPE),
        "flag": np.array(draw(st.booleans())),
    }
    for name in ("x", "z"):
        growth.floats.append(name)
        growth.known[name] = rounded(feed[name].astype(np.float64), np.zeros(SHAPE))
    for name, shape in (("w", (4, 4)), ("row", (4,)), ("scale", ())):
        values = (rng.standard_normal(shape) * 0.5).astype(np.float32)
        growth.constants[name] = values
        growth.known[name] = rounded(values.astype(np.float64), np.zeros(shape))
    for _ in range(draw(st.integers(2, 12))):
        nodes, floats = len(growth.nodes), list(growth.floats)
        draw(st.sampled_from(STEPS))(draw, growth, feed)
        newest = growth.floats[-1]
        if np.max(growth.known[newest].size) > LARGE:  # nothing may overflow, or no bound holds
            del growth.nodes[nodes:]
            growth.floats = floats
    return finish(draw, growth, feed)


def unary(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    op, a = draw(st.sampled_from(["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity"])), pick(draw, growth.floats)
    growth.add(op, [a], apply_unary(op, growth.known[a]))


def binary(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    op = draw(st.sampled_from(["Add", "Sub", "Mul", "Max"]))
    a, b = pick(draw, growth.floats), pick(draw, [*growth.floats, "row", "scale"])
    growth.add(op, [a, b], apply_binary(op, growth.known[a], growth.known[b]))


def product(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    a = pick(draw, growth.floats)
    growth.add("MatMul", [a, "w"], apply_product(growth.known[a], growth.known["w"]))


def integers(draw: st.DrawFn, growth: Growth, feed: dict[str, np.ndarray]) -> None:
    """Integers become floats."""
    doubled = growth.hidden("Add", ["i", "i"])
    growth.add("Cast", [doubled], rounded(2.0 * feed["i"], np.zeros(SHAPE)), to=FLOAT)


def shapes(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    """A shape that is read from one float shapes another; a count becomes a float."""
    a, b = pick(draw, growth.floats), pick(draw, growth.floats)
    shape = growth.hidden("Shape", [a])
    same = growth.add("Reshape", [b, shape], rounded(growth.known[b].exact, growth.known[b].error))
    count = growth.hidden("Cast", [growth.hidden("Size", [a])], to=FLOAT)
    known = rounded(np.array(8.0), np.zeros(()))
    growth.add("Add", [same, count], apply_binary("Add", growth.known[same], known))


def split(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    """Two outputs, joined the other way round."""
    a = pick(draw, growth.floats)
    parts = [growth.fresh("part"), growth.fresh("part")]
    growth.nodes.append(node("Split", [a], parts, f"/{parts[0]}", axis=1))
    known = rounded(*(np.concatenate([v[:, 2:], v[:, :2]], 1) for v in (growth.known[a].exact, growth.known[a].error)))
    growth.add("Concat", parts[::-1], known, axis=1)


def where(draw: st.DrawFn, growth: Growth, feed: object) -> None:
    """A comparison that a rounding may turn chooses between two values."""
    a, b, c, d = (pick(draw, growth.floats) for _ in range(4))
    ka, kb, kc, kd = (growth.known[n] for n in (a, b, c, d))
    chosen = ka.exact > kb.exact
    sure = np.abs(ka.exact - kb.exact) > ka.error + kb.error
    error = np.maximum(kc.error, kd.error) + np.where(sure, 0, np.abs(kc.exact - kd.exact))
    growth.add("Where", [growth.hidden("Greater", [a, b]), c, d], rounded(np.where(chosen, kc.exact, kd.exact), error))


def branch(draw: st.DrawFn, growth: Growth, feed: dict[str, np.ndarray]) -> None:
    """If: each branch reads an outer value."""
    graphs, outer = {}, {}
    for name, op in (("then_branch", "Tanh"), ("else_branch", "Neg")):
        outer[name] = pick(draw, growth.floats)
        result = growth.fresh("branch")
        graphs[name] = helper.make_graph([node(op, [outer[name]], result, op)], name, [], [value(result, SHAPE)])
    taken, op = ("then_branch", "Tanh") if feed["flag"] else ("else_branch", "Neg")
    growth.add("If", ["flag"], apply_unary(op, growth.known[outer[taken]]), **graphs)


STEPS = [unary, unary, binary, binary, product, product, integers, shapes, split, where, branch]


def pick(draw: st.DrawFn, names: list[str]) -> str:
    return draw(st.sampled_from(names))


def finish(
    draw: st.DrawFn, growth: Growth, feed: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, Known]]:
    """Choose the outputs: some values, perhaps an input, a constant."""
    if all(n.op_type == "Cast" or n.output[0] not in growth.floats for n in growth.nodes):  # nothing computes in FP32
        growth.add("Neg", [growth.floats[-1]], apply_unary("Neg", growth.known[growth.floats[-1]]))
    names = {growth.floats[-1], *draw(st.lists(st.sampled_from([*growth.floats, "row"]), max_size=3))}
    inputs = [value("x", SHAPE), value("z", SHAPE), value("i", SHAPE, INT64), value("flag", [], BOOL)]
    if draw(st.booleans()):
        inputs.append(value("scale", []))  # an initializer that callers may replace
    outputs = [value(n, growth.known[n].exact.shape) for n in sorted(names)]
    constants = [numpy_helper.from_array(v, n) for n, v in growth.constants.items()]
    proto = models.model(growth.nodes, inputs, outputs, constants, opset=draw(st.sampled_from([13, 17])))
    return proto, feed, {n: growth.known[n] for n in names}


@given(grown(), st.integers(0, 2**32 - 1), st.sampled_from(["fusion", "node", "node"]))
@CHECKED
def test_any_plan_of_any_graph(
    made: tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, Known]], bits: int, kind: str
) -> None:
    proto, feed, known = made
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load_model(models.save(proto, folder))
        groups = find_groups(model) if kind == "fusion" else one_per_node(model)
        bank = WeightBank.write(model, folder)
        rewriter = Rewriter(GroupedModel(model, groups), bank)
        chosen = {g.id: Precision.named("fp16" if bits >> k % 32 & 1 else "fp32") for k, g in enumerate(groups)}
        plan = PrecisionPlan(model.sha256, chosen)
        typed = rewriter.write(plan, folder / "typed.onnx")
        verify(rewriter, plan, typed)
        grouped = GroupedModel(model, groups, io="fp16")
        reduced = Rewriter(grouped, bank).write(plan, folder / "reduced.onnx")
        if plan.reduced_groups:
            verify(Rewriter(with_reduced_interface(grouped), bank), plan, reduced)
        else:
            assert reduced.read_bytes() == typed.read_bytes(), "the FP32 plan keeps its interface"
        reloaded = GroupedModel(load_model(folder / "model.onnx"), groups)
        again = Rewriter(reloaded, bank).write(plan, folder / "again.onnx")
        assert typed.read_bytes() == again.read_bytes()
        fp32 = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32)
        exact = Rewriter(GroupedModel(model, groups)).export(fp32, folder / "fp32.onnx")
        assert same_graph(onnx.load(exact).graph, proto.graph), "the FP32 plan gives the model back"
        emulated = Emulator(GroupedModel(model, groups)).write(fp32, folder / "emulated.onnx")
        assert emulated.read_bytes() == exact.read_bytes()
        emulated = Emulator(GroupedModel(model, groups), bank).write(plan, folder / "emulated.onnx")
        onnx.checker.check_model(str(emulated), full_check=True)
        feed = {i.name: feed[i.name] for i in model.inputs}
        for written in (typed, emulated):
            for output, y in run(written, feed).items():
                off = np.abs(y.astype(np.float64) - known[output].exact)
                assert np.all(off <= known[output].error * 1.01 + 1e-5), (written.name, output, off.max())
