"""Plans of FP32, FP16 and BF16: every model of the corpus and of the exporters, as it is and raised to opset 22."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.engines.tensorrt.backend import refused_in_bf16
from mptune.errors import ModelError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.variants import write_widened
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import plans, relative_l2, run
from tests.graph.test_corpus import CORPUS, DISCONTINUOUS, EXPORTED, NOT_IN_TENSORRT_RTX, feed_of
from tests.graph.verify import verify

ALL = (Precision.BF16, Precision.FP32, Precision.FP16)
OPSETS = (None, 22)
MODELS = {path.stem: path for path in (*CORPUS, *EXPORTED)}
LONG = ("transformer_torchscript_14", "transformer_torchscript_20")  # as that of opset 17
QUICK = [*((name, None) for name in MODELS if name not in LONG), ("if_branches", 22), ("cnn_torchscript_13", 22)]


def hold(path: Path, opset: int | None, tmp_path: Path, count: int) -> None:
    """Random plans are valid, ideal, realised, and the typed model computes what its emulation does."""
    model = load_model(path, opset=opset)
    bank = WeightBank.write(model, tmp_path, precisions=REDUCED)
    feed = feed_of(path, model)
    reference = run(path, feed)
    for granularity in ("fusion", "op"):
        groups = find_groups(model, granularity)  # type: ignore[arg-type]
        grouped = GroupedModel(model, groups)
        hazards = find_hazards(grouped)
        rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
        for plan in plans(model, groups, count, seed=len(granularity), precisions=ALL):
            out = rewriter.write(plan, tmp_path / "typed.onnx")
            verify(rewriter, plan, out)
            safe = without_hazards(plan, hazards)
            typed, emulated = rewriter.write(safe, out), emulator.write(safe, tmp_path / "emulated.onnx")
            outputs = [run(emulated, feed)]
            outputs += [] if safe.bf16_groups else [run(typed, feed)]  # the CPU lacks kernels of BF16
            for name, y in ((name, y) for each in outputs for name, y in each.items()):
                assert y.dtype == reference[name].dtype
                if path.stem not in DISCONTINUOUS and y.dtype.kind == "f":
                    assert relative_l2(y, reference[name]) < (0.15 if safe.bf16_groups else 2e-2), name
            computes_the_same(typed, outputs[0], feed, tmp_path, discontinuous=path.stem in DISCONTINUOUS)


def without_hazards(plan: PrecisionPlan, hazards: Sequence[Hazard]) -> PrecisionPlan:
    """The plan with groups in FP32 where their precision cannot be right."""
    for precision in REDUCED:
        there = set(pinned_by_hazards(hazards, precision)) & set(plan.groups_in(precision))
        plan = plan.replace(dict.fromkeys(there, Precision.FP32))
    return plan


def computes_the_same(
    typed: Path, emulated: dict[str, np.ndarray], feed: dict[str, np.ndarray], tmp_path: Path, *, discontinuous: bool
) -> None:
    """What is read back from the typed model, computed in FP32 with its roundings, is the emulation of the plan."""
    mixed = load_model(typed, any_precision=True)
    if discontinuous or any(node.has_subgraph for node in mixed.nodes):
        return
    bank = WeightBank.write(mixed, tmp_path / "mixed")
    for name, y in run(write_widened(mixed, bank, tmp_path / "mixed" / "w.onnx"), feed).items():
        if y.dtype.kind == "f":
            assert relative_l2(y, emulated[name]) < 2e-2, name


@pytest.mark.parametrize(("name", "opset"), QUICK)
def test_plans_are_valid_ideal_and_emulated(name: str, opset: int | None, tmp_path: Path) -> None:
    hold(MODELS[name], opset, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("path", [*CORPUS, *EXPORTED], ids=lambda p: p.stem)
def test_a_hundred_plans_are(path: Path, opset: int | None, tmp_path: Path) -> None:
    hold(path, opset, tmp_path, 100)


@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("opset", [None, pytest.param(22, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_tensorrt_rtx_takes_them(path: Path, opset: int | None, tmp_path: Path) -> None:
    """What it takes in two precisions, or says why in its own words: then the search keeps it out of BF16."""
    trt = rtx.library()
    model = load_model(path, opset=opset)
    grouped = GroupedModel(model, find_groups(model))
    rewriter = Rewriter(grouped, WeightBank.write(model, tmp_path, precisions=REDUCED))
    refused = {grouped.owners[node.node] for node in refused_in_bf16(model, "tensorrt-rtx")}
    for number, plan in enumerate(plans(model, grouped.groups, 2, precisions=ALL)):
        lacking = [group for group in plan.bf16_groups if group in refused]
        if lacking and opset is not None:
            assert "must have same input types" in str(rtx.refusal(trt, rewriter.write(plan, tmp_path / "typed.onnx")))
            plan = plan.replace(dict.fromkeys(lacking, Precision.FP32))
        said = rtx.refusal(trt, rewriter.write(plan, tmp_path / "typed.onnx"), build=number < 1)
        if path.stem in NOT_IN_TENSORRT_RTX:
            assert number >= 1 or NOT_IN_TENSORRT_RTX[path.stem] in str(said)
        else:
            assert said is None, plan


def test_a_group_that_lacks_bf16_is_fp32_as_a_whole() -> None:
    def precisions(opset: int | None) -> set[Precision]:
        model = load_model(MODELS["cnn_batchnorm"], opset=opset)
        grouped = GroupedModel(model, find_groups(model))
        of_node = Rewriter(grouped).types.node_precisions(grouped.uniform(Precision.BF16))
        return {of_node[name] for group in grouped.groups if "Conv" in group.ops for name in group.nodes}

    assert precisions(None) == {Precision.FP32}
    assert precisions(22) == {Precision.BF16}


@pytest.mark.parametrize("external", [False, True])
def test_a_raised_model_computes_the_same(external: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    shutil.copy(MODELS["cnn_torchscript_13"], path)
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    model, raised = load_model(path), load_model(path, opset=22)
    assert raised.opset == 22
    assert raised.sha256 == model.sha256
    assert raised.initializers.keys() >= {n for n, c in model.initializers.items() if c.nbytes > 1024}
    grouped = GroupedModel(raised, find_groups(raised))
    out = Rewriter(grouped).export(grouped.uniform(Precision.FP32), tmp_path / "raised.onnx")
    feed = {"image": np.random.default_rng(0).standard_normal((2, 3, 16, 16), np.float32)}
    before, after = run(path, feed), run(out, feed)
    assert before.keys() == after.keys()
    for name, y in before.items():
        assert np.allclose(y, after[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("opset", "words"), [(5, "the model has"), (99, "knows up to")])
def test_an_opset_that_cannot_be_is_refused(opset: int, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(EXPORTED[0], opset=opset)
