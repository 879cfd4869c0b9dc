"""The model's own Casts, between FP32, FP16 and BF16 or from integers: merged under any plan, never doubled."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.variants import write_widened
from mptune.graph.writing.weights import WeightBank, rounded_tensor
from tests.graph.helpers import plans, relative_l2, run
from tests.graph.models import constant, save, text, weight
from tests.graph.verify import same_graph, verify

ALL = (Precision.FP32, Precision.FP16, Precision.BF16)
FEED = {"x": np.random.default_rng(0).standard_normal((3, 8), np.float32)}
FLOAT = TensorProto.FLOAT
CODES = tuple(precision.onnx_type for precision in PRECISIONS)
TYPES = {FLOAT: "float", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}


def _stored(code: int, numbers: np.random.Generator, name: str) -> onnx.TensorProto:
    """A constant that the model stores in this type."""
    precision = next(p for p in PRECISIONS if p.onnx_type == code)
    tensor = rounded_tensor(numbers.standard_normal(8).astype(np.float32), precision)
    tensor.name = name
    return tensor


def _random_network(seed: int) -> onnx.ModelProto:
    """Computing in FP32, with chains of Casts between, before and behind it, and at outputs."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    nodes: list[str] = []
    constants: list[onnx.TensorProto] = []
    outputs: list[tuple[str, int]] = []
    values = [("x", FLOAT)]
    read: set[str] = set()
    cast: set[tuple[str, int]] = set()

    def draw(code: int = FLOAT) -> str:
        name = rng.choice([v for v in values[-5:] + values[:1] if v[1] == code])[0]
        read.add(name)
        return name

    def add(operator: str, *inputs: str) -> str:
        nodes.append(f"[n{len(nodes)}] v{len(nodes)} = {operator}({', '.join(inputs)})")
        return f"v{len(nodes) - 1}"

    def linear(x: str) -> str:
        name = f"w{len(nodes)}"
        constants.append(weight(name, 8, 8))
        constants.append(weight(f"b{name}", 8, scale=0.1))
        return add("Add", add("MatMul", x, name), f"b{name}")

    for _ in range(rng.randint(6, 16)):
        kind = rng.random()
        if kind < 0.5:  # a model that casts a value twice to one type keeps what that makes needless
            pair = rng.choice([pair for pair in product(CODES, CODES) if pair[0] != pair[1] or FLOAT in pair])
            if any(code == pair[0] and (name, pair[1]) not in cast for name, code in values[-5:] + values[:1]):
                source = draw(pair[0])
                if (source, pair[1]) not in cast:
                    cast.add((source, pair[1]))
                    values.append((add(f"Cast<to = {pair[1]}>", source), pair[1]))
        elif kind < 0.6:
            constants.append(_stored(rng.choice(CODES[1:]), numbers, f"stored{len(nodes)}"))
            values.append((add("Add", draw(), add("Cast<to = 1>", constants[-1].name)), FLOAT))
        elif kind < 0.8:
            values.append((linear(draw()), FLOAT))
        else:
            values.append((add("Add", add("Tanh", draw()), draw()), FLOAT))
    values.append((linear(draw()), FLOAT))
    for name, code in values[1:]:
        if name not in read or rng.random() < 0.1:  # the value itself, or with a node between
            outputs.append((name if rng.random() < 0.5 else add("Identity", name), code))
    ends = ", ".join(f"{TYPES[code]}[batch,8] {name}" for name, code in outputs)
    return text(f"(float[batch,8] x) => ({ends}) {{ {' '.join(nodes)} }}", *constants, opset=22)


@pytest.mark.parametrize("seed", [3, 8, 10, 17, 19, 26, 42, 45, 52])
def test_random_networks_of_casts(seed: int, tmp_path: Path) -> None:
    """Random plans are valid, have no needless Cast, and compute what their emulation does; all-FP32 is the model."""
    path = save(_random_network(seed), tmp_path)
    loaded = load_model(path)
    bank = WeightBank.write(loaded, tmp_path / "bank", precisions=REDUCED)
    is_readable = all(o.dtype != "bfloat16" for o in loaded.outputs)  # NumPy has no BF16
    for granularity in ("fusion", "op"):
        grouped = GroupedModel(loaded, find_groups(loaded, granularity))  # type: ignore[arg-type]
        rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
        unchanged = rewriter.export(grouped.uniform(Precision.FP32), tmp_path / "o.onnx")
        assert same_graph(onnx.load(unchanged).graph, onnx.load(path).graph)
        for plan in plans(loaded, grouped.groups, 4, seed=len(granularity), precisions=ALL):
            typed = rewriter.write(plan, tmp_path / "bank" / "typed.onnx")
            verify(rewriter, plan, typed)
            emulated = emulator.write(plan, tmp_path / "bank" / "emulated.onnx")
            if is_readable:
                mixed = load_model(typed, any_precision=True)
                widened = WeightBank.write(mixed, tmp_path / "mixed")
                outputs = run(write_widened(mixed, widened, widened.directory / "w.onnx"), FEED)
                for name, y in run(emulated, FEED).items():
                    assert relative_l2(outputs[name], y) < 1e-2, (plan, name)


@pytest.mark.parametrize("of_cast", DEFAULT_PRECISIONS)
def test_readers_in_fp32_get_exact_integers_under_any_plan(tmp_path: Path, of_cast: Precision) -> None:
    """The Cast of ids that two products read is no group to search."""
    ids = np.array([[1, 2049], [4097, 3]])
    nodes = "[cast] f = Cast<to = 1>(ids) [one] y1 = MatMul(f, w1) [two] y2 = MatMul(f, w2)"
    graph = f"(int64[2,2] ids) => (float[2,2] y1, float[2,2] y2) {{ {nodes} }}"
    proto = text(graph, constant("w1", np.eye(2)), weight("w2", 2, 2))
    loaded = load_model(save(proto, tmp_path))
    grouped = GroupedModel(loaded, find_groups(loaded))
    assert "integers" in str(next(g.pinned for g in grouped.groups if g.nodes == ("cast",)))
    wanted = {"cast": of_cast, "one": Precision.FP32, "two": Precision.FP16}
    plan = PrecisionPlan(loaded.sha256, {g.id: wanted[g.nodes[0]] for g in grouped.groups})
    bank = WeightBank.write(loaded, tmp_path)
    rewriter = Rewriter(grouped, bank)
    typed = rewriter.write(plan, tmp_path / "typed.onnx")
    verify(rewriter, plan, typed)
    casts = [n for n in onnx.load(typed).graph.node if n.op_type == "Cast" and n.input[0] == "ids"]
    assert sorted(n.attribute[0].i for n in casts) == [FLOAT, TensorProto.FLOAT16]
    emulated = Emulator(grouped, bank).write(plan, tmp_path / "emulated.onnx")
    results = [run(path, {"ids": ids}) for path in (typed, emulated)]
    assert all(np.array_equal(result["y1"], ids.astype(np.float32)) for result in results)
    assert np.allclose(results[0]["y2"], results[1]["y2"], rtol=2e-3)
