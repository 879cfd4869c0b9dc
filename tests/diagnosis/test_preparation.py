"""Samples that a deployment feeds otherwise: each way is named by the input, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.diagnosis.causes.feeds.changes import feed_changes
from mptune.diagnosis.causes.model_changes import model_changes
from mptune.diagnosis.causes.other_model import other_attribute
from mptune.diagnosis.causes.preprocessing import other_preparation
from mptune.diagnosis.comparing import make_sides
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.graph.loading.model import load_model
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import node, value, weight

Arrays = dict[str, np.ndarray]
COUNT = 6
MEAN = np.reshape([0.485, 0.456, 0.406], (3, 1, 1)).astype(np.float32)
DEVIATION = np.reshape([0.229, 0.224, 0.225], (3, 1, 1)).astype(np.float32)


def tracker() -> tuple[object, Arrays]:
    """An image, two vectors of one shape and a mask; the output depends on each."""
    nodes = [
        node("Conv", ["image", "w"], "c", "/stem/Conv", kernel_shape=[3, 3]),
        node("LeakyRelu", ["c"], "t", "/stem/LeakyRelu", alpha=0.1),
        node("Flatten", ["t"], "f", "/Flatten"),
        node("MatMul", ["f", "v"], "seen", "/head/MatMul"),
        node("Mul", ["prev", "mask"], "m", "/state/Mul"),
        node("MatMul", ["m", "p"], "moved", "/state/MatMul"),
        node("MatMul", ["cur", "q"], "now", "/now/MatMul"),
        node("Sum", ["seen", "moved", "now"], "s", "/Sum"),
        node("Tanh", ["s"], "y", "/Tanh"),
    ]
    constants = [weight("w", 2, 3, 3, 3), weight("v", 8, 5), weight("p", 5, 5), weight("q", 5, 5)]
    rng = np.random.default_rng(3)
    raw = rng.uniform(0, 1, (COUNT, 3, 4, 4)).astype(np.float32)
    vectors = rng.standard_normal((2, COUNT, 5)).astype(np.float32)
    mask = (rng.uniform(size=(COUNT, 5)) < 0.6).astype(np.float32)
    data = {"image": (raw - MEAN) / DEVIATION, "prev": vectors[0], "cur": vectors[1], "mask": mask}
    inputs = [value(name, ["batch", *array.shape[1:]]) for name, array in data.items()]
    return models.model(nodes, inputs, [value("y", ["batch", 5])], constants), data


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Path, Arrays]]:
    folder = tmp_path_factory.mktemp("preparation")
    proto, data = tracker()
    path = models.save(proto, folder)  # type: ignore[arg-type]
    samples = [{name: array[k : k + 1] for name, array in data.items()} for k in range(COUNT)]
    with Runner(load_model(path), samples, folder / "run", 1) as runner:
        yield runner, folder, data


def recorded(runner: Runner, folder: Path, got: np.ndarray) -> Sides:
    np.savez(folder / "got.npz", y=got)
    return make_sides(
        runner,
        None,
        1,
        recorded=folder / "got.npz",
        recorded_reference=None,
        ignore=(),
        tolerances={},
        max_error=None,
    )


def raw(data: Arrays) -> np.ndarray:
    return data["image"] * DEVIATION + MEAN


@pytest.mark.parametrize(
    ("change", "words", "inputs"),
    [
        pytest.param(
            lambda d: {"image": d["image"][:, ::-1]},
            "with its channels in reverse order",
            ("image",),
            marks=pytest.mark.slow,
        ),
        (lambda d: {"image": raw(d)}, "without ImageNet's mean and deviation", ("image",)),
        pytest.param(
            lambda d: {"image": raw(d)[:, ::-1] * 255},
            "in 0 to 255, with its channels in reverse order",
            ("image",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda d: {"image": (d["image"] - MEAN) / DEVIATION}, "normalised twice", ("image",), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda d: {"image": d["image"].transpose(0, 2, 3, 1).reshape(COUNT, 3, 4, 4)},
            "reshaped where",
            ("image",),
            marks=pytest.mark.slow,
        ),
        (lambda d: {"prev": d["cur"], "cur": d["prev"]}, "with the inputs 'prev' and 'cur' exchanged", ("prev", "cur")),
        pytest.param(
            lambda d: {"prev": d["cur"]},
            "what belongs to 'cur' in the input 'prev', too",
            ("prev",),
            marks=pytest.mark.slow,
        ),
        (lambda d: {"prev": np.roll(d["prev"], 1, 0)}, "the sample before's values in the input 'prev'", ("prev",)),
        pytest.param(
            lambda d: {"cur": np.repeat(d["cur"][:1], COUNT, 0)},
            "the first sample's values in the input 'cur'",
            ("cur",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda d: {"prev": 0 * d["prev"]}, "with zeros in the input 'prev'", ("prev",), marks=pytest.mark.slow
        ),
        pytest.param(lambda d: {"mask": 1 - d["mask"]}, "for input 'mask' as 1 - x", ("mask",), marks=pytest.mark.slow),
        pytest.param(
            lambda d: {"mask": np.ones_like(d["mask"])},
            "with ones in the input 'mask'",
            ("mask",),
            marks=pytest.mark.slow,
        ),
        (lambda d: {"cur": d["cur"][:, ::-1]}, "for input 'cur' with the entries of axis 1 in reverse order", ("cur",)),
        pytest.param(
            lambda d: {"cur": 0.7 * d["cur"] + 0.3}, "for input 'cur' as 0.7 x + 0.3", ("cur",), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda d: {"cur": d["cur"] * np.random.default_rng(0).uniform(0.5, 2, (COUNT, 1))},
            None,
            (),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_way_is_named(
    opened: tuple[Runner, Path, Arrays],
    change: Callable[[Arrays], Arrays],
    words: str | None,
    inputs: tuple[str, ...],
) -> None:
    runner, folder, data = opened
    fed = {name: np.ascontiguousarray(array, np.float32) for name, array in {**data, **change(data)}.items()}
    sides = recorded(runner, folder, recordings.run(runner.model.path, fed, 1)["y"])
    found = other_preparation(sides, [sides.output("y")])
    assert found.explains_all == (words is not None)
    assert [one.code for one in found.findings] == ["data-do-not-fit"] * (words is not None)
    for one in found.findings:
        assert words is not None
        assert words in one.text
        assert one.where.inputs == inputs


def test_a_way_that_holds_for_some_samples_names_them(opened: tuple[Runner, Path, Arrays]) -> None:
    runner, folder, data = opened
    rows = np.arange(COUNT)[:, None]
    fed = {**data, "prev": np.where(rows % 2, 0, data["prev"]).astype(np.float32)}
    sides = recorded(runner, folder, recordings.run(runner.model.path, fed, 1)["y"])
    (one,) = other_preparation(sides, [sides.output("y")], is_quick=True).findings
    assert "with zeros in the input 'prev'" in one.text
    assert "samples 1, 3, 5 (every 2nd) of 6 differ" in one.text
    assert one.where.samples == (1, 3, 5)
    fed["cur"] = np.where(rows % 2, data["cur"], data["prev"])
    sides = recorded(runner, folder, recordings.run(runner.model.path, fed, 1)["y"])
    found = other_preparation(sides, [sides.output("y")], is_quick=True)
    assert found.explains_all
    assert sorted(one.where.samples for one in found.findings) == [(0, 2, 4), (1, 3, 5)]


def test_few_bytes_are_fed_at_a_time(opened: tuple[Runner, Path, Arrays], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, folder, data = opened
    got = recordings.run(runner.model.path, {**data, "prev": data["cur"], "cur": data["prev"]}, 1)["y"]
    sides = recorded(runner, folder, got)
    whole, run, fed = other_preparation(sides, [sides.output("y")], is_quick=True), runner.on, list[int]()

    def counted(name: str, feeds: Sequence[Arrays]) -> object:
        fed.append(sum(array.nbytes for feed in feeds for array in feed.values()))
        return run(name, feeds)

    one = sum(array[:1].nbytes for array in data.values())
    monkeypatch.setattr("mptune.diagnosis.causes.trials._FED_AT_A_TIME_BYTES", 10 * one)
    monkeypatch.setattr(runner, "on", counted)
    assert other_preparation(sides, [sides.output("y")], is_quick=True) == whole
    assert whole.explains_all
    assert len(fed) > 3
    assert max(fed) <= 10 * one


def test_an_attribute_that_is_another_in_the_engine(opened: tuple[Runner, Path, Arrays]) -> None:
    runner, folder, data = opened
    proto = onnx.load(runner.model.path)
    proto.graph.node[1].attribute[0].f = 0.01
    got = recordings.run(models.save(proto, folder, "other.onnx"), data, 1)["y"]
    sides = recorded(runner, folder, got)
    assert not other_preparation(sides, [sides.output("y")], is_quick=True).findings
    found = other_attribute(sides, [sides.output("y")])
    assert found is not None
    assert (found.code, found.where.nodes, found.evidence["what"]) == (
        "attribute-differs",
        ("/stem/LeakyRelu",),
        "alpha",
    )
    assert "with 'alpha' 0.01 in place of 0.1 at LeakyRelu /stem/LeakyRelu" in found.text
    sides = recorded(runner, folder, got + 0.3)
    assert other_attribute(sides, [sides.output("y")]) is None


def test_what_may_be_another_in_a_model() -> None:
    nodes = [
        node("Conv", ["x", "w"], "a", "/Conv", pads=[0, 0, 1, 1]),
        node("Resize", ["a", "", "scales"], "b", "/Resize", mode="nearest", nearest_mode="floor"),
        node("Softmax", ["b"], "y", "/Softmax"),
    ]
    proto = models.model(nodes, [value("x", [1, 3, 8, 8])], [value("y", None)], [weight("w", 4, 3, 2, 2)], opset=18)
    found = list(model_changes(proto))
    words = [change.words for change in found]
    assert len(set(words)) == len(words)
    assert "with 'coordinate_transformation_mode' asymmetric in place of half_pixel at Resize /Resize" in words
    assert "with 'nearest_mode' ceil in place of floor at Resize /Resize" in words
    assert "with 'pads' [1, 1, 0, 0] in place of [0, 0, 1, 1] at Conv /Conv" in words
    assert "with 'axis' 1 in place of -1 at Softmax /Softmax" in words
    assert "with 'mode' linear in place of nearest at Resize /Resize" in words
    assert list(proto.graph.node) == nodes, "the model stays as it is"


@pytest.mark.parametrize(
    ("operator", "other"),
    [("MaxPool", "AveragePool"), ("AveragePool", "MaxPool"), ("Relu", "LeakyRelu with 'alpha' 0.1")],
)
def test_another_operator_in_the_place_of_one(
    operator: str, other: str, opened: tuple[Runner, Path, Arrays], tmp_path: Path
) -> None:
    settings = {} if operator == "Relu" else {"kernel_shape": [2, 2]}
    nodes = [node(operator, ["image"], "a", "/it", **settings), node("Flatten", ["a"], "y", "/Flatten")]
    kept = {"image": opened[2]["image"]}
    inputs = [value("image", ["batch", 3, 4, 4])]
    proto = models.model(nodes, inputs, [value("y", ["batch", None])], opset=18)  # type: ignore[list-item]
    path = models.save(proto, tmp_path)
    change = next(change for change in model_changes(onnx.load(path)) if f"with {other} in place" in change.words)
    got = recordings.run(models.save(change.model, tmp_path, "other.onnx"), kept, 1)["y"]
    samples = [{"image": kept["image"][k : k + 1]} for k in range(COUNT)]
    with Runner(load_model(path), samples, tmp_path / "run", 1) as runner:
        sides = recorded(runner, tmp_path, got)
        found = other_attribute(sides, [sides.output("y")])
    assert found is not None
    assert f"with {other} in place of {operator} at /it" in found.text
    assert found.evidence["what"] == "op_type"


def test_images_as_other_light() -> None:
    image = np.random.default_rng(0).uniform(0, 1, (1, 3, 4, 4)).astype(np.float32)
    made = {change.words: change.feed(0) for change in feed_changes([{"image": image}])}

    def of(words: str) -> np.ndarray:
        feed = made[f"for input 'image' {words}"]
        assert feed is not None
        return feed["image"]

    grey = of("in grey, the same in all channels")
    assert np.ptp(grey, axis=1).max() == 0
    np.testing.assert_allclose(grey[:, 0], np.tensordot([0.299, 0.587, 0.114], image[0], 1)[None], rtol=1e-5)
    np.testing.assert_allclose(of("to the power of 2.2 (linear light)"), image**2.2, rtol=1e-5)
    np.testing.assert_array_equal(of("moved by one pixel to the right")[..., 1:], image[..., :-1])
    assert all(feed is not None and feed["image"].dtype == np.float32 for feed in made.values())
