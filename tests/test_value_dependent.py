"""Models with NonMaxSuppression or NonZero inside, from loading to the front: no plan fails for its number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.api.deploying import open_run
from mptune.api.models import compare
from mptune.data.archive import read_samples, save_samples
from mptune.engines.base import EngineError
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ErrorsJob, ReferenceJob
from mptune.errors import BaselineError
from mptune.graph.facts import DependentOutput, facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import WorkerState
from mptune.tuning.baseline import check_reference
from mptune.tuning.result import Front
from tests.graph.helpers import run
from tests.selecting import detector, images, points

pytestmark = pytest.mark.usefixtures("opened_here")

CODE = "value-dependent-shape"


def search(folder: Path, model: Path, data: Path, **settings: object) -> Front:
    return mptune.search(model, data=data, out=folder / "run", target="jetson-orin-nano-8gb", budget=6, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["apart", "together", "points"])
def test_a_search_judges_every_plan(tmp_path: Path, rows: str) -> None:
    batch = 2 if rows == "together" else 1
    path = tmp_path / "m.onnx"
    model = points(path) if rows == "points" else detector(path, batch, rows=rows)
    front = search(tmp_path, model, images(tmp_path / "x.npz", 8, batch))
    evaluations = open_run(tmp_path / "run").evaluations
    assert front.failures == 0
    assert len(evaluations) == (4 if rows == "points" else 6), "two groups make four plans"
    assert all(e.is_finite for e in evaluations)
    assert all(e.error_value < 0.3 for e in evaluations), "by position, one lost row moves all behind it"
    assert any(e.error_value > 0 for e in evaluations)
    (finding,) = [f for f in front.findings if f.code == CODE]
    assert (finding.severity, finding.origin) == ("info", "search")
    assert finding.where.nodes == (("select",) if rows == "points" else ("nms",))
    assert len(finding.where.outputs) == {"apart": 4, "together": 1, "points": 2}[rows]


@pytest.mark.parametrize("rows", ["apart", pytest.param("together", marks=pytest.mark.slow)])
def test_a_mixed_model_is_compared_by_sets_of_rows(tmp_path: Path, rows: str) -> None:
    """FP16 takes a detection away or adds one: that is its rounding, and no difference of another kind."""
    path, data = detector(tmp_path / "m.onnx", 1, 0.6, rows), images(tmp_path / "x.npz", 8, scale=3.0)
    mixed = mptune.apply(path, None, tmp_path / "fp16.onnx")
    counts = [[len(run(p, {"x": x[None]})[OF[rows]]) for x in np.load(data)["x"]] for p in (path, mixed)]
    assert counts[0] != counts[1], "else nothing is tested"
    found = compare(path, mixed, data=data)
    assert found.verdict == "agrees"
    assert {f.code for f in found.findings} == {"agrees"}
    assert all(0 <= statistics["error"] < 0.2 for statistics in found.outputs.values())
    strict = compare(path, mixed, data=data, tolerance={OF[rows]: 1e-5})
    assert strict.verdict == "differs"
    assert [f.code for f in strict.findings if f.code != "agrees"] == ["precision"]


OF = {"apart": "boxes", "together": "detections"}


def test_a_metric_of_the_programs_gets_whatever_outputs_there_are(tmp_path: Path) -> None:
    shapes = set[tuple[int, int]]()

    def metric(outputs: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
        shapes.add((len(outputs["boxes"]), len(reference["boxes"])))
        return abs(len(outputs["scores"]) - len(reference["scores"]))

    front = search(tmp_path, detector(tmp_path / "m.onnx"), images(tmp_path / "x.npz", 12), metric=metric)
    assert front.failures == 0
    assert any(mine != its for mine, its in shapes), "shapes differ in some plan, and it is asked"
    assert max(e.error_value for e in open_run(tmp_path / "run").evaluations) > 0


def test_a_metric_gets_outputs_whose_shape_cannot_be_compared(tmp_path: Path) -> None:
    """Two axes differ, and nothing in the model tells: only the user's metric can know."""
    (tmp_path / "mine.py").write_text("def metric(outputs, reference):\n    return outputs['y'].size\n")
    files = tmp_path / "s.npz", tmp_path / "r.npz"
    for file in files:
        save_samples(file, [{"y": np.ones((4, 4), np.float32)}])
    got = [{"y": np.ones((3, 5), np.float32)}]
    found = Scoring(*files, f"{tmp_path / 'mine.py'}:metric").error(WorkerState(), got)
    assert found.value(f"{tmp_path / 'mine.py'}:metric") == 15
    assert found.non_finite == 0
    with pytest.raises(EngineError, match=r"has shape \(3, 5\) on sample 0, the reference has \(4, 4\)"):
        Scoring(*files).error(WorkerState(), got)
    rows = Scoring(*files).error(WorkerState(), [{"y": np.ones((3, 4), np.float32)}])
    assert rows.unmatched_rows == 1, "only the number of rows differs: they are compared as a set"


def test_which_outputs_depend_on_values_and_which_are_indices(tmp_path: Path) -> None:
    facts = facts_of(load_model(detector(tmp_path / "m.onnx", declared=5)))
    assert [output.name for output in facts.dependent_outputs] == ["boxes", "scores", "labels", "images"]
    (raw,) = facts_of(load_model(detector(tmp_path / "m.onnx", rows="raw"))).dependent_outputs
    assert raw == DependentOutput("selected", 0, ("nms",), (2,))
    features, positions = facts_of(load_model(points(tmp_path / "p.onnx"))).dependent_outputs
    assert (features.axis, features.is_indices) == (0, False)
    assert (positions.axis, positions.is_indices) == (1, True)


def test_samples_without_a_detection(tmp_path: Path) -> None:
    """Some samples find nothing, in the reference or in FP16."""
    model = load_model(detector(tmp_path / "m.onnx", threshold=0.98))
    grouped = GroupedModel(model, find_groups(model))
    data, reference, typed = images(tmp_path / "x.npz", 8), tmp_path / "r.npz", tmp_path / "fp16.onnx"
    dependent = facts_of(model).dependent_outputs

    samples = np.load(data)["x"]
    save_samples(tmp_path / "s.npz", [{"x": samples[k : k + 1]} for k in range(8)])
    names = frozenset(output.name for output in dependent)
    state = WorkerState()
    report = ReferenceJob(model.path, tmp_path / "s.npz", reference, "cpu", names).run(state)
    assert check_reference(report) == ()
    counts = [len(sample["scores"]) for sample in read_samples(reference)]
    assert min(counts) == 0 < max(counts)
    Rewriter(grouped, WeightBank.write(model, tmp_path)).write(grouped.uniform(Precision.FP16), typed)
    (error,) = ErrorsJob((typed,), Scoring(tmp_path / "s.npz", reference, dependent=dependent)).run(state)
    assert error.non_finite == 0
    assert np.isfinite(error.value("relative_l2"))


def test_nothing_selected_at_all_is_no_reference(tmp_path: Path) -> None:
    model = detector(tmp_path / "m.onnx", threshold=0.9999)
    with pytest.raises(BaselineError, match="the reference is empty in every output"):
        search(tmp_path, model, images(tmp_path / "x.npz"))


def test_rows_of_detections_are_no_rows_of_the_batch(tmp_path: Path) -> None:
    """Two equal images in a batch: each box is there once for each, so rows differ and nothing is wrong."""
    model = load_model(detector(tmp_path / "m.onnx", "batch", threshold=0.0))
    names = frozenset(output.name for output in facts_of(model).dependent_outputs)
    save_samples(tmp_path / "s.npz", [{"x": np.load(images(tmp_path / "x.npz", 1, 2))["x"]}])
    report = ReferenceJob(model.path, tmp_path / "s.npz", tmp_path / "r.npz", "cpu", names).run(WorkerState())
    check_reference(report)
    assert not report.rows.mixed
