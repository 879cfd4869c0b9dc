"""The run's own copy of its model: the same nodes, groups and outputs, and told where a journey damaged it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from mptune.engines.loading import load_typed_model
from mptune.errors import RunError
from mptune.graph.groups import GroupedModel, find_groups, groups_sha256
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.run_json import ModelSection, RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.copies import keep_model, load_grouped
from tests.tuning.factory import make_fixed_settings, make_run_file

CORPUS = sorted((Path(__file__).parents[1] / "graph").glob("*/*.onnx"))


def describe(model: Model) -> RunFile:
    section = ModelSection(path=str(model.path), sha256=model.sha256)
    settings, groups = SearchSettings(), groups_sha256(find_groups(model))
    return make_run_file(settings, section, make_fixed_settings(settings, groups_sha256=groups))


def keep(path: Path, run_dir: Path) -> tuple[Model, RunDirectory, RunFile]:
    model, run = load_typed_model(path), RunDirectory(run_dir)
    keep_model(run, GroupedModel(model, find_groups(model)))
    return model, run, describe(model)


@pytest.fixture
def kept(mlp_path: Path, run_dir: Path) -> tuple[Model, RunDirectory, RunFile]:
    return keep(mlp_path, run_dir)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_copy_has_the_same_nodes_and_groups(path: Path, run_dir: Path) -> None:
    model, run, file = keep(path, run_dir)
    copy = load_grouped(run, file).model
    assert copy.sha256 == model.sha256
    assert [node.name for node in copy.nodes] == [node.name for node in model.nodes]
    for granularity in ("op", "fusion", "block"):
        of_copy, of_model = find_groups(copy, granularity), find_groups(model, granularity)
        assert [(g.id, g.nodes, g.kind) for g in of_copy] == [(g.id, g.nodes, g.kind) for g in of_model]


def test_plans_of_the_copy_and_of_the_model_compute_the_same(kept, tmp_path: Path) -> None:
    model, run, file = kept
    x, outputs = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32), []
    for grouped in (GroupedModel(model, find_groups(model)), load_grouped(run, file)):
        precision = {group.id: Precision.FP16 if k % 2 else Precision.FP32 for k, group in enumerate(grouped.groups)}
        path = Rewriter(grouped).export(PrecisionPlan(model.sha256, precision), tmp_path / f"{len(outputs)}.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x})[0])
    np.testing.assert_array_equal(*outputs)


def test_it_is_small_and_the_bank_stays(kept) -> None:
    model, run, file = kept
    bank = (run.weights / "fp32.bin").stat()
    assert (run.weights / "model.onnx").stat().st_size < model.path.stat().st_size / 2
    copy = load_grouped(run, file).model
    WeightBank.write(copy, run.weights)
    assert (run.weights / "fp32.bin").stat() == bank, "the copy's bank is the model's"


def test_it_is_written_once(kept) -> None:
    model, run, file = kept
    before = (run.weights / "model.onnx").stat()
    keep_model(run, GroupedModel(model, find_groups(model)))
    assert (run.weights / "model.onnx").stat() == before
    other = file.model_copy(update={"fixed_settings": file.fixed_settings.model_copy(update={"groups_sha256": "0"})})
    with pytest.raises(RunError, match="finds other layer groups"):
        load_grouped(run, other)


@pytest.mark.parametrize(
    ("name", "is_cut", "match"),
    [
        ("fp32.bin", True, "damaged or incomplete"),
        ("fp32.bin", False, "damaged or incomplete"),
        ("model.onnx", True, "damaged or incomplete"),
        ("model.onnx", False, "holds no copy"),
    ],
)
def test_what_a_journey_damaged_is_told(kept, name: str, is_cut: bool, match: str) -> None:
    _, run, file = kept
    path = run.weights / name
    path.write_bytes(path.read_bytes()[:-100]) if is_cut else path.unlink()
    with pytest.raises(RunError, match=match) as caught:
        load_grouped(run, file)
    assert caught.value.hint
