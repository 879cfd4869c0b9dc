"""``benchmarks.trained`` without its networks: judges, steps that fail, predictions of converted files."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.trained import judges
from benchmarks.trained.judging import predicted_ms
from benchmarks.trained.variants import FP32, file_of
from mptune.api.searching import search
from tests.graph import models

WIDTH = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two products in FP32, and as a converter writes them in FP16, inputs and outputs kept."""
    network = tmp_path / "set" / "file-type"
    (network / "variants").mkdir(parents=True)
    ends = [models.value(name, [1, WIDTH]) for name in "xy"]
    weights = [models.weight(name, WIDTH, WIDTH) for name in ("w0", "w1")]
    halves = [models.constant(f"half_{w.name}", numpy_helper.to_array(w), np.float16) for w in weights]

    def products(first: str, last: str, w0: str, w1: str) -> list[onnx.NodeProto]:
        return [models.node("MatMul", [first, w0], "a", "first"), models.node("MatMul", ["a", w1], last, "second")]

    casts = [models.node("Cast", [first], last, to=to) for first, last, to in (("x", "h", 10), ("b", "y", 1))]
    fp32 = models.model(products("x", "y", "w0", "w1"), ends[:1], ends[1:], weights)
    fp16 = [casts[0], *products("h", "b", "half_w0", "half_w1"), casts[1]]
    onnx.save(fp32, file_of(network, FP32))
    onnx.save(models.model(fp16, ends[:1], ends[1:], halves), file_of(network, "ONNX Runtime"))
    for which, k in (*product(("search",), range(6)), *product(("held_out",), range(4))):
        (network / which).mkdir(exist_ok=True)
        values = np.random.default_rng(k).standard_normal((1, WIDTH)).astype(np.float32)
        np.savez(network / which / f"{k:02}.npz", x=values)
    return network


def changed(array: np.ndarray, *places: tuple[object, float]) -> np.ndarray:
    """A copy with other values at some places."""
    copy = array.copy()
    for place, value in places:
        copy[place] = value
    return copy


BOXES = np.array([[50, 60, 20, 20, 0.9], [200, 200, 40, 30, 0.8]], np.float32).T[None]
MORE = np.concatenate([BOXES, np.array([[[150], [60], [20], [20], [0.9]]], np.float32)], 2)
TEXT, SAME_TEXT = (np.eye(600, dtype=np.float32)[steps][None] for steps in ([0, 7, 7, 0, 7, 9], [7, 0, 7, 7, 9, 9]))
PITCHES = changed(np.full((2, 360), 1e-3, np.float32), ((0, 100), 0.9), ((1, 200), 0.3))
NOTES = changed(np.zeros((1, 20, 88), np.float32), ((0, 5, 40), 0.9), ((0, 12, 50), 0.501))
SCORE = np.full((1, 1), 3.0)
PHONEMES = np.eye(8)[[[5, 6, 3, 7], [4, 3, 1, 1]]]


@pytest.mark.parametrize(
    ("judge", "wanted", "alike", "wrong"),
    [
        (judges.yolo_boxes((), 0.25, 0.45, 320), BOXES, [changed(BOXES, ((0, 0, 0), 51.5))],
         [changed(BOXES, ((0, 0, 0), 52.5)), changed(BOXES, ((0, 4, 1), 0.2)), MORE]),
        (judges.texts, TEXT, [SAME_TEXT], [changed(SAME_TEXT, ((0, 5, 3), 2.0))]),
        (judges.pitch, PITCHES, [changed(PITCHES, (1, np.roll(PITCHES[1], 3)))],
         [changed(PITCHES, (0, np.roll(PITCHES[0], 1)))]),
        (judges.onsets(4, "notes"), NOTES, [changed(NOTES, ((0, 12, 50), 0.495)), np.roll(NOTES, 4, 1)],
         [np.roll(NOTES, 5, 1), changed(NOTES, ((0, 15, 60), 0.52))]),
        (judges.phonemes, PHONEMES, [changed(PHONEMES, ((1, 2, 6), 2.0))],
         [changed(PHONEMES, ((0, 1, 4), 2.0)), changed(PHONEMES, ((1, 1, 5), 2.0))]),
        (judges.within(judges.MOS, "MOS"), SCORE, [SCORE + 0.04], [SCORE + 0.06]),
    ],
    ids=["boxes", "texts", "pitch where it is certain", "notes but for those at the threshold",
         "phonemes up to the end", "opinion"],
)  # fmt: skip
def test_a_result_is_kept_or_lost(
    judge: judges.Judge, wanted: np.ndarray, alike: list[np.ndarray], wrong: list[np.ndarray]
) -> None:
    whole = [{"o": wanted}] * 3
    for other in alike:
        assert judge(whole, [{"o": other}] * 3).kept
    for other in (*wrong, np.full_like(wanted, np.nan)):
        for k in range(3):
            assert not judge(whole, [*whole[:k], {"o": other}, *whole[k + 1 :]]).kept, "wherever it stands"


@pytest.mark.slow
def test_a_converted_file_is_predicted_as_the_plan_that_it_is(folder: Path) -> None:
    search(file_of(folder, FP32), data=folder / "search", out=folder / "run.mptune", budget=2, target="h200")
    front = json.loads((folder / "run.mptune" / "front.json").read_text())
    for variant, which in ((FP32, "fp32"), ("ONNX Runtime", "fp16")):
        wanted = front["baseline"][which]["latency"]["median_ms"]
        assert predicted_ms(folder, file_of(folder, variant)) == pytest.approx(wanted)
