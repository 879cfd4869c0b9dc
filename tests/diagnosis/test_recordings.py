"""``mptune compare --outputs``: each fault, and each other way to feed a model, is named; sound recordings are not.

Without a tolerance, what FP16 breaks does not agree; parts of outputs are judged each on its own scale.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.data.archive import read_samples
from mptune.data.metrics.parts import OutputParts
from mptune.diagnosis.comparing import make_sides
from mptune.diagnosis.order import find_stale
from mptune.diagnosis.preprocessing import other_feed, ways
from mptune.diagnosis.rows import Compared, Layout, read_recording
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import FALLBACK_LIMIT, MOST_LIMIT, Limit, Side, default_limit, limits_of
from mptune.errors import DataError, SettingsError
from mptune.finding import OutputColumns
from mptune.graph.loading.model import load_model
from mptune.reporting.terminal.listings import print_comparison
from mptune.settings import Tolerance
from tests.data.test_calibration import saved
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight

ROOT = Path(__file__).resolve().parents[2]
ROWS = 16

CASES = [
    *((name, "equal", "agrees") for name in ("mlp", "cnn", "exported")),
    *((name, "fp16", "agrees") for name in ("mlp", "exported", "vit")),
    *((name, "tf32", "tf32-candidate") for name in ("cnn", "exported")),
    ("mlp", "cut", "tf32-candidate"),
    *((name, "tf32 reference", "tf32-reference") for name in ("vit", "attention")),
    *((name, "stale", "stale-rows") for name in ("mlp", "exported")),
    ("vit", "stale fp16", "stale-rows"),
    *((name, "torn", "torn-rows") for name in ("cnn", "exported")),
    ("mlp", "zero", "not-computed"),
    ("cnn", "one buffer", "not-computed"),
    ("cnn", "last row", "not-computed"),
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


def _compared(proto: onnx.ModelProto, y: Callable[[np.ndarray], np.ndarray], folder: Path, **limit: object) -> list:
    """Codes and texts of what is found where ``y`` was recorded of the right output, and the verdict."""
    path = models.save(proto, folder)
    np.savez(folder / "y.npz", y=y(recordings.run(path, FED, 24)["y"]))
    found = mptune.compare(path, data=FED, outputs=folder / "y.npz", **limit)  # type: ignore[arg-type]
    return [found.verdict, *((each.code, each.text) for each in found.findings)]


def test_one_buffer_differs_whatever_the_tolerance_and_zeros_of_fp16_are_no_missing_copy(tmp_path: Path) -> None:
    wide = {"tolerance": {"y": 5.0}}
    verdict, (code, _) = _compared(fragile(), lambda y: np.repeat(y[-1:], 24, 0), tmp_path, **wide)
    assert (verdict, code) == ("differs", "not-computed")
    lost = "(float[n,32] x) => (float[n,32] y) <float far = {1e4}> { a = Add(x, far) y = Sub(a, far) }"
    verdict, (code, _) = _compared(text(lost), np.zeros_like, tmp_path)
    assert (verdict, code) == ("differs", "precision"), "true FP16 gives zeros"


def test_an_output_that_is_stored_as_fp16_is_said_as_such(tmp_path: Path) -> None:
    level = "(float[n,32] x) => (float[n,32] y) <float far = {3e4}> { t = Tanh(x) y = Add(t, far) }"
    verdict, (code, says) = _compared(text(level), np.float16, tmp_path, tolerance={"y": "abs:0.1"})
    assert (verdict, code) == ("differs", "precision")
    assert "it is stored as FP16, and 100% of its values are the reference's, rounded" in says
    verdict, (code, says) = _compared(fragile(), lambda y: np.float32(np.float16(y)), tmp_path)
    assert (verdict, code, says.endswith("it is stored as FP16")) == ("agrees", "agrees", True)
    assert "stored" not in _compared(fragile(), lambda y: y, tmp_path)[1][1]


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


def fragile() -> onnx.ModelProto:
    """Values pass through an offset of 200, where FP16's spacing is an eighth."""
    graph = """(float[batch,32] x) => (float[batch,8] y) <float[1] offset = {200}> {
        ["/first/MatMul"] a = MatMul(x, w1) ["/first/Tanh"] t = Tanh(a) ["/second/MatMul"] b = MatMul(t, w20)
        ["/there/Add"] c = Add(b, offset) ["/back/Sub"] d = Sub(c, offset) ["/head/MatMul"] y = MatMul(d, w300)
    }"""
    shapes = {"w1": (32, 64), "w20": (64, 64), "w300": (64, 8)}
    weights = [models.weight(name, *shape, scale=shape[0] ** -0.5) for name, shape in shapes.items()]
    return models.text(graph, *weights)


FED = {"x": np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)}


def _fused(path: Path, _: Path) -> recordings.Arrays:
    """FP16 between layers, and FP32 inside of them: the offset is added before the result is rounded."""
    engine = recordings.NodeByNode(path)
    rounded = {"a", "t", "c", "d", "y", "w1", "w20", "w300", "x"}

    def between(name: str, array: np.ndarray) -> np.ndarray:
        return recordings.to_half(array) if name in rounded else array

    values = {name: between(name, array) for name, array in {**engine.constants, **FED}.items()}
    for index, each in enumerate(engine.proto.graph.node):
        results = engine._node(index, each, {name: values[name] for name in each.input})
        values |= {name: between(name, array) for name, array in results.items()}
    return {"y": values["y"]}


SOUND: Mapping[str, Callable[[Path, Path], recordings.Arrays]] = {
    "FP16 throughout": lambda path, _: recordings.NodeByNode(path).run(FED, 1, result=recordings.to_half),
    "FP16, some nodes fused": _fused,
    "BF16 in the products": lambda path, _: recordings.NodeByNode(path).run(FED, 1, operand=recordings.to_bf16),
    "FP32": lambda path, _: recordings.run(path, FED, 1),
}
"""What sound deployments of a model that FP16 makes coarse could have recorded; none of these is warned of."""


@pytest.mark.parametrize("name", SOUND)
def test_sound_engines_of_a_model_that_fp16_makes_coarse_are_not_warned_of(name: str, tmp_path: Path) -> None:
    path = models.save(fragile(), tmp_path)
    np.savez(tmp_path / "recorded.npz", **SOUND[name](path, tmp_path))
    found = mptune.compare(path, data=FED, outputs=tmp_path / "recorded.npz")
    assert found.verdict == "agrees"
    assert [(each.code, each.severity) for each in found.findings] == [("agrees", "info")]


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


def _trtexec(array: np.ndarray) -> str:
    """As ``exportJSONOutput`` of trtexec prints an output: no JSON where a value is not finite."""
    sizes, values = "x".join(map(str, array.shape)), ", ".join(f"{value:.6g}" for value in array.ravel())
    return f'[\n{{ "name" : "y"\n, "dimensions" : "{sizes}"\n  , "values" : [ {values} ]\n  }}\n]'


def _polygraphy(**runners: list[np.ndarray]) -> str:
    """As Polygraphy's ``RunResults.save`` writes runs with one output."""
    every = {name: json.loads(saved([{"y": array} for array in runs])) for name, runs in runners.items()}
    return json.dumps({"lst": [[name, [{"outputs": run} for run in runs]] for name, runs in every.items()]})


def test_outputs_of_trtexec_and_polygraphy_are_read(tmp_path: Path) -> None:
    lost = np.where(VALUES == 5, np.nan, np.where(VALUES == 7, -np.inf, np.float16(VALUES / 3)))
    runs, path = np.split(lost, 3), tmp_path / "out.json"
    (tmp_path / "runs").mkdir()
    for number, array in enumerate(runs):
        (tmp_path / "runs" / f"run{number + 9}.json").write_text(_trtexec(array))
    for content in ("a folder", _trtexec(lost), _polygraphy(onnxrt=runs[::-1], trt=runs)):
        path.write_text(content)
        samples = read_recording(tmp_path / "runs" if content == "a folder" else path, {"y": LAYOUT})
        rows = np.concatenate([sample["y"] for sample in samples])
        np.testing.assert_array_equal(rows, np.float16(lost), "six digits are all that FP16 has")
    wrong = [_polygraphy(a=[], b=[]), _polygraphy(a=[np.ones((1, 4)), np.ones(4)]), "[", '{"lst": [["a", [1]]]}']
    for content in (*wrong, '[{"name": "y", "dimensions": "2x2", "values": [1]}]'):
        path.write_text(content)
        with pytest.raises(DataError, match=r"runners: a, b|from run to run|read as JSON|no outputs of trtexec"):
            read_recording(path, {"y": LAYOUT})


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
        m = Mul(prev, mask) moved = MatMul(m, p) now = MatMul(cur, q) y = Sum(seen, moved, now)
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
IMAGENET = "without ImageNet's mean and deviation"
WAYS: list[Row] = [
    (lambda d: {"image": raw(d)[:, ::-1] * 255}, f"{IMAGENET}, in 0 to 255, with its", ("image",)),
    (lambda d: {"prev": d["cur"], "cur": d["prev"]}, "with the inputs 'prev' and 'cur' exchanged", ("prev", "cur")),
    (lambda d: {"prev": np.roll(d["prev"], 1, 0)}, "the sample before's values in the input 'prev'", ("prev",)),
    (lambda d: {"image": d["image"][..., ::-1]}, "for input 'image' mirrored", ("image",)),
    (lambda d: {"image": d["image"].swapaxes(2, 3)}, "with height and width exchanged", ("image",)),
    (lambda d: {"image": d["image"] / 255}, "for input 'image' divided by 255", ("image",)),
]
SLOW: list[Row] = [
    (lambda d: {"image": d["image"][:, ::-1]}, "with its channels in reverse order", ("image",)),
    (lambda d: {"image": raw(d)}, IMAGENET, ("image",)),
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


def test_what_fp16_breaks_does_not_agree(tmp_path: Path) -> None:
    """A norm whose squares overflow (x / inf is 0, which is finite), a choice among near ties, and a sound output."""
    graph = """(float[batch,16] x) => (float[batch,4] y, int64[batch] label, float[batch,4] sound)
        <float[1] eps = {1e-3}, float[1] twenty = {20}> {
        ["/body/MatMul"] h = MatMul(x, big) ["/norm/Mul"] squares = Mul(h, h)
        ["/norm/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/norm/Add"] safe = Add(mean, eps) ["/norm/Sqrt"] root = Sqrt(safe) ["/norm/Div"] normal = Div(h, root)
        ["/head/MatMul"] y = MatMul(normal, v)
        ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits) ["/sound/MatMul"] sound = MatMul(x, w)
    }"""
    constants = [weight("big", 16, 16, scale=300.0), weight("v", 16, 4), weight("small", 16, 32, scale=2e-3)]
    path = models.save(text(graph, *constants, weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    with np.errstate(over="ignore"):
        got = recordings.NodeByNode(path).run(data, 24, result=recordings.to_half)
    np.savez(tmp_path / "got.npz", **got)
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.verdict == "differs"
    cause = next(one for one in found.findings if one.code == "precision")
    assert [output.name for output in cause.where.outputs] == ["y", "label"]
    assert "overflow at /norm/" in cause.text
    assert "exceeds" in cause.text or "FP16 ends at 65504" in cause.text
    assert [one.where.outputs[0].name for one in found.findings if one.code == "agrees"] == ["sound"]
    figures = found.outputs["y"]
    assert figures["limit"] == 2 * figures["emulated_fp16"] < 0.01, "all-FP16 has the norm in FP32"
    assert found.outputs["label"]["limit"] == MOST_LIMIT
    labels = got["label"] - recordings.run(path, data, 24)["label"]
    assert found.outputs["label"]["largest_difference"] == np.abs(labels).max(), "of all samples, and not their mean"


@pytest.mark.slow
def test_all_fp16_is_that_of_a_search(tmp_path: Path) -> None:
    """A value beyond FP16 on the data pins its group; a constant beyond it is held as 65504, and the error shows it."""
    graph = """(float[batch,16] x) => (float[batch,16] y, float[batch,4] z) <float large = {1e5}> {
        ["/fc/MatMul"] h = MatMul(x, w) ["/square/Mul"] squares = Mul(h, h)
        ["/mean/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/scale/Div"] scaled = Div(h, large) ["/out/MatMul"] z = MatMul(scaled, v)
        ["/rms/Sqrt"] root = Sqrt(mean) ["/norm/Div"] y = Div(h, root)
    }"""
    path = models.save(text(graph, weight("w", 16, 16, scale=300.0), weight("v", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    run = tmp_path / "run"
    mptune.search(path, data=data, budget=2, out=run, target="jetson-orin-nano-8gb", progress=False)
    searched = next(e for e in mptune.open_run(run).evaluations if e.origin.name == "all-fp16")
    samples = read_samples(run / "data" / "search.npz")
    found = mptune.compare(path, path, data={"x": np.concatenate([sample["x"] for sample in samples])})
    of_each = {name: figures["emulated_fp16"] for name, figures in found.outputs.items()}
    assert max(of_each.values()) == pytest.approx(searched.error_value, rel=1e-6)
    assert of_each["z"] > 0.1
    assert of_each["y"] < 1e-2, "without the pin of a search it would be infinite"


def test_random_numbers_are_no_rounding(tmp_path: Path) -> None:
    graph = """(float[batch,16] x) => (float[batch,4] y) {
        h = MatMul(x, w) ["/noise"] n = RandomNormalLike<scale = 0.1>(h) y = Add(h, n) }"""
    path = models.save(text(graph, weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)}
    np.savez(tmp_path / "got.npz", **recordings.run(path, data, 1))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz")
    assert [one.code for one in found.findings] == ["not-deterministic"]
    assert found.findings[0].where.nodes == ("/noise",)
    twice = mptune.compare(path, data=data, repeat=2)
    assert "not-deterministic" in {one.code for one in twice.findings}
    assert twice.verdict == "differs"


@pytest.mark.parametrize(
    ("change", "code"),
    [(lambda x: x[:, ::-1], "data-do-not-fit"), (lambda x: np.roll(x, 2, 2), None)],
    ids=["BGR", "something else"],
)
def test_a_model_that_fp16_breaks_is_not_the_cause_of_every_difference(
    change: Callable[[np.ndarray], np.ndarray], code: str | None, tmp_path: Path
) -> None:
    graph = """(float[batch,3,4,4] image) => (int64[batch] label) <float twenty = {20}> {
        x = Flatten(image) ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits)
    }"""
    path = models.save(text(graph, weight("small", 48, 32, scale=2e-3)), tmp_path)
    data = {"image": np.random.default_rng(3).standard_normal((48, 3, 4, 4)).astype(np.float32)}
    prepared = {"image": np.ascontiguousarray(change(data["image"]))}
    np.savez(tmp_path / "got.npz", **recordings.run(path, prepared, 24))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.outputs["label"]["judged_fp16"] > 0.1, "FP16 changes labels, too"
    assert found.verdict == "differs"
    assert [one.code for one in found.findings] == ([code] if code else [])


def test_limits_of_fp16() -> None:
    assert [default_limit(error) for error in (1e-3, 0.7, math.inf)] == [2e-3, MOST_LIMIT, FALLBACK_LIMIT]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives four numbers in the hundreds beside a score, its data and what it gives on them."""
    folder = tmp_path_factory.mktemp("parts")
    graph = "(float[batch,32] x) => (float[batch,5] y) <float[5] scales = {200, 200, 200, 200, 1}>"
    path = models.save(text(f"{graph} {{ h = MatMul(x, w) y = Mul(h, scales) }}", weight("w", 32, 5)), folder)
    np.savez(folder / "data.npz", x=np.random.default_rng(1).standard_normal((24, 32)).astype(np.float32))
    np.savez(folder / "right.npz", **recordings.run(path, dict(np.load(folder / "data.npz")), 1))
    return folder


def compared(place: Path, changed: np.ndarray, **given: object) -> mptune.Comparison:
    """With a recording that differs by noise of this size in each column."""
    y = np.load(place / "right.npz")["y"]
    noise = np.random.default_rng(2).standard_normal(y.shape) * changed
    np.savez(place / "got.npz", y=(y + noise).astype(np.float32))
    return mptune.compare(place / "model.onnx", data=place / "data.npz", outputs=place / "got.npz", **given)  # type: ignore[arg-type]


SCORE = np.array([0, 0, 0, 0, 0.05])
BOXES = np.array([5.0, 5.0, 5.0, 5.0, 0])


def test_boxes_do_not_hide_a_score(place: Path) -> None:
    assert compared(place, SCORE).verdict == "differs", "of the whole output the error is 1e-4"
    assert compared(place, SCORE * 1e-3).verdict == "agrees"


def test_tolerances_of_columns(place: Path) -> None:
    assert compared(place, BOXES + SCORE, tolerance=["y[0:4]=0.5", "y[4]=abs:1"]).verdict == "agrees"
    found = compared(place, BOXES, tolerance=["y[0:4]=abs:1", "y[4]=1"])
    assert found.verdict == "differs"
    largest = float(np.abs(np.load(place / "got.npz")["y"] - np.load(place / "right.npz")["y"]).max())
    figures = found.outputs["y"]
    assert figures["judged"] == pytest.approx(largest, rel=1e-3), "what the limit is about, and not the relative error"
    assert figures["judged_fp16"] > 10 * figures["emulated_fp16"], "in the same unit"
    assert found.to_json()["limits"] == {"y": {"value": 1.0, "unit": "absolute", "columns": [0, 1, 2, 3]}}
    stream = io.StringIO()
    print_comparison(found, stream)
    row = next(line for line in stream.getvalue().splitlines() if line.startswith("y[0:4] "))
    assert row.split()[1:3] == [f"abs:{largest:.3g}", "abs:1"]


SPLIT = OutputParts(1, 100.0, (200.0, 200.0, 200.0, 200.0, 1.0), is_split=True)
WHOLE = OutputParts(1, 1.0, (1.0, 1.0, 1.0), is_split=False)


def twice(*columns: int) -> Limit:
    """The limit of columns that nothing is said of."""
    return Limit(2.0, columns=columns)


@pytest.mark.parametrize(
    ("parts", "texts", "rest", "wanted"),
    [
        (SPLIT, [], None, [twice(0), twice(1), twice(2), twice(3), twice(4)]),
        (SPLIT, ["y[4]=abs:0.5"], None, [Limit(0.5, True, (4,)), twice(0), twice(1), twice(2), twice(3)]),
        (SPLIT, ["y[0:4]=0.5"], 0.1, [Limit(0.5, columns=(0, 1, 2, 3)), Limit(0.1, columns=(4,))]),
        (SPLIT, ["y=0.5"], 0.1, [Limit(0.5)]),
        (SPLIT, ["y=0.5", "y[4]=0.1"], None, [Limit(0.5), Limit(0.1, columns=(4,))]),
        (WHOLE, [], None, [Limit(2.0)]),
        (WHOLE, [], 0.1, [Limit(0.1)]),
        (WHOLE, ["y[1]=0.5"], None, [Limit(0.5, columns=(1,)), twice(0, 2)]),
        (WHOLE, ["y[0:3]=0.5"], 0.1, [Limit(0.5, columns=(0, 1, 2))]),
        (None, [], None, [Limit(2.0)]),
    ],
)
def test_which_limit_each_part_has(
    parts: OutputParts | None, texts: list[str], rest: float | None, wanted: list[Limit]
) -> None:
    assert limits_of("y", [Tolerance.parse(text) for text in texts], parts, rest, lambda columns: 2.0) == wanted


def test_what_names_no_column(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="output 'y' has no such column") as caught:
        limits_of("y", [Tolerance.parse("y[5]=1")], SPLIT, None, len)
    assert "from 0 to 4" in caught.value.hint
    with pytest.raises(SettingsError, match="no such column"):
        limits_of("y", [Tolerance.parse("y[0]=1")], None, None, len)
    command = ["compare", str(place / "model.onnx"), "--data", str(place / "data.npz")]
    for wrong in ("z[0]=1", "y[a]=1", "y[0]=-1", "y"):
        assert main([*command, "--outputs", str(place / "right.npz"), "--tolerance", wrong]) in (1, 2)
        assert "hint: " in capsys.readouterr().err


def test_a_difference_without_a_finding_has_a_warning(mlp_path: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    noise = tmp_path / "noise.npz"
    np.savez(noise, y=np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32))
    found = mptune.compare(mlp_path, data={"x": rows}, reference_outputs=noise)
    assert not found.agrees
    assert not found.findings
    (warning,) = [text for text in found.warnings if text.startswith("output 'y'")]
    assert "--trace" not in warning, "nothing is known of an engine"
    np.savez(tmp_path / "large.npz", y=3 * np.load(noise)["y"])
    (warning,) = mptune.compare(mlp_path, data={"x": rows}, outputs=tmp_path / "large.npz").warnings
    assert "with the model that the engine was built of as CANDIDATE, --trace names where it begins" in warning


def _head(ending: str) -> onnx.ModelProto:
    """Four columns of boxes (a point, and a size above 0) beside three of scores."""
    graph = f"""(float[n,32] x) => (float[n,7] y) <int64[3] parts = {{2,2,3}}> {{ a = MatMul(x, w)
        at, wide, scores = Split <axis=1> (a, parts) size = Softplus(wide) {ending} }}"""
    return text(graph, weight("w", 32, 7))


def _recorded(boxes: Callable[..., Sequence[np.ndarray]], scores: Callable[[np.ndarray], np.ndarray]) -> Callable:
    return lambda y: np.concatenate([*boxes(y[:, :2], y[:, 2:4]), scores(y[:, 4:])], axis=1)


def _softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


PLAIN = "y = Concat <axis=1> (at, size, scores)"
CORNERS = "far = Add(at, size) y = Concat <axis=1> (at, far, scores)"
ENDED = "p = {} (scores) y = Concat <axis=1> (at, size, p)"
FORMS = {
    "corners": (PLAIN, _recorded(lambda at, size: (at - size / 2, at + size / 2), np.copy)),
    "far corners": (PLAIN, _recorded(lambda at, size: (at, at + size), np.copy)),
    "centres": (CORNERS, _recorded(lambda at, far: ((at + far) / 2, far - at), np.copy)),
    "a softmax": (PLAIN, _recorded(lambda at, size: (at, size), _softmax)),
    "no softmax": (ENDED.format("Softmax <axis=1>"), _recorded(lambda at, size: (at, size), lambda p: np.log(p) - 3)),
    "a sigmoid": (PLAIN, _recorded(lambda at, size: (at, size), lambda x: 1 / (1 + np.exp(-x)))),
    "no sigmoid": (ENDED.format("Sigmoid"), _recorded(lambda at, size: (at, size), lambda p: np.log(p / (1 - p)))),
}
HELD = {"corners": "boxes as corners", "far corners": "boxes as two corners", "centres": "boxes as centre and size"}
HELD |= {name: f"values {'after' if name[0] == 'a' else 'before'} a {name.split()[-1]}" for name in list(FORMS)[3:]}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_in_another_form_are_named_with_their_columns(name: str, tmp_path: Path) -> None:
    ending, form = FORMS[name]
    path = models.save(_head(ending), tmp_path)
    for way in (form, lambda y: np.float16(form(y))):
        np.savez(tmp_path / "y.npz", y=way(recordings.run(path, FED, 24)["y"]))
        found = mptune.compare(path, data=FED, outputs=tmp_path / "y.npz")
        (finding,) = found.findings
        is_boxes = not name.endswith(("softmax", "sigmoid"))
        assert (found.verdict, finding.code) == ("differs", "outputs-permuted" if is_boxes else "attribute-differs")
        assert finding.where.outputs == (OutputColumns("y", (0, 1, 2, 3) if is_boxes else (4, 5, 6)),)
        assert f"the candidate holds {HELD[name]}, the reference" in finding.text


def test_other_values_of_boxes_and_scores_are_in_no_other_form(tmp_path: Path) -> None:
    for change in (lambda y: 2 * y, lambda y: y + np.float32(0.3), lambda y: np.tanh(y)):
        verdict, *said = _compared(_head(PLAIN), change, tmp_path)
        assert (verdict, {code for code, _ in said} & {"outputs-permuted", "attribute-differs"}) == ("differs", set())


def test_sums_that_are_rounded_term_by_term_are_fp16_of_large_angles(tmp_path: Path) -> None:
    graph = """(float[n,32] x) => (float[n,32] y) <int64 axis = {1}, float rate = {400}> {
        a = Abs(x) steps = Mul(a, rate) ["phase"] angle = CumSum(steps, axis) ["wave"] y = Sin(angle) }"""
    steps = np.abs(np.float16(FED["x"])) * np.float16(400)
    half = np.float32(np.sin(np.add.accumulate(steps, axis=1, dtype=np.float16)))
    verdict, (code, says) = _compared(text(graph), lambda _: half, tmp_path)
    assert (verdict, code, "angle-spacing at wave" in says) == ("differs", "precision", True)
    assert "emulating FP16 reproduces it" in says
    for other in (half[::-1], np.random.default_rng(5).uniform(-1, 1, half.shape).astype(np.float32)):
        assert "precision" not in {code for code, _ in _compared(text(graph), lambda _, y=other: y, tmp_path)[1:]}


def test_a_sum_beyond_fp16_is_why_an_engine_gives_inf(tmp_path: Path) -> None:
    graph = """(float[n,32] x) => (float[n,32] y) <float many = {20}, int64[2] times = {1, 128}> {
        a = Abs(x) large = Mul(a, many) all = Tile(large, times)
        ["mean"] m = ReduceMean <keepdims = 1, axes = [1]> (all) ["product"] y = Mul(a, m) }"""
    size = np.abs(np.float16(FED["x"]))
    with np.errstate(over="ignore"):
        half = np.float32(size * np.mean(np.tile(size * np.float16(20), 128), 1, np.float16, keepdims=True))
    assert 0.2 < np.isinf(half).mean() < 0.8
    verdict, (code, says) = _compared(text(graph), lambda _: half, tmp_path)
    assert (verdict, code, "at node 'mean'" in says) == ("differs", "long-sum", True)
    some = np.where(np.arange(32) < 3, np.float32(np.inf), 1)  # not where all of FP16's are
    assert "long-sum" not in {code for code, _ in _compared(text(graph), lambda y: y * some, tmp_path)[1:]}
