"""What torch's two exporters write for a CNN and a transformer, at opsets 13 to 21."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import casts, check, plans, relative_l2, run

EXPORTED = sorted((Path(__file__).parent / "exported").glob("*.onnx"))


def feed_for(model: Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"image": (2, 3, 16, 16), "tokens": (2, 6), "memory": (2, 5, 16)}
    return {
        i.name: rng.integers(0, 50, shapes[i.name])
        if i.dtype == "int64"
        else rng.standard_normal(shapes[i.name], np.float32)
        for i in model.inputs
    }


@pytest.mark.parametrize("path", EXPORTED, ids=lambda p: p.stem)
def test_every_plan_is_valid_runs_and_stays_close(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    groups = find_groups(model)
    grouped = GroupedModel(model, groups)
    pinned = pinned_by_hazards(find_hazards(grouped))
    bank = WeightBank.write(model, tmp_path)
    rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
    feed = feed_for(model)
    reference = run(path, feed)
    interface = [
        (v.name, v.type.tensor_type.elem_type) for v in (*onnx.load(path).graph.input, *onnx.load(path).graph.output)
    ]
    before = sum(n.op_type == "Cast" for n in model.nodes)
    for plan in plans(model, groups, 2):
        plan = plan.replace(dict.fromkeys(pinned, Precision.FP32))
        out = rewriter.write(plan, tmp_path / "typed.onnx")
        typed = check(out)
        assert [(v.name, v.type.tensor_type.elem_type) for v in (*typed.graph.input, *typed.graph.output)] == interface
        resolution = rewriter.types.resolve(plan)
        assert casts(out, before) == sum(map(len, resolution.casts.values())) - len(resolution.dropped)
        for written in (out, emulator.write(plan, tmp_path / "emulated.onnx")):
            for name, y in run(written, feed).items():
                assert y.dtype == reference[name].dtype
                assert relative_l2(y, reference[name]) < 1e-2, (written.name, name)


@pytest.mark.parametrize("path", EXPORTED, ids=lambda p: p.stem)
def test_groups_are_what_a_person_would_draw(path: Path) -> None:
    kinds = [g.kind for g in find_groups(load_model(path))]
    if path.stem.startswith("cnn"):
        assert kinds.count("conv") == 5
        assert kinds.count("resample") == 1
    else:
        assert kinds.count("attention") == 3
        assert kinds.count("norm") == 5
