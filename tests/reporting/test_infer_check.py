"""infer.py --check: the statistics are mptune's own, and the verdict follows from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from mptune.data.archive import save_samples, write_arrays
from mptune.data.metrics.accuracy import Reference, compare_outputs
from mptune.data.metrics.parts import find_parts, parts_path, save_parts
from mptune.data.metrics.row_sets import find_row_sets
from mptune.data.run_outputs import collect_check
from mptune.data.samples import Rollout, outputs_of
from mptune.graph.facts import DependentOutput
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from mptune.reporting.recipe import BuildRecipe
from tests.graph import models
from tests.reporting.infer_support import infer_module

Sample = dict[str, np.ndarray]
Infer = dict[str, Any]
CPU = ["CPUExecutionProvider"]
REPORT = {"plan": "abc", "metric": "worst_part", "source": "measured", "engine": "onnxruntime", "provider": None}


@pytest.fixture(scope="module")
def infer(mlp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The functions of infer.py."""
    return infer_module(mlp_path, tmp_path_factory.mktemp("infer"))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def collect(
    folder: Path, inputs: list[Sample], got: list[Sample], wanted: list[Sample], **options: Any
) -> Sample | None:
    """As at the end of a run that left these files."""
    save_samples(folder / "held_out.npz", inputs)
    save_samples(folder / "held_out_reference.npz", wanted)
    save_parts(parts_path(folder / "held_out_reference.npz"), find_parts(wanted))
    error = compare_outputs(got, Reference(wanted), None, options.pop("row_sets", ()))
    report = {**REPORT, **{name: options.pop(name) for name in REPORT.keys() & options.keys()}}
    return collect_check(folder, error, "held_out", report, **options)


def collected(folder: Path, *samples: list[Sample], **options: Any) -> Sample:
    check = collect(folder, *samples, **options)
    assert check is not None
    return check


def header_of(check: Sample) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(check["header"].tobytes())
    return content


def written(check: Sample, path: Path) -> Path:
    write_arrays(path, check)
    return path


def test_the_statistics_are_those_of_mptune(infer: Infer, tmp_path: Path) -> None:
    """Columns of their own scale, a reference that is not finite, whole numbers, scalars, an output of zeros."""
    scale = np.array([300, 1, 0.01], np.float32)
    wanted = [
        {
            "boxes": normal(2, 9, 3, seed=k) * scale,
            "image": normal(1, 4, 5, 6, seed=k),
            "label": np.arange(7) + k,
            "value": normal(seed=k),
            "zero": np.zeros((1, 3), np.float32),
        }
        for k in range(3)
    ]
    wanted[1]["image"][0, 0, 0, 0] = np.inf
    got = [{name: np.asarray(array + normal(*array.shape, seed=9) / 64) for name, array in s.items()} for s in wanted]
    got = [{**s, "label": w["label"] + 1, "zero": w["zero"]} for s, w in zip(got, wanted, strict=True)]
    check = collected(tmp_path, [{"x": normal(1)}] * 3, got, wanted)
    header, _, references = infer["read_check"](written(check, tmp_path / "check.npz"))
    assert [list(sample) for sample in references] == [list(sample) for sample in wanted]
    figures = [(output, *figure) for output in header["outputs"] for figure in output["figures"].items()]
    for output, each, figure in figures:
        name, part = output["name"], output["parts"].get(each)
        values = [infer["statistic"](each, part, g[name], w[name]) for g, w in zip(got, wanted, strict=True)]
        assert np.mean(values) == pytest.approx(float(figure), rel=1e-6, abs=0), (name, each)
    assert len(figures) == 3 * len(wanted[0]) + 2  # the boxes have three parts


@pytest.mark.parametrize("name", ["relative_l2", "max_abs", "worst_part"])
def test_nan_and_inf_stay(infer: Infer, name: str) -> None:
    part = {"axis": None, "start": 0, "stop": 0, "scales": [2.0]}
    wanted = normal(3, 3)
    for bad in (np.nan, np.inf):
        got = wanted.copy()
        got[1, 1] = bad
        assert not math.isfinite(infer["statistic"](name, part, got, wanted))


def test_few_samples_are_kept_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    wanted = [{"y": normal(4, seed=k)} for k in range(20)]
    got = [{"y": sample["y"] * np.float32(1 + k / 100)} for k, sample in enumerate(wanted)]
    check = collected(tmp_path, [{"x": normal(2)}] * 20, got, wanted)
    inputs, header = sum(name.startswith("input_") for name in check), header_of(check)
    assert (header["samples"], header["of"], inputs) == (8, 20, 8)
    error = compare_outputs(got, Reference(wanted))
    figures = error.of_first(8).value("worst_part"), error.value("worst_part")
    assert (header["figure"], header["reported"]) == figures
    assert written(check, tmp_path / "1.npz").read_bytes() == written(check, tmp_path / "2.npz").read_bytes()
    check = collected(tmp_path, [{"x": np.zeros((6 << 20,), np.uint8)}] * 5, wanted[:5], wanted[:5])
    assert header_of(check)["samples"] == 2, "large ones are fewer"
    assert collect(tmp_path, [{"x": np.zeros((65 << 20,), np.uint8)}], wanted[:1], wanted[:1]) is None
    (tmp_path / "held_out.npz").write_bytes(b"torn")
    assert collect_check(tmp_path, error, "held_out", {**REPORT, "metric": "relative_l2"}) is None


def test_ignored_outputs_and_rows_are_not_in_the_figure(tmp_path: Path) -> None:
    wanted = [{"y": normal(4), "aside": normal(4), "rows": normal(5, 4)}]
    got = [{"y": wanted[0]["y"] * np.float32(1.1), "aside": -wanted[0]["aside"], "rows": wanted[0]["rows"][:3]}]
    rows = find_row_sets([DependentOutput("rows", 0, ("nms",))], wanted)
    given = tmp_path, [{"x": normal(2)}], got, wanted
    header = header_of(collected(*given, row_sets=rows, ignored=("aside",), metric="relative_l2"))
    assert [output["name"] for output in header["outputs"]] == ["y"]
    assert (header["unchecked"], header["figure"]) == (["rows"], pytest.approx(0.1, rel=1e-5))
    assert header["reported"] < 1, "what is ignored has 2"
    assert collect(*given, row_sets=rows, ignored=("aside", "y")) is None
    own = header_of(collected(tmp_path, [{"x": normal(2)}], wanted, wanted, metric="script.py:mine"))
    assert (own["figure"], own["reported"], own["outputs"][0]["figures"]["worst_part"]) == (None, None, 0)


STEP = """(float[1,4] x, float[1,4] state) => (float[4] next) <float decay = {0.9}, int64[1] shape = {4}> {
    part = Mul(state, decay) sum = Add(part, x) next = Reshape(sum, shape)
}"""
"""state' = 0.9 state + x, whose shape lacks the batch axis of the input."""


def opened(graph: str, folder: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(models.save(models.text(graph), folder), providers=CPU)


def test_what_is_fed_back_is_fed_back(infer: Infer, tmp_path: Path) -> None:
    session = opened(STEP, tmp_path)
    samples = [{"x": normal(1, 4, seed=k), "state": normal(1, 4, seed=50 + k)} for k in range(8)]
    rollout = Rollout((("next", "state"),), 4)

    exact = outputs_of(lambda feed: {"next": session.run(None, dict(feed))[0]}, samples, rollout)
    wanted = [{name: array * np.float32(1.01) for name, array in sample.items()} for sample in exact]
    check = collected(tmp_path, samples, exact, wanted, rollout=rollout)
    header, inputs, references = infer["read_check"](written(check, tmp_path / "check.npz"))
    assert (len(inputs), len(references), header["steps"]) == (8, 2, 4)
    assert len(header["outputs"]) == 1 + len(rollout.checkpoints)
    errors = infer["errors_of"](session, header, inputs, references)
    assert infer["worst"](errors, "worst_part") == pytest.approx(header["figure"], rel=1e-6)


@pytest.mark.parametrize("beside", [False, True])
def test_an_exported_emulation_needs_no_bank(
    mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    if beside:
        monkeypatch.setattr("mptune.graph.writing.weights.SELF_CONTAINED_LIMIT", 0)  # as if weights passed 2 GiB
    model = load_model(mlp_path)
    grouped = GroupedModel(model, find_groups(model))
    plan = grouped.uniform(Precision.FP32).replace({g.id: Precision.FP16 for g in grouped.groups[::2]})
    check = Emulator(grouped).export(plan, tmp_path / "alone" / "check.onnx")
    names = ["check.onnx", "check.onnx.data"] if beside else ["check.onnx"]
    assert sorted(path.name for path in check.parent.iterdir()) == names
    onnx.checker.check_model(str(check), full_check=True)
    bank = WeightBank.write(model, tmp_path / "weights")
    paths = check, Emulator(grouped, bank).write(plan, tmp_path / "weights" / "banked.onnx"), mlp_path
    feed = {"x": np.load(mlp_data)["x"]}
    emulated, wanted, exact = (onnxruntime.InferenceSession(p, providers=CPU).run(None, feed)[0] for p in paths)
    np.testing.assert_array_equal(emulated, wanted)
    assert 0 < np.abs(emulated - exact).max() < 1e-2


SHAPED = """(float[N,3,H,W] image, float[N,H] mask, float threshold, float[2,5] fixed)
    => (float[N,3,H,W] a, float[N,H] b, float c, float[2,5] d)
    { a = Neg(image) b = Neg(mask) c = Neg(threshold) d = Neg(fixed) }"""


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    """A model whose inputs have shapes of every form."""
    return opened(SHAPED, tmp_path_factory.mktemp("shaped"))


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([], {"image": [2, 3, 1, 1], "mask": [2, 1], "threshold": [], "fixed": [2, 5]}),
        (["image=4x3x8x9"], {"image": [4, 3, 8, 9], "mask": [4, 8]}),
        (["H=7"], {"image": [2, 3, 7, 1], "mask": [2, 7]}),
        (["image=4x3x8x9", "mask=4x8", "threshold=", "fixed=2x5"], {"image": [4, 3, 8, 9], "fixed": [2, 5]}),
        (["W=6", "mask=1x2"], {"image": [1, 3, 2, 6], "mask": [1, 2]}),
    ],
)
def test_shapes_of_every_form(infer, shaped, texts: list[str], wanted: dict[str, list[int]]) -> None:
    shapes = infer["input_shapes"](shaped, texts, 2)
    assert wanted.items() <= shapes.items()
    feeds = infer["random_feeds"](shaped, shapes, 0)
    assert {name: list(np.shape(value)) for name, value in feeds.items()} == shapes
    infer["run"](shaped, feeds)


def test_the_usual_shapes_are_those_of_the_data(shaped: onnxruntime.InferenceSession, tmp_path: Path) -> None:
    usual = {"image": (4, 3, 8, 9), "mask": (4, 8)}
    recipe = BuildRecipe(ranges={name: (shape, shape, shape) for name, shape in usual.items()})
    shapes = infer_module(models.save(models.text(SHAPED), tmp_path), tmp_path, recipe)["input_shapes"]
    assert shapes(shaped, [], None) == {"image": [4, 3, 8, 9], "mask": [4, 8], "threshold": [], "fixed": [2, 5]}
    assert shapes(shaped, ["H=7"], 1) == {"image": [1, 3, 7, 9], "mask": [1, 7], "threshold": [], "fixed": [2, 5]}


INPUTS = "the inputs are image [N, 3, H, W], mask [N, H]"
MISFITS = {
    "image": "image is not NAME=AxBxC",
    "image=1x3x-1x4": "is not NAME=AxBxC",
    "image=1,3,4,4": "is not NAME=AxBxC",
    "image=1x3x4": f"does not fit\nhint: {INPUTS}",
    "image=1x4x4x4": "does not fit",
    "fixed=3x5": "does not fit",
    "picture=1x3": f"there is no input picture\nhint: {INPUTS}",
    "H=3x4": "there is no input H",
    "\x1b[2J\n=1": "there is no input \\x1b[2J\\n",
}


@pytest.mark.parametrize("text", MISFITS)
def test_shapes_that_do_not_fit(infer: Infer, shaped: onnxruntime.InferenceSession, text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        infer["input_shapes"](shaped, [text], 1)
    assert MISFITS[text] in str(caught.value)


def test_a_damaged_check_file_is_one_line(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(b"torn")
    for name in ("none.npz", "torn.npz"):
        with pytest.raises(SystemExit, match=r"^error: "):
            infer["read_check"](tmp_path / name)
