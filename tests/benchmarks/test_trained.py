"""``benchmarks.trained`` without its networks: judges, steps that fail, archives, predictions of converted files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.trained import judges
from benchmarks.trained.archive import pack_all, unpack_all
from benchmarks.trained.judging import predicted_ms
from benchmarks.trained.table import better_elsewhere, pages, summary
from benchmarks.trained.variants import CHOSEN, FP32, VARIANTS, file_of
from mptune.api.searching import search

WIDTH = 64


def network(path: Path, half: bool = False) -> Path:
    """Two products; with ``half`` as a converter writes them in FP16, inputs and outputs kept."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2)]
    cast = [lambda a, b, to: helper.make_node("Cast", [a], [b], f"cast_{b}", to=to)] * half
    nodes = [
        *(make("x", "h", TensorProto.FLOAT16) for make in cast),
        helper.make_node("MatMul", ["h" if half else "x", "w0"], ["a"], "first"),
        helper.make_node("MatMul", ["a", "w1"], ["b" if half else "y"], "second"),
        *(make("b", "y", TensorProto.FLOAT) for make in cast),
    ]
    tensors = [numpy_helper.from_array(w.astype(np.float16) if half else w, f"w{k}") for k, w in enumerate(weights)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "two", values[:1], values[1:], tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "set" / "file-type"
    network(file_of(made, FP32))
    network(file_of(made, "ONNX Runtime"), half=True)
    for which in ("search", "held_out"):
        (made / which).mkdir()
        for k in range(6):
            values = np.random.default_rng(k).standard_normal((1, WIDTH)).astype(np.float32)
            np.savez(made / which / f"{k:02}.npz", x=values)
    return made


def test_a_moved_box_a_lost_box_and_a_box_too_many_are_seen() -> None:
    judge = judges.yolo_boxes((), 0.25, 0.45, 320)
    boxes = np.array([[50, 60, 20, 20, 0.9], [200, 200, 40, 30, 0.8]], np.float32).T[None]
    near, moved, lost = boxes.copy(), boxes.copy(), boxes.copy()
    near[0, :2, 0] += 1.5
    moved[0, 0, 0] += 2.5
    lost[0, 4, 1] = 0.2
    more = np.concatenate([boxes, np.array([[[150], [60], [20], [20], [0.9]]], np.float32)], 2)
    assert judge([{"o": boxes}], [{"o": near}]).kept
    for wrong in (moved, lost, more, np.full_like(boxes, np.nan)):
        assert not judge([{"o": boxes}], [{"o": wrong}]).kept


def test_text_is_read_without_repeats_and_blanks() -> None:
    steps = [0, 7, 7, 0, 7, 9]
    wanted, other = np.zeros((1, 6, 600), np.float32), np.zeros((1, 6, 600), np.float32)
    wanted[0, range(6), steps] = 1.0
    other[0, range(6), [7, 0, 7, 7, 9, 9]] = 1.0
    assert judges.texts([{"o": wanted}], [{"o": other}]).kept
    other[0, 5, 3] = 2.0
    assert judges.texts([{"o": wanted}, {"o": wanted}], [{"o": wanted}, {"o": other}]).text == "1 of 2 texts"


def test_pitch_is_judged_where_it_is_certain() -> None:
    frames = np.full((2, 360), 1e-3, np.float32)
    frames[0, 100], frames[1, 200] = 0.9, 0.3
    doubtful, wrong = frames.copy(), frames.copy()
    doubtful[1] = np.roll(frames[1], 3)
    wrong[0] = np.roll(frames[0], 1)
    assert judges.pitch([{"o": frames}], [{"o": doubtful}]).kept
    assert not judges.pitch([{"o": frames}], [{"o": wrong}]).kept
    assert not judges.pitch([{"o": frames}], [{"o": np.full_like(frames, np.nan)}]).kept


def test_a_note_at_the_threshold_may_be_there_or_not_and_others_may_not() -> None:
    grid = np.zeros((1, 20, 88), np.float32)
    grid[0, 5, 40], grid[0, 12, 50] = 0.9, 0.501
    near, late, more = grid.copy(), np.roll(grid, 5, 1), grid.copy()
    near[0, 12, 50] = 0.495
    more[0, 15, 60] = 0.52
    assert judges.notes([{"o": grid}], [{"o": near}]).kept
    assert judges.notes([{"o": grid}], [{"o": np.roll(near, 4, 1)}]).kept
    for wrong in (late, more, np.full_like(grid, np.nan)):
        assert not judges.notes([{"o": grid}], [{"o": wrong}]).kept


def test_a_score_that_is_no_number_is_lost_wherever_it_stands() -> None:
    scores = [{"o": np.full((1, 1), 3.0)} for _ in range(3)]
    assert judges.opinion()(scores, [*scores[:2], {"o": np.full((1, 1), 3.04)}]).kept
    for k in range(3):
        assert not judges.opinion()(scores, [*scores[:k], {"o": np.full((1, 1), np.nan)}, *scores[k + 1 :]]).kept


@pytest.mark.slow
def test_a_converted_file_is_predicted_as_the_plan_that_it_is(folder: Path) -> None:
    search(file_of(folder, FP32), data=folder / "search", out=folder / "run.mptune", budget=2, target="h200")
    front = json.loads((folder / "run.mptune" / "front.json").read_text())
    for variant, which in ((FP32, "fp32"), ("ONNX Runtime", "fp16")):
        wanted = front["baseline"][which]["latency"]["median_ms"]
        assert predicted_ms(folder, file_of(folder, variant)) == pytest.approx(wanted)


def test_the_table_says_what_failed_and_where_another_is_better() -> None:
    rows = {
        variant: {"bytes": 10, "predicted_ms": 2.0, "kept": True, "error": 1e-3, "non_finite": 0, "result": "same"}
        for variant in VARIANTS
    }
    rows[CHOSEN]["front"] = [(2.0, 0.0), (1.5, 5e-4)]
    rows["AutoCast"] |= {"predicted_ms": 1.0, "error": 1e-3}
    rows["onnxconverter-common"] = {"failure": "loading: Type Error"}
    rows["ONNX Runtime"] |= {"kept": False, "error": None, "non_finite": 7, "result": "nan cents"}
    text = pages({"pitch": rows}, {"pitch": {FP32: {"ms": 1.0}, CHOSEN: {**rows[CHOSEN], "ms": 0.5, "fp32_ms": 1.0}}})
    assert "does not load | 1.00x, 7 values not finite, **lost**: nan cents | 2.00x, 1.0e-03 |" in text
    assert "| 2.00x, 1.0e-03 | - |" in text
    assert "| onnxconverter-common | 0 | 0 | 1.00x |" in summary({"pitch": rows})
    assert better_elsewhere({"pitch": rows}) == ["- pitch: AutoCast 1 ms at 1.0e-03, mptune 1.5 ms"]
    rows[CHOSEN]["front"].append((0.9, 1e-3))
    assert not better_elsewhere({"pitch": rows})


def test_what_is_packed_is_unpacked_to_the_same_models(folder: Path, tmp_path: Path) -> None:
    parts = pack_all(folder.parent, [folder.name], tmp_path / "packed")
    assert sum(part.stat().st_size for part in parts) < 1.2 * file_of(folder, FP32).stat().st_size
    unpack_all(parts, tmp_path / "there")
    for variant in (FP32, "ONNX Runtime"):
        ours, theirs = (file_of(place, variant) for place in (folder, tmp_path / "there" / folder.name))
        for a, b in zip(onnx.load(ours).graph.initializer, onnx.load(theirs).graph.initializer, strict=True):
            np.testing.assert_array_equal(numpy_helper.to_array(a), numpy_helper.to_array(b))
    assert len(list((tmp_path / "there").rglob("*.npz"))) == 6
