"""A search by metrics of the user's: over the whole set, with labels and limits, and one that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import mptune
from mptune.errors import DataError, MptuneError, SettingsError
from mptune.settings import LatencySettings, WorkerSettings
from mptune.tuning.front import Front
from tests.conftest import save_mlp
from tests.fakes import FAST, Diary
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here")

SCRIPT = """import sys

def accuracy(outputs, references, inputs, labels):
    assert len(outputs["y"]) == len(inputs["x"]) == len(labels["kind"])
    return float((outputs["y"].argmax(1) == labels["kind"]).mean())

def far(outputs, reference):
    return float(abs(outputs["y"] - reference["y"]).max())

def stays(outputs, references, inputs, labels):
    while True: x = 1

def nan(outputs, reference):
    return float('nan')

def exits(outputs, reference):
    sys.exit(3)

def other(outputs, reference):
    return outputs['logits']

def words(outputs, reference):
    return 'good'
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_mlp(tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(12, 32)).astype(np.float32)
    np.savez("data.npz", x=x)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    kinds = session.run(None, {"x": x})[0].argmax(axis=1)
    kinds[:3] = (kinds[:3] + 1) % 8
    np.savez("labels.npz", kind=kinds)
    Path("mine.py").write_text(SCRIPT)


def search(metric: object, **more: object) -> Front:
    given = {"data": "data.npz", "labels": "labels.npz", "budget": 6, "target": "jetson-orin-nano-8gb", **more}
    return mptune.search("model.onnx", out="run", metric=metric, **given)


def test_several_metrics_with_labels_and_a_limit() -> None:
    names = ["mine.py:accuracy:max", "top1_accuracy", "top5_accuracy", "mine.py:far"]
    front = search(names, limits=["top5_accuracy>=0.5", "top1_accuracy>=0.1"])
    document = front.to_json()
    assert document["metric"] == names[0]
    fp32 = document["baseline"]["fp32"]
    values = fp32["error"]["per_output"]["*"]
    assert set(names) <= set(values)
    assert values[f"{names[0]}:value"] == pytest.approx(values["top1_accuracy:value"])
    assert fp32["metrics"]["top1_accuracy"]["search"] == values["top1_accuracy:value"] < 1.0, "three labels are wrong"
    assert fp32["error"]["value"] == 0.0, "the reference has the same labels wrong"
    assert front.limits_met
    assert "top5_accuracy>=0.5" in front.chosen_reason
    assert list(front.metrics) == ["accuracy", "top1_accuracy", "top5_accuracy", "far"]
    assert mptune.report("run").metrics == front.metrics
    readme = Path("run/chosen/README.txt").read_text()
    assert all(f"\n{name:<16} " in readme for name in front.metrics)
    assert not search(names, limits=["top1_accuracy>=2"]).limits_met
    assert mptune.report("run").limits_met is False


def test_a_function_of_the_programs_takes_the_whole_set() -> None:
    calls = []

    def loss(outputs, references, inputs, labels):
        calls.append(len(labels["kind"]))
        return float(np.mean(np.abs(outputs["y"] - references["y"])))

    assert search(loss).fp16.error_value > 0.0
    assert set(calls) == {9, 3}, "all search samples, or all held-out ones"


def test_what_cannot_be_meant_is_said() -> None:
    for limit, words in (("map>=0.4", "the metrics are top1_accuracy"), ("much", "is not understood")):
        with pytest.raises(SettingsError, match=words):
            search("top1_accuracy", limits=[limit])
    np.savez("labels.npz", kind=np.zeros(7, int))
    with pytest.raises(DataError, match="'kind' has 7 rows, the data have 12 samples"):
        search("top1_accuracy")


@pytest.mark.parametrize(
    ("function", "words", "line"),
    [
        ("stays", "it ran longer than 1 s", ""),
        ("nan", "is nan for all-FP32, whose outputs are finite", "nan"),
        ("exits", "failed on sample 0: SystemExit: 3", "17: sys.exit(3)"),
        ("other", "failed on sample 0: KeyError", "20: return outputs['logits']"),
        ("words", "it returned 'good', which is not one number", "22"),
    ],
)
def test_a_metric_that_is_wrong_stops_a_search_at_once_and_its_line_is_quoted(
    function: str, words: str, line: str
) -> None:
    diary = Diary()
    options = {"target": "cpu", "latency": FAST, "listener": diary, "worker": WorkerSettings(metric_timeout_s=1.0)}
    with pytest.raises(MptuneError) as caught:
        search(f"mine.py:{function}", **options)
    message = caught.value.message
    assert words in message
    assert f"mine.py:{line}" in message
    assert caught.value.exit_code == 1
    assert not any(blame in message for blame in ("\n", "does not run", "FP16")), "neither the model nor FP16"
    assert diary.done == [], "nothing is built for it"
    assert not any("one-group errors: 8" in stage for stage in diary.stages)
    assert list(Path("run/logs").iterdir()) == []


def test_a_search_a_check_and_a_confirmation_judge_probabilities_on_their_own_scale(tmp_path: Path) -> None:
    graph = """(float[1,32] x) => (float[1,20] y) {
        a = MatMul(x, w) logits = Add(a, b) p = Softmax<axis = -1>(logits) y = Reshape(p, shape) }"""
    path = models.save(
        models.text(
            graph,
            models.weight("w", 32, 20, scale=1.0),
            models.constant("b", np.linspace(0, -16, 20)),  # the last are far below FP16's smallest normal number
            models.constant("shape", [-1, 20], np.int64),
        ),
        tmp_path,
    )
    data = {"x": 0.4 * np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)}
    quick = LatencySettings(warmup_ms=1.0, duration_ms=2.0)
    options = {"target": "jetson-orin-nano-8gb", "budget": 3, "latency": quick}
    fp16 = mptune.search(path, data=data, out=tmp_path / "run", **options).fp16  # type: ignore[arg-type]
    mptune.apply(path, fp16.plan, tmp_path / "mixed.onnx")
    assert mptune.check(tmp_path / "mixed.onnx", max_error=5e-3, against=path, data=data).agrees
    plans = mptune.confirm(tmp_path / "run", target="cpu").plans
    (confirmed,) = (plan.measured for plan in plans if not plan.searched.plan.fp32_groups)
    for evaluation in (fp16, confirmed):
        assert max(evaluation.error_value, evaluation.held_out_value) < 5e-3
