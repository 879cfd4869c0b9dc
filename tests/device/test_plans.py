"""Plans through build, load, run and time on each machine: nothing that TensorRT's headers forbid is called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from tests.device.bench import Bench
from tests.device.machines import MACHINES, ORIN
from tests.graph import helpers, models
from tests.graph.models import node, value

pytestmark = pytest.mark.tensorrt_rtx

CORPUS = Path(__file__).parents[1] / "graph" / "corpus"
MODELS = (
    "cnn_batchnorm",
    "detector_topk",
    "dynamic_sequence",
    "flow_gridsample",
    "fp64_path",
    "if_branches",
    "mask_1e9",
    "qdq",
    "unet_resize",
    "vit",
)
PLANS = 100


@pytest.fixture(params=MACHINES)
def bench(request: pytest.FixtureRequest, mlp_path: Path, tmp_path: Path) -> Iterator[Bench]:
    with Bench(MACHINES[request.param], mlp_path, tmp_path) as bench:
        yield bench


def test_a_plan_on_each_machine(bench: Bench) -> None:
    """The shapes of the samples differ; builds with a timing cache give the same engine."""
    (plan,) = helpers.plans(bench.model, bench.groups, 1, seed=3)[2:]
    samples = [helpers.feeds(bench.model, seed, batch=batch) for seed, batch in ((0, 3), (1, 1), (2, 4))]
    bench.run(plan, samples)


def test_values_that_are_shapes(tmp_path: Path) -> None:
    """An input on the host decides the shape of an output. TensorRT-RTX takes no shapes that depend on other values."""
    generator = np.random.default_rng(0)
    nodes = [
        node("MatMul", ["x", "a"], "h", "product"),
        node("Relu", ["h"], "r", "relu"),
        node("Reshape", ["r", "shape"], "y", "reshape"),
    ]
    inputs = [value("x", ["rows", 8]), value("shape", [2], TensorProto.INT64)]
    proto = models.model(nodes, inputs, [value("y", ["a", "b"])], [models.weight("a", 8, 8)])
    samples = [
        {"x": generator.normal(size=(rows, 8)).astype(np.float32), "shape": np.array(shape)}
        for rows, shape in ((2, (4, 4)), (3, (2, 12)), (2, (8, 2)))
    ]
    with Bench(ORIN, models.save(proto, tmp_path), tmp_path) as bench:
        for plan in helpers.plans(bench.model, bench.groups, 0):
            found = bench.run(plan, samples)
            assert [one["y"].shape for one in found] == [(4, 4), (2, 12), (8, 2)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_the_corpus(name: str, tmp_path: Path) -> None:
    """A third of the plans on each machine, half of those at each granularity; the plans are drawn without regard to
    what is sensible."""
    done = 0
    for number, (machine, granularity) in enumerate((m, g) for m in MACHINES.values() for g in ("fusion", "op")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Bench(machine, CORPUS / f"{name}.onnx", folder, granularity) as bench:
            count = PLANS // 6 + 1
            samples = [helpers.feeds(bench.model, seed, batch=batch) for seed, batch in ((0, 2), (1, 3))]
            for plan in helpers.plans(bench.model, bench.groups, count - 2, seed=number):
                bench.run(plan, samples)
                done += 1
    assert done >= PLANS
