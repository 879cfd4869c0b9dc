"""Samples that a deployment feeds otherwise: each way is named by the input, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.diagnosis.comparing import make_sides
from mptune.diagnosis.preprocessing import other_feed, ways
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.graph.loading.model import load_model
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight

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


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Path, Arrays]]:
    folder = tmp_path_factory.mktemp("preparation")
    proto, data = tracker()
    path = models.save(proto, folder)
    samples = [{name: array[k : k + 1] for name, array in data.items()} for k in range(COUNT)]
    runner = Runner(load_model(path), samples, folder / "run", 1)
    yield runner, folder, data
    runner.worker.close()


def recorded(runner: Runner, folder: Path, got: np.ndarray) -> Sides:
    np.savez(folder / "got.npz", y=got)
    return make_sides(
        runner,
        None,
        1,
        recorded=folder / "got.npz",
        recorded_reference=None,
        ignore=(),
        tolerances=(),
        max_error=None,
    )


def raw(data: Arrays) -> np.ndarray:
    return data["image"] * DEVIATION + MEAN


def layout(image: np.ndarray) -> np.ndarray:
    return image.transpose(0, 2, 3, 1).reshape(COUNT, 3, 4, 4)


WAYS: list[tuple[Callable[[Arrays], Arrays], str | None, tuple[str, ...]]] = [
    (lambda d: {"image": raw(d)}, "without ImageNet's mean and deviation", ("image",)),
    (lambda d: {"prev": d["cur"], "cur": d["prev"]}, "with the inputs 'prev' and 'cur' exchanged", ("prev", "cur")),
    (lambda d: {"prev": np.roll(d["prev"], 1, 0)}, "the sample before's values in the input 'prev'", ("prev",)),
    (lambda d: {"image": d["image"][..., ::-1]}, "for input 'image' mirrored", ("image",)),
    (lambda d: {"image": d["image"].swapaxes(2, 3)}, "with height and width exchanged", ("image",)),
    (lambda d: {"image": d["image"] / 255}, "for input 'image' divided by 255", ("image",)),
]
SLOW: list[tuple[Callable[[Arrays], Arrays], str | None, tuple[str, ...]]] = [
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
    opened: tuple[Runner, Path, Arrays],
    change: Callable[[Arrays], Arrays],
    words: str | None,
    inputs: tuple[str, ...],
) -> None:
    runner, folder, data = opened
    fed = {name: np.ascontiguousarray(array, np.float32) for name, array in {**data, **change(data)}.items()}
    sides = recorded(runner, folder, recordings.run(runner.model.path, fed, 1)["y"])
    findings = other_feed(sides.outputs)
    assert [finding.code for finding in findings] == ["data-do-not-fit"] * (words is not None)
    for finding in findings:
        assert str(words) in finding.text.removeprefix("the model gives what was recorded ")
        assert finding.where.inputs == inputs


def test_a_way_that_holds_for_some_samples_names_them(opened: tuple[Runner, Path, Arrays]) -> None:
    runner, folder, data = opened
    rows = np.arange(COUNT)[:, None]
    fed = {**data, "prev": np.where(rows % 2, 0, data["prev"]).astype(np.float32)}
    sides = recorded(runner, folder, recordings.run(runner.model.path, fed, 1)["y"])
    (one,) = other_feed(sides.outputs)
    assert "with zeros in the input 'prev'" in one.text
    assert "on 3 of 3 samples" in one.text
    assert one.where.samples == (1, 3, 5)
    got = recordings.run(runner.model.path, fed, 1)["y"]
    sides = recorded(runner, folder, np.where(rows % 2, got, got + 0.01).astype(np.float32))
    (one,) = other_feed(sides.outputs)
    assert "with zeros in the input 'prev'" in one.text
    assert "on 3 of 6: samples 1, 3, 5" in one.text
    assert one.where.samples == (1, 3, 5)


def test_few_bytes_are_fed_at_a_time(opened: tuple[Runner, Path, Arrays], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, folder, data = opened
    got = recordings.run(runner.model.path, {**data, "prev": data["cur"], "cur": data["prev"]}, 1)["y"]
    sides = recorded(runner, folder, got)
    whole, run, fed = other_feed(sides.outputs), runner.on, list[int]()

    def counted(name: str, feeds: Sequence[Arrays]) -> object:
        fed.append(sum(array.nbytes for feed in feeds for array in feed.values()))
        return run(name, feeds)

    one = sum(array[:1].nbytes for array in data.values())
    monkeypatch.setattr("mptune.diagnosis.preprocessing._MOST_BYTES", 10 * one)
    monkeypatch.setattr(runner, "on", counted)
    assert other_feed(sides.outputs) == whole
    assert len(whole) == 1
    assert len(fed) > 3
    assert max(fed) <= 10 * one


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
