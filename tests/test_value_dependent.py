"""Rows and lengths that values or data decide: detections, selected points, a cache that is empty at first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.api.deploying import open_run
from mptune.api.models import compare
from mptune.data.archive import read_samples, save_samples
from mptune.engines.base import EngineError
from mptune.engines.ort.cuda_session import OrtEngine
from mptune.engines.ort.session import SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ErrorsJob, ReferenceJob
from mptune.engines.toolchains.measuring import MeasureJob
from mptune.errors import BaselineError, MptuneError
from mptune.graph.facts import DependentOutput, facts_of
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import WorkerState
from mptune.settings import LatencySettings
from mptune.tuning.baseline import check_reference
from mptune.tuning.result import Front
from tests.graph import models
from tests.graph.helpers import run
from tests.graph.models import constant, save, text

pytestmark = pytest.mark.usefixtures("opened_here")

SIDE = 16
"""Images are 3 x 16 x 16; heads have one box per position, 256 a image."""

HEAD = """
    c1 = Conv<pads = [1, 1, 1, 1]>(x, w1) h1 = Relu(c1) c2 = Conv<pads = [1, 1, 1, 1]>(h1, w2) h2 = Relu(c2)
    raw = Conv(h2, w3) long = Reshape(raw, sizes) flat = Transpose<perm = [0, 2, 1]>(long)
    shift = Slice(flat, k0, k2, k2) size = Slice(flat, k2, k4, k2) logits = Slice(flat, k4, k7, k2)
    t = Tanh(size) e = Exp(t) half = Mul(e, six) centre = Add(shift, grid)
    low = Sub(centre, half) high = Add(centre, half) all_boxes = Concat<axis = 2>(low, high)
    probable = Sigmoid(logits) all_scores = Transpose<perm = [0, 2, 1]>(probable)
    ["nms"] chosen = NonMaxSuppression(all_boxes, all_scores, most, overlap, threshold)
"""
"""Corners (batch, boxes, 4) in pixels and scores (batch, classes, boxes) of an image, and what is selected of them."""
ROWS = """
    image = Gather<axis = 1>(chosen, i0) label = Gather<axis = 1>(chosen, i1) box = Gather<axis = 1>(chosen, i2)
    images1 = Unsqueeze(image, k1) boxes1 = Unsqueeze(box, k1) where = Concat<axis = 1>(images1, boxes1)
    corners = GatherND(all_boxes, where) score = GatherND(all_scores, chosen)
"""
OUTPUTS = {
    "raw": (
        "float[BATCH,256,4] boxes, int64[N,3] selected",
        "boxes = Identity(all_boxes) selected = Identity(chosen)",
    ),
    "apart": (
        "float[N,4] boxes, float[N] scores, int64[N] labels, int64[N] images",
        f"{ROWS} boxes = Identity(corners) scores = Identity(score) labels = Identity(label) images = Identity(image)",
    ),
    "together": (
        "float[N,7] detections",
        f"""{ROWS} image_f = Cast<to = 1>(image) image_column = Unsqueeze(image_f, k1)
        label_f = Cast<to = 1>(label) label_column = Unsqueeze(label_f, k1) score_column = Unsqueeze(score, k1)
        detections = Concat<axis = 1>(image_column, corners, label_column, score_column)""",
    ),
}


def weights(*shapes_and_scales: tuple[tuple[int, ...], float]) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(7)
    return [constant(f"w{k + 1}", rng.normal(0, scale, shape)) for k, (shape, scale) in enumerate(shapes_and_scales)]


def detector(
    path: Path, batch: int | str = 1, threshold: float = 0.6, rows: str = "apart", declared: int | None = None
) -> Path:
    """A detector with NonMaxSuppression inside, which takes ``batch`` images at a time; a name makes it dynamic.

    ``rows``: ``apart`` gives boxes, scores, labels and images as outputs of their own; ``together`` one output of rows
    (image, x1, y1, x2, y2, class, score); ``raw`` all boxes and what NonMaxSuppression returns. ``declared``: how many
    rows the file says that outputs have, as exporters write what they saw in one example.
    """
    outputs, nodes = OUTPUTS[rows]
    outputs = outputs.replace("BATCH", str(batch)).replace("N", str(declared or "n"))
    graph = f"(float[{batch},3,{SIDE},{SIDE}] x) => ({outputs}) {{ {HEAD} {nodes} }}"
    integers = {"sizes": [0, 7, -1], "most": [100]} | {f"k{n}": [n] for n in (0, 1, 2, 4, 7)}
    integers |= {f"i{n}": n for n in range(3)}
    ys, xs = np.mgrid[:SIDE, :SIDE].reshape(2, -1) * 8.0
    floats = {"grid": np.stack([xs, ys], axis=1)[None], "six": 6.0, "overlap": [0.45], "threshold": [threshold]}
    constants = [constant(name, v, np.int64) for name, v in integers.items()]
    constants += [constant(name, v) for name, v in floats.items()]
    constants += weights(((16, 3, 3, 3), 0.3), ((16, 16, 3, 3), 0.15), ((7, 16, 1, 1), 0.5))
    return save(text(graph, *constants), path.parent, path.name)


def points(path: Path) -> Path:
    """Features of the positions at which a score is positive, by NonZero, and the positions."""
    graph = f"""(float[1,3,{SIDE},{SIDE}] x) => (float[n,8] features, int64[2,n] positions)
        <float zero = {{0}}, int64[1] first = {{0}}, int64[2] both = {{0, 1}}> {{
        c = Conv<pads = [1, 1, 1, 1]>(x, w1) hidden = Relu(c) map = Conv(hidden, w2) score = Squeeze(map, both)
        positive = Greater(score, zero) ["select"] where = NonZero(positive) positions = Identity(where)
        image = Squeeze(hidden, first) last = Transpose<perm = [1, 2, 0]>(image)
        rows = Transpose<perm = [1, 0]>(where) features = GatherND(last, rows)
    }}"""
    return save(text(graph, *weights(((8, 3, 3, 3), 0.3), ((1, 8, 1, 1), 0.5))), path.parent, path.name)


def images(path: Path, count: int = 6, batch: int = 1, scale: float = 1.0) -> Path:
    """Smooth random images for these networks, ``count`` samples of ``batch`` each."""
    random = np.random.default_rng(3)
    x = random.normal(0, scale, (count * batch, 3, SIDE, SIDE)).astype(np.float32)
    np.savez(path, x=(x + np.roll(x, 1, axis=2) + np.roll(x, 1, axis=3)) / 2)
    return path


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


def test_what_topk_selects_is_compared_by_value(tmp_path: Path) -> None:
    path, data = save(models.detr(8.0), tmp_path), tmp_path / "x.npz"
    x = np.random.default_rng(0).normal(size=(16, 100, 16)).astype(np.float32)
    np.savez(data, x=x)
    with pytest.raises(MptuneError, match="map:xyxy of the reference against itself is 0"):
        search(tmp_path / "map", path, data, metric="map:xyxy")
    front = search(tmp_path, path, data, limits="foreign_rows<=0.001")
    assert front.fp16 is not None
    assert front.chosen is not None
    shares = [e.error.value("foreign_rows") for e in (front.fp16, front.chosen)]
    assert shares[1] <= 0.001 < shares[0]
    assert front.fp16.error_value < 0.01, "by position it is above 1"
    (finding,) = [f for f in front.findings if f.code == "rows-selected"]
    assert (finding.severity, finding.where.nodes, len(finding.where.outputs)) == ("info", ("choose",), 3)
    mptune.pick(tmp_path / "run", plan=front.fp16.plan.fingerprint)
    subprocess.run([sys.executable, tmp_path / "run/chosen/infer.py", "--check"], check=True)
    rows = {name: np.roll(a, 1, axis=1) for name, a in run(path, {"x": x}).items()}
    rows["places"][:, :2] += 1
    np.savez(tmp_path / "o.npz", **rows)
    for tolerance, verdict in ({}, "agrees"), ({"foreign_rows": 0.05}, "differs"):
        found = compare(path, outputs=tmp_path / "o.npz", data=data, tolerance=tolerance)
        warnings = [f.evidence["foreign_rows"] for f in found.findings if f.code == "rows-selected"]
        assert (found.verdict, warnings) == (verdict, [pytest.approx(0.1)])


def test_which_outputs_depend_on_values_and_which_are_indices(tmp_path: Path) -> None:
    facts = facts_of(load_model(detector(tmp_path / "m.onnx", declared=5)))
    assert [output.name for output in facts.row_outputs] == ["boxes", "scores", "labels", "images"]
    (raw,) = facts_of(load_model(detector(tmp_path / "m.onnx", rows="raw"))).row_outputs
    assert raw == DependentOutput("selected", 0, ("nms",), (2,))
    features, positions = facts_of(load_model(points(tmp_path / "p.onnx"))).row_outputs
    assert (features.axis, features.is_indices) == (0, False)
    assert (positions.axis, positions.is_indices) == (1, True)


def test_samples_without_a_detection(tmp_path: Path) -> None:
    """Some samples find nothing, in the reference or in FP16."""
    model = load_model(detector(tmp_path / "m.onnx", threshold=0.98))
    grouped = GroupedModel(model, find_groups(model))
    data, reference, typed = images(tmp_path / "x.npz", 8), tmp_path / "r.npz", tmp_path / "fp16.onnx"
    dependent = facts_of(model).row_outputs

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
    names = frozenset(output.name for output in facts_of(model).row_outputs)
    save_samples(tmp_path / "s.npz", [{"x": np.load(images(tmp_path / "x.npz", 1, 2))["x"]}])
    report = ReferenceJob(model.path, tmp_path / "s.npz", tmp_path / "r.npz", "cpu", names).run(WorkerState())
    check_reference(report)
    assert not report.rows.mixed


Feed = dict[str, np.ndarray]
WIDTH, HEADS, WORDS, LAYERS = 32, 2, 40, 2
SIZE = WIDTH // HEADS
CACHES = [f"{k}.{what}" for k in range(LAYERS) for what in ("key", "value")]

NORM = """square_Y = Mul(X, X) mean_Y = ReduceMean<axes = [-1], keepdims = 1>(square_Y) safe_Y = Add(mean_Y, eps)
    root_Y = Sqrt(safe_Y) unit_Y = Div(X, root_Y) Y = Mul(unit_Y, gain)"""
HEADS_OF = "Y_flat = MatMul(X, w_Y) Y_split = Reshape(Y_flat, split) Y = Transpose<perm = [0, 2, 1, 3]>(Y_split)"
ATTENTION = """"present.#.key" = Concat<axis = 2>("past.#.key", k#)
    "present.#.value" = Concat<axis = 2>("past.#.value", v#) turned# = Transpose<perm = [0, 1, 3, 2]>("present.#.key")
    scores# = MatMul(q#, turned#) scaled# = Mul(scores#, scale) shares# = Softmax<axis = -1>(scaled#)
    read# = MatMul(shares#, "present.#.value") back# = Transpose<perm = [0, 2, 1, 3]>(read#)
    flat# = Reshape(back#, whole) out# = MatMul(flat#, w_o#) sum# = Add(x#, out#)"""
GATED = """gate# = MatMul(m#, w_g#) sigmoid# = Sigmoid(gate#) silu# = Mul(gate#, sigmoid#) up# = MatMul(m#, w_u#)
    wide# = Mul(silu#, up#) down# = MatMul(wide#, w_d#) NEXT = Add(sum#, down#)"""


def decoder(folder: Path) -> Path:
    """A small llama with a cache of dynamic length."""
    nodes = "x0 = Gather(table, input_ids) "
    constants = [models.weight("table", WORDS, WIDTH), models.weight("head", WIDTH, WORDS, scale=WIDTH**-0.5)]
    for k in range(LAYERS):
        parts = [NORM.replace("X", f"x{k}").replace("Y", f"n{k}")]
        parts += [HEADS_OF.replace("X", f"n{k}").replace("Y", f"{name}{k}") for name in "qkv"]
        parts += [ATTENTION, NORM.replace("X", f"sum{k}").replace("Y", f"m{k}"), GATED.replace("NEXT", f"x{k + 1}")]
        nodes += " ".join(parts).replace("#", str(k)) + " "
        for name, shape in {**dict.fromkeys("qkvo", (1, 1)), "g": (1, 2), "u": (1, 2), "d": (2, 1)}.items():
            rows, columns = shape[0] * WIDTH, shape[1] * WIDTH
            constants.append(models.weight(f"w_{name}{k}", rows, columns, scale=rows**-0.5))
    nodes += NORM.replace("X", f"x{LAYERS}").replace("Y", "last") + " logits = MatMul(last, head)"
    past = "".join(f', float[batch,{HEADS},past,{SIZE}] "past.{cache}"' for cache in CACHES)
    present = "".join(f', float[batch,{HEADS},total,{SIZE}] "present.{cache}"' for cache in CACHES)
    graph = f"""(int64[batch,sequence] input_ids {past}) => (float[batch,sequence,{WORDS}] logits {present}) <
        float eps = {{1e-5}}, float scale = {{{SIZE**-0.5}}},
        int64[4] split = {{0, 0, {HEADS}, {SIZE}}}, int64[3] whole = {{0, 0, {WIDTH}}}> {{ {nodes} }}"""
    return models.save(models.text(graph, models.constant("gain", np.ones(WIDTH)), *constants), folder)


@pytest.fixture
def prompts() -> list[Feed]:
    rng = np.random.default_rng(6)
    caches = {f"past.{cache}": np.zeros((1, HEADS, 0, SIZE), np.float32) for cache in CACHES}
    return [{"input_ids": rng.integers(0, WORDS, (1, 6)), **caches} for _ in range(4)]


def test_a_search_with_an_empty_cache_ends_and_names_the_state(prompts: list[Feed], tmp_path: Path) -> None:
    options = {"data": prompts, "out": tmp_path / "run", "target": "jetson-orin-nano-8gb", "budget": 3}
    front = mptune.search(decoder(tmp_path), **options)  # type: ignore[arg-type]
    assert front.failures == 0
    evaluations = mptune.open_run(tmp_path / "run").evaluations
    assert len(evaluations) == 3
    assert all(e.is_finite for e in evaluations)
    assert any(e.error_value > 0 for e in evaluations)
    (finding,) = [f for f in front.findings if f.code == "state-fed-back"]
    assert (finding.severity, finding.origin, finding.evidence["pairs"]) == ("info", "search", 2 * LAYERS)
    pairs = dict(zip((o.name for o in finding.where.outputs), finding.where.inputs, strict=True))
    assert pairs["present.1.value"] == "past.1.value"
    assert not [f for f in front.findings if f.code == "value-dependent-shape"], "a length that the data have is none"


def test_an_engine_with_an_empty_cache_is_timed(prompts: list[Feed], tmp_path: Path) -> None:
    """On the CPU here, as a search with --target cpu does it."""
    model, samples, reference = decoder(tmp_path), tmp_path / "samples.npz", tmp_path / "reference.npz"
    save_samples(samples, prompts)
    state = WorkerState()
    report = ReferenceJob(model, samples, reference, "cpu").run(state)
    assert check_reference(report) == ()
    latency = LatencySettings(warmup_ms=1.0, duration_ms=1.0)
    engine = OrtEngine(model, SessionOptions(preset="timed"))
    result = MeasureJob(engine, engine, Scoring(samples, reference), samples, latency=latency).run(state).measurement
    assert result.error.value("relative_l2") == 0
    assert result.latency.median_ms > 0
    state.close()
