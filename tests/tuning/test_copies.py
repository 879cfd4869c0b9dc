"""The run's own copy of its model: the same nodes, groups and outputs, and told where a journey damaged it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from mptune.engines.loading import load_typed_model
from mptune.errors import RunError
from mptune.graph.groups import GroupedModel, find_groups, groups_sha256
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.run_json import ModelSection, RunFile
from mptune.rundir import RunDirectory
from mptune.settings import SearchSettings
from mptune.tuning.copies import keep_model, load_grouped
from tests.tuning.factory import make_fixed_settings, make_run_file

CORPUS = sorted((Path(__file__).parents[1] / "graph").glob("*/*.onnx"))
Kept = tuple[GroupedModel, RunDirectory, RunFile]


def keep(path: Path, run_dir: Path, groups: str | None = None) -> Kept:
    """A model, a run with its copy, and the run's file, which holds other groups where they are given."""
    model, settings, run = load_typed_model(path), SearchSettings(), RunDirectory(run_dir)
    grouped = GroupedModel(model, find_groups(model))
    keep_model(run, grouped)
    section = ModelSection(path=str(model.path), sha256=model.sha256)
    fixed = make_fixed_settings(settings, groups_sha256=groups or groups_sha256(grouped.groups))
    return grouped, run, make_run_file(settings, section, fixed)


@pytest.fixture
def kept(mlp_path: Path, run_dir: Path) -> Kept:
    return keep(mlp_path, run_dir)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_copy_has_the_same_nodes_and_groups(path: Path, run_dir: Path) -> None:
    grouped, run, file = keep(path, run_dir)
    model, copy = grouped.model, load_grouped(run, file).model
    assert copy.sha256 == model.sha256
    assert [node.name for node in copy.nodes] == [node.name for node in model.nodes]
    for granularity in ("op", "fusion", "block"):
        of_copy, of_model = find_groups(copy, granularity), find_groups(model, granularity)
        assert [(g.id, g.nodes, g.kind) for g in of_copy] == [(g.id, g.nodes, g.kind) for g in of_model]


def test_plans_of_the_copy_and_of_the_model_compute_the_same(kept: Kept, tmp_path: Path) -> None:
    original, run, file = kept
    x, outputs = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32), []
    for grouped in (original, load_grouped(run, file)):
        precision = {group.id: Precision.FP16 if k % 2 else Precision.FP32 for k, group in enumerate(grouped.groups)}
        plan = PrecisionPlan(grouped.model.sha256, precision)
        path = Rewriter(grouped).export(plan, tmp_path / f"{len(outputs)}.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x})[0])
    np.testing.assert_array_equal(*outputs)


def test_it_is_small_and_written_once(kept: Kept, mlp_path: Path) -> None:
    grouped, run, file = kept
    files = [run.weights / name for name in ("model.onnx", "fp32.bin")]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    assert files[0].stat().st_size < grouped.model.path.stat().st_size / 2
    WeightBank.write(load_grouped(run, file).model, run.weights)
    _, _, other = keep(mlp_path, run.path, groups="0")
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before
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
def test_what_a_journey_damaged_is_told(kept: Kept, name: str, is_cut: bool, match: str) -> None:
    _, run, file = kept
    path = run.weights / name
    path.write_bytes(path.read_bytes()[:-100]) if is_cut else path.unlink()
    with pytest.raises(RunError, match=match) as caught:
        load_grouped(run, file)
    assert caught.value.hint
