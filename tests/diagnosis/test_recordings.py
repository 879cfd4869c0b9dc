"""``mptune compare --outputs``: each fault, and each other way to feed a model, is named; sound recordings are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.diagnosis.comparing import make_sides
from mptune.diagnosis.order import find_stale
from mptune.diagnosis.preprocessing import other_feed, ways
from mptune.diagnosis.rows import Compared, Layout, read_recording
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Side
from mptune.errors import DataError
from mptune.graph.loading.model import load_model
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight

ROOT = Path(__file__).resolve().parents[2]
ROWS = 16

CASES = [
    *((name, "equal", "agrees") for name in ("mlp", "cnn", "exported")),
    *((name, "fp16", "agrees") for name in ("mlp", "exported", "vit")),
    ("cnn", "tf32", "tf32-candidate"),
    ("exported", "tf32", "tf32-candidate"),
    ("mlp", "cut", "tf32-candidate"),
    ("vit", "tf32 reference", "tf32-reference"),
    ("attention", "tf32 reference", "tf32-reference"),
    ("mlp", "stale", "stale-rows"),
    ("exported", "stale", "stale-rows"),
    ("vit", "stale fp16", "stale-rows"),
    ("cnn", "torn", "torn-rows"),
    ("exported", "torn", "torn-rows"),
    ("mlp", "zero", "not-computed"),
    ("cnn", "one buffer", "not-computed"),
    ("vit", "columns", "outputs-permuted"),
    ("exported", "rows", "outputs-permuted"),
    ("pair", "outputs", "outputs-permuted"),
]
TF32 = {"tf32": recordings.to_tf32, "tf32 reference": recordings.to_tf32, "cut": recordings.cut_to_tf32}
PLANTED = {
    "stale-rows": lambda right, rng, batch, _: recordings.stale(right, rng, batch),
    "torn-rows": lambda right, rng, batch, _: recordings.torn(right, rng, batch),
    "not-computed": lambda right, _rng, _batch, fault: recordings.not_computed(right, fault),
    "outputs-permuted": lambda right, rng, _, fault: recordings.permuted(right, rng, fault),
}


def _pair() -> onnx.ModelProto:
    """Two outputs of one shape, as the logits of the start and the end of a span."""
    graph = "(float[n,16] x) => (float[n,8] start, float[n,8] end) { start = MatMul(x, w) end = MatMul(x, v) }"
    return models.text(graph, models.weight("w", 16, 8), models.weight("v", 16, 8))


@cache
def _model(name: str, folder: Path) -> Path:
    made = {"mlp": models.mlp, "cnn": models.cnn, "attention": models.attention, "pair": _pair}
    if name in made:
        return models.save(made[name](), folder, f"{name}.onnx")
    return {
        "exported": ROOT / "tests/graph/exported/cnn_torchscript_17.onnx",
        "vit": ROOT / "benchmarks/models/digits_vit.onnx",
    }[name]


def _data(model: Path, name: str, rng: np.random.Generator) -> recordings.Arrays:
    if name == "vit":
        return {n: a[:ROWS] for n, a in np.load(ROOT / "benchmarks/models/digits_calib.npz").items()}
    return recordings.data_of(model, rng, ROWS)


@pytest.mark.parametrize(
    ("name", "fault", "code"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[0] == "vit" else case for case in CASES],
    ids=lambda value: value.replace(" ", "-"),
)
def test_each_fault_of_a_recording_is_named(
    name: str, fault: str, code: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng([CASES.index((name, fault, code)), 15])
    model = _model(name, tmp_path_factory.getbasetemp())
    data = _data(model, name, rng)
    batch = recordings.session(model.read_bytes()).get_inputs()[0].shape[0]
    batch, at_once = (batch, batch) if isinstance(batch, int) else (1, ROWS)
    right = recordings.run(model, data, batch)
    nodes = recordings.NodeByNode(model)
    recorded = right
    if fault in TF32:
        recorded = nodes.run(data, at_once, operand=TF32[fault])
    elif fault.endswith("fp16"):
        recorded = nodes.run(data, at_once, result=recordings.to_half)
    if code in PLANTED:
        recorded = PLANTED[code](recorded, rng, batch, fault)
    np.savez(tmp_path / "right.npz", **right)
    np.savez(tmp_path / "recorded.npz", **recorded)
    files = {"outputs": tmp_path / "recorded.npz"}
    if fault == "tf32 reference":
        files = {"outputs": tmp_path / "right.npz", "reference_outputs": tmp_path / "recorded.npz"}

    found = mptune.compare(model, data=data, **files)

    codes = {finding.code for finding in found.findings}
    assert code in codes, found.findings
    assert codes <= {code, "agrees"}, found.findings
    if code == "agrees" or (code in PLANTED and fault != "stale fp16"):
        assert found.agrees == (code == "agrees")
    assert all(finding.origin == "compare" for finding in found.findings)


def test_fp16_beyond_tolerance_is_precision_with_a_plan_that_keeps_it(tmp_path: Path) -> None:
    model = _model("mlp", tmp_path)
    data = _data(model, "mlp", np.random.default_rng(3))
    half = recordings.NodeByNode(model).run(data, ROWS, result=recordings.to_half)
    np.savez(tmp_path / "half.npz", **half)
    wide = mptune.compare(model, data=data, outputs=tmp_path / "half.npz")
    limit = wide.outputs["y"]["error"] / 1.5

    found = mptune.compare(model, data=data, outputs=tmp_path / "half.npz", tolerance={"y": limit})

    assert (wide.verdict, found.verdict) == ("agrees", "differs")
    (finding,) = found.findings
    assert finding.code == "precision"
    assert 0 < float(finding.evidence["error_with_kept"]) <= limit
    assert finding.where.groups
    assert f"--keep-fp32 {finding.where.groups[0]}" in finding.cure


def test_the_command_line_says_verdict_and_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model("mlp", tmp_path)
    data = _data(model, "mlp", np.random.default_rng(7))
    right = recordings.run(model, data, 1)
    np.savez(tmp_path / "data.npz", **data)
    np.savez(tmp_path / "right.npz", **right)
    np.savez(tmp_path / "stale.npz", y=np.concatenate([right["y"][:1], right["y"][:-1]]))
    start = ["compare", str(model), "--data", str(tmp_path / "data.npz")]
    assert main([*start, "--outputs", str(tmp_path / "right.npz")]) == 0
    assert "agrees" in capsys.readouterr().out
    assert main([*start, "--outputs", str(tmp_path / "stale.npz")]) == 3
    assert "stale-rows" in capsys.readouterr().out
    assert main([*start, "--outputs", str(tmp_path / "right.npz"), "--repeat", "2", "--stress"]) == 0
    assert main(start) == 2
    assert "nothing to compare" in capsys.readouterr().err


LAYOUT = Layout(((1, 6, 4),) * 3, stacked=False)
WRONG: list[tuple[int, ...]] = [(12,), (3, 4), (3, 5), (4, 2, 3), (5, 3), ()]
VALUES = np.arange(72, dtype=np.float32).reshape(3, 6, 4)


def read(folder: Path, array: np.ndarray) -> np.ndarray:
    np.savez(folder / "out.npz", y=array)
    return np.concatenate([sample["y"] for sample in read_recording(folder / "out.npz", {"y": LAYOUT})])


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 1, 6, 4), (3, 24)])
def test_axes_of_one_and_flat_rows_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.testing.assert_array_equal(read(tmp_path, VALUES.reshape(shape)), VALUES)
    np.savez(tmp_path / "out.npz", VALUES.reshape(shape))
    assert len(read_recording(tmp_path / "out.npz", {"y": LAYOUT})) == 3, "an array without a name is the only output"


@pytest.mark.parametrize(
    ("name", "shape", "message", "hint"),
    [
        ("scores", (4, 3), "has no output 'y': it holds 'scores'", "by its name: np.savez"),
        *(("y", shape, f"has shape {list(shape)}, the data give [4, 3]", "all rows") for shape in WRONG),
    ],
)
def test_what_does_not_fit_is_refused_in_words_that_fit(
    name: str, shape: tuple[int, ...], message: str, hint: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "out.npz", **{name: np.ones(shape)})  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        read_recording(tmp_path / "out.npz", {"y": Layout(((1, 3),) * 4, stacked=False)})
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("size", [2, 8, 32])
def test_noise_is_not_torn_by_values_that_another_row_has_too(size: int) -> None:
    """Noise of twice FP16's size: rounding explains some values of a row, another row the rest by chance."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        wanted = rng.normal(size=(6, size))
        for scale, noise in ((0.05, 0.1), (0.5, 0.5)):
            emulated, got = (wanted + part * rng.normal(size=wanted.shape) for part in (scale, noise))
            assert find_stale(Compared.of_rows(got, wanted, emulated), 1) is None
        assert find_stale(Compared.of_rows(got, emulated, emulated), 1) is None, "two runs of random rows"


@pytest.mark.smoke
def test_a_batch_that_holds_its_first_row_alone_and_labels_that_are_equal_by_chance() -> None:
    rng = np.random.default_rng(5)
    scores, boxes = rng.standard_normal((12, 6)), rng.uniform(0, 50, (6, 20, 7))
    found = find_stale(Compared.of_rows(np.repeat(scores[:1], 12, 0), scores, scores), 1)
    assert found is not None
    assert set(found.source.values()) == {0}
    before = find_stale(Compared.of_rows(np.roll(boxes, 1, 0), boxes, boxes), 1)
    assert before is not None
    assert before.lag == 1
    labels = np.array([0, 3, 2, 0, 3, 2, 1, 0, 2, 3, 0, 1])[:, None]
    assert find_stale(Compared.of_rows(np.where(labels == 2, 1, labels), labels, labels), 1) is None


Arrays = dict[str, np.ndarray]
COUNT = 6
MEAN = np.reshape([0.485, 0.456, 0.406], (3, 1, 1)).astype(np.float32)
DEVIATION = np.reshape([0.229, 0.224, 0.225], (3, 1, 1)).astype(np.float32)


def tracker() -> tuple[onnx.ModelProto, Arrays]:
    """An image, two vectors of one shape and a mask; the output depends on each."""
    graph = """(float[batch,3,4,4] image, float[batch,5] prev, float[batch,5] cur, float[batch,5] mask)
        => (float[batch,5] y) {
        c = Conv<kernel_shape = [3, 3]>(image, w) t = LeakyRelu<alpha = 0.1>(c) f = Flatten(t) seen = MatMul(f, v)
        m = Mul(prev, mask) moved = MatMul(m, p) now = MatMul(cur, q) s = Sum(seen, moved, now) y = Tanh(s)
    }"""
    rng = np.random.default_rng(3)
    raw = rng.uniform(0, 1, (COUNT, 3, 4, 4)).astype(np.float32)
    vectors = rng.standard_normal((2, COUNT, 5)).astype(np.float32)
    mask = (rng.uniform(size=(COUNT, 5)) < 0.6).astype(np.float32)
    data = {"image": (raw - MEAN) / DEVIATION, "prev": vectors[0], "cur": vectors[1], "mask": mask}
    return text(graph, weight("w", 2, 3, 3, 3), weight("v", 8, 5), weight("p", 5, 5), weight("q", 5, 5)), data


@dataclass
class Deployment:
    """A model on samples, and what a deployment could have recorded of it."""

    runner: Runner
    folder: Path
    data: Arrays

    def outputs(self, **fed: np.ndarray) -> np.ndarray:
        """Of the model, fed otherwise."""
        feed = {name: np.ascontiguousarray(array, np.float32) for name, array in {**self.data, **fed}.items()}
        return recordings.run(self.runner.model.path, feed, 1)["y"]

    def recorded(self, y: np.ndarray) -> Sequence[Side]:
        np.savez(self.folder / "got.npz", y=y)
        judged = {"ignore": (), "tolerances": (), "max_error": None, "recorded_reference": None}
        return make_sides(self.runner, None, 1, recorded=self.folder / "got.npz", **judged).outputs


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("preparation")
    proto, data = tracker()
    samples = [{name: array[k : k + 1] for name, array in data.items()} for k in range(COUNT)]
    runner = Runner(load_model(models.save(proto, folder)), samples, folder / "run", 1)
    yield Deployment(runner, folder, data)
    runner.worker.close()


def raw(data: Arrays) -> np.ndarray:
    return data["image"] * DEVIATION + MEAN


def layout(image: np.ndarray) -> np.ndarray:
    return image.transpose(0, 2, 3, 1).reshape(COUNT, 3, 4, 4)


Row = tuple[Callable[[Arrays], Arrays], str | None, tuple[str, ...]]
WAYS: list[Row] = [
    (lambda d: {"image": raw(d)}, "without ImageNet's mean and deviation", ("image",)),
    (lambda d: {"prev": d["cur"], "cur": d["prev"]}, "with the inputs 'prev' and 'cur' exchanged", ("prev", "cur")),
    (lambda d: {"prev": np.roll(d["prev"], 1, 0)}, "the sample before's values in the input 'prev'", ("prev",)),
    (lambda d: {"image": d["image"][..., ::-1]}, "for input 'image' mirrored", ("image",)),
    (lambda d: {"image": d["image"].swapaxes(2, 3)}, "with height and width exchanged", ("image",)),
    (lambda d: {"image": d["image"] / 255}, "for input 'image' divided by 255", ("image",)),
]
SLOW: list[Row] = [
    (lambda d: {"image": d["image"][:, ::-1]}, "with its channels in reverse order", ("image",)),
    (lambda d: {"image": raw(d)[:, ::-1] * 255}, "in 0 to 255, with its channels in reverse order", ("image",)),
    (lambda d: {"image": (d["image"] - MEAN) / DEVIATION}, "normalised twice", ("image",)),
    (lambda d: {"image": layout(d["image"])}, "reshaped where", ("image",)),
    (lambda d: {"prev": 0 * d["prev"]}, "with zeros in the input 'prev'", ("prev",)),
    (lambda d: {"cur": d["cur"] * np.random.default_rng(0).uniform(0.5, 2, (COUNT, 1))}, None, ()),
]


@pytest.mark.parametrize(
    ("change", "words", "inputs"), [*WAYS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_each_way_is_named(
    deployment: Deployment, change: Callable[[Arrays], Arrays], words: str | None, inputs: tuple[str, ...]
) -> None:
    findings = other_feed(deployment.recorded(deployment.outputs(**change(deployment.data))))
    assert [finding.code for finding in findings] == ["data-do-not-fit"] * (words is not None)
    for finding in findings:
        assert str(words) in finding.text.removeprefix("the model gives what was recorded ")
        assert finding.where.inputs == inputs


def test_a_way_that_holds_for_some_samples_names_them(deployment: Deployment) -> None:
    rows = np.arange(COUNT)[:, None]
    y = deployment.outputs(prev=np.where(rows % 2, 0, deployment.data["prev"]))
    for got, words in ((y, "on 3 of 3 samples"), (np.where(rows % 2, y, y + 0.01), "on 3 of 6: samples 1, 3, 5")):
        (finding,) = other_feed(deployment.recorded(got.astype(np.float32)))
        assert "with zeros in the input 'prev'" in finding.text
        assert words in finding.text
        assert finding.where.samples == (1, 3, 5)


def test_few_bytes_are_fed_at_a_time(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    data, run, fed = deployment.data, deployment.runner.on, list[int]()
    outputs = deployment.recorded(deployment.outputs(prev=data["cur"], cur=data["prev"]))
    whole = other_feed(outputs)

    def counted(name: str, feeds: Sequence[Arrays]) -> object:
        fed.append(sum(array.nbytes for feed in feeds for array in feed.values()))
        return run(name, feeds)

    most = 10 * sum(array[:1].nbytes for array in data.values())
    monkeypatch.setattr("mptune.diagnosis.preprocessing._MOST_BYTES", most)
    monkeypatch.setattr(deployment.runner, "on", counted)
    assert other_feed(outputs) == whole
    assert len(whole) == 1
    assert len(fed) > 3
    assert max(fed) <= most


def test_rows_of_images_that_are_normalised() -> None:
    image = np.random.default_rng(0).uniform(0, 255, (1, 3, 4, 4)).astype(np.float32)
    made = {way.words: way.feed(0) for way in ways([{"image": image}])}
    assert len(made) == len(list(ways([{"image": image}]))), "no two rows say the same"

    def of(words: str) -> np.ndarray:
        feed = made[f"for input 'image' {words}"]
        assert feed is not None
        return feed["image"]

    normalised = (image / 255 - MEAN) / DEVIATION
    np.testing.assert_allclose(of("normalised with ImageNet's mean and deviation"), normalised, atol=1e-5)
    flipped = of("normalised with ImageNet's mean and deviation, with its channels in reverse order (RGB, BGR)")
    np.testing.assert_allclose(flipped, (image[:, ::-1] / 255 - MEAN) / DEVIATION, atol=1e-5)
    assert all(feed is not None and feed["image"].dtype == np.float32 for feed in made.values())
