"""The model's own Casts between FP32, FP16 and BF16: kept or folded under any plan, never doubled."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mptune.errors import ModelError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, REDUCED, Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank, rounded_tensor
from mptune.graph.writing.widened import write_widened
from tests.graph.helpers import plans, relative_l2, run
from tests.graph.net import Net
from tests.graph.verify import same_graph, verify

ALL = (Precision.FP32, Precision.FP16, Precision.BF16)
FEED = {"x": np.random.default_rng(0).standard_normal((3, 8), np.float32)}
FLOAT = TensorProto.FLOAT
CODES = tuple(precision.onnx_type for precision in PRECISIONS)


def _saved(net: Net, folder: Path) -> Path:
    onnx.save(net.model(), folder / "model.onnx")
    return folder / "model.onnx"


def _stored(net: Net, code: int) -> str:
    """A constant that the model stores in this type."""
    precision = next(p for p in PRECISIONS if p.onnx_type == code)
    tensor = rounded_tensor(net.rng.standard_normal(8).astype(np.float32), precision)
    tensor.name = net.fresh("stored")
    net.constants.append(tensor)
    return tensor.name


def _random_net(seed: int) -> Net:
    """Computing in FP32, with chains of Casts between, before and behind it, and at outputs."""
    rng, net = random.Random(seed), Net(f"casts_{seed}", opset=22, ir_version=10)
    values = [(net.input("x", ["batch", 8]), FLOAT)]
    read: set[str] = set()

    cast: set[tuple[str, int]] = set()

    def take() -> tuple[str, int]:
        value = rng.choice([v for v in values[-5:] + values[:1] if v[1] == FLOAT])
        read.add(value[0])
        return value

    for _ in range(rng.randint(6, 16)):
        kind = rng.random()
        if kind < 0.5:  # a model that casts a value twice to one type keeps what that makes needless
            of, code = rng.choice([pair for pair in product(CODES, CODES) if pair[0] != pair[1] or FLOAT in pair])
            found = [v for v in values[-5:] + values[:1] if v[1] == of and (v[0], code) not in cast]
            if found:
                source = rng.choice(found)[0]
                read.add(source)
                cast.add((source, code))
                values.append((net.op("Cast", source, to=code), code))
        elif kind < 0.6:
            constant = net.op("Cast", _stored(net, rng.choice(CODES[1:])), to=FLOAT)
            values.append((net.op("Add", take()[0], constant), FLOAT))
        elif kind < 0.8:
            values.append((net.linear(take()[0], 8, 8), FLOAT))
        else:
            values.append((net.op("Add", net.op("Tanh", take()[0]), take()[0]), FLOAT))
    values.append((net.linear(take()[0], 8, 8), FLOAT))
    for name, code in values[1:]:
        if name not in read or rng.random() < 0.1:
            if rng.random() < 0.5:  # the value itself, with no node between
                net.outputs.append(helper.make_tensor_value_info(name, code, ["batch", 8]))
            else:
                net.output(name, f"{name}_out", ["batch", 8], code)
    return net


def _hold(path: Path, folder: Path, count: int) -> None:
    """Random plans are valid, have no needless Cast, and compute what their emulation does; all-FP32 is the model."""
    model = load_model(path)
    bank = WeightBank.write(model, folder / "bank", precisions=REDUCED)
    is_readable = all(o.dtype != "bfloat16" for o in model.outputs)  # NumPy has no BF16
    for granularity in ("fusion", "op"):
        grouped = GroupedModel(model, find_groups(model, granularity))  # type: ignore[arg-type]
        rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
        assert same_graph(
            onnx.load(rewriter.export(grouped.uniform(Precision.FP32), folder / "o.onnx")).graph, onnx.load(path).graph
        )
        for plan in plans(model, grouped.groups, count, seed=len(granularity), precisions=ALL):
            typed = rewriter.write(plan, folder / "bank" / "typed.onnx")
            verify(rewriter, plan, typed)
            emulated = emulator.write(plan, folder / "bank" / "emulated.onnx")
            if not is_readable:
                continue
            mixed = load_model(typed, any_precision=True)
            widened = write_widened(mixed, WeightBank.write(mixed, folder / "mixed"), folder / "mixed" / "w.onnx")
            found = run(widened, FEED)
            for name, y in run(emulated, FEED).items():
                assert relative_l2(found[name], y) < 1e-2, (plan, name)


@pytest.mark.parametrize("seed", [10, 17, 19, 42, 45, 52])
def test_random_networks_of_casts(seed: int, tmp_path: Path) -> None:
    _hold(_saved(_random_net(seed), tmp_path), tmp_path, 4)


@pytest.mark.parametrize("stored", REDUCED)
@pytest.mark.parametrize("read_in", REDUCED)
def test_weights_stored_in_a_reduced_type_are_cast_once(stored: Precision, read_in: Precision, tmp_path: Path) -> None:
    net = Net("stored", opset=22, ir_version=10)
    weight = net.op("Cast", _stored(net, stored.onnx_type), to=FLOAT)
    net.output(net.op("Mul", net.op("Relu", net.input("x", ["batch", 8])), weight), "y", ["batch", 8])
    model = load_model(_saved(net, tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    typed = onnx.load(Rewriter(grouped).export(grouped.uniform(read_in), tmp_path / "typed.onnx"))
    of_weight = [n for n in typed.graph.node if n.op_type == "Cast" and n.input[0].startswith("stored")]
    assert [n.attribute[0].i for n in of_weight] == ([] if stored is read_in else [read_in.onnx_type])


def test_a_model_that_is_bf16_already_is_refused(tmp_path: Path) -> None:
    net = Net("bf16", opset=22, ir_version=10)
    x = net.input("x", ["batch", 8], TensorProto.BFLOAT16)
    net.output(net.op("Relu", x), "y", ["batch", 8], TensorProto.BFLOAT16)
    with pytest.raises(ModelError, match="is BF16 already"):
        load_model(_saved(net, tmp_path))
