"""A search by metrics over the whole set: with labels, limits, several metrics; and a function of the program's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import mptune
from mptune.errors import DataError, SettingsError
from tests.conftest import save_mlp

pytestmark = pytest.mark.usefixtures("opened_here")

SCRIPT = """
def accuracy(outputs, references, inputs, labels):
    assert len(outputs["y"]) == len(inputs["x"]) == len(labels["kind"])
    return float((outputs["y"].argmax(1) == labels["kind"]).mean())


def far(outputs, reference):
    return float(abs(outputs["y"] - reference["y"]).max())


def stays(outputs, references, inputs, labels):
    while True: x = 1
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    save_mlp(tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(12, 32)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    kinds = session.run(None, {"x": x})[0].argmax(axis=1)
    kinds[:3] = (kinds[:3] + 1) % 8
    np.savez(tmp_path / "labels.npz", kind=kinds)
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path


def search(files: Path, metric: object, **more: object) -> object:
    given = {"data": files / "data.npz", "labels": files / "labels.npz", "budget": 6, "target": "jetson-orin-nano-8gb"}
    return mptune.search(files / "model.onnx", out=files / "run", metric=metric, **{**given, **more})


def test_several_metrics_with_labels_and_a_limit(files: Path) -> None:
    script = f"{files / 'mine.py'}"
    names = [f"{script}:accuracy:max", "top1_accuracy", "top5_accuracy", f"{script}:far"]
    front = search(files, names, limits=["top5_accuracy>=0.5", "top1_accuracy>=0.1"])
    document = front.to_json()
    assert document["metric"] == names[0]
    taken = document["baseline"]["fp32"]["error"]["per_output"]["*"]
    assert set(names) <= set(taken)
    assert taken[f"{names[0]}:value"] == pytest.approx(taken["top1_accuracy:value"])
    assert taken["top1_accuracy:value"] < 1.0, "three labels are wrong"
    assert document["baseline"]["fp32"]["metrics"]["top1_accuracy"]["search"] == taken["top1_accuracy:value"]
    assert document["baseline"]["fp32"]["error"]["value"] == 0.0, "the reference has the same labels wrong"
    assert front.limits_met
    assert "top5_accuracy>=0.5" in front.chosen_reason
    assert list(front.metrics) == ["accuracy", "top1_accuracy", "top5_accuracy", "far"]
    assert mptune.report(files / "run").metrics == front.metrics
    readme = (files / "run" / "chosen" / "README.txt").read_text()
    for name in front.metrics:
        assert f"\n{name:<16} " in readme
    again = search(files, names, limits=["top1_accuracy>=2"])
    assert not again.limits_met
    assert mptune.report(files / "run").limits_met is False


def test_a_function_of_the_programs_takes_the_whole_set(files: Path) -> None:
    calls = []

    def loss(outputs, references, inputs, labels):
        calls.append(len(labels["kind"]))
        return float(np.mean(np.abs(outputs["y"] - references["y"])))

    front = search(files, loss)
    assert front.fp16.error_value > 0.0
    assert set(calls) == {9, 3}, "all search samples, or all held-out ones"


def test_a_metric_that_takes_for_ever_is_one_error(files: Path) -> None:
    from mptune.settings import WorkerSettings

    with pytest.raises(DataError) as caught:
        search(files, f"{files / 'mine.py'}:stays", worker=WorkerSettings(metric_timeout_s=1.0))
    assert "it ran longer than 1 s" in caught.value.message
    assert f"{files / 'mine.py'}:" in caught.value.message
    assert "\n" not in caught.value.message


def test_what_cannot_be_meant_is_said(files: Path) -> None:
    for limit, words in (("map>=0.4", "the metrics are top1_accuracy"), ("much", "is not understood")):
        with pytest.raises(SettingsError, match=words):
            search(files, "top1_accuracy", limits=[limit])
    np.savez(files / "labels.npz", kind=np.zeros(7, int))
    with pytest.raises(DataError, match="'kind' has 7 rows, the data have 12 samples"):
        search(files, "top1_accuracy")
