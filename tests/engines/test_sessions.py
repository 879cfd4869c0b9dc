"""What every EngineSession must do, run against every implementation that can run here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.engines.base import EngineError, EngineSession
from mptune.engines.latency import calibrate, monotonic_ms
from mptune.engines.ort.cuda_session import graph_obstacle, open_session
from mptune.engines.ort.session import SessionOptions
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from tests.device.blueprint import Blueprint
from tests.device.program import load_model
from tests.engines.engine_support import QUICK, build_here, timed
from tests.graph import models
from tests.graph.rtx import outlines

Opener = Callable[[Path], EngineSession]
ON_GPU = [
    pytest.param(name, marks=pytest.mark.gpu)
    for name in ("cuda", "cuda-no-graph", "tensorrt", "tensorrt-no-graph", "tensorrt-rtx")
]


@pytest.fixture(params=["cpu", "device", "device-no-graph", *ON_GPU])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens sessions of one implementation and closes them in the end; on ``device``, TensorRT's in host memory, which
    takes any model as one that was built."""
    name, no_graph, _ = request.param.partition("-no-graph")
    if name == "device":
        request.getfixturevalue("fake_cuda")

    def open_one(model: Path) -> EngineSession:
        if name in ("cpu", "cuda"):
            return open_session(model, SessionOptions(name, "timed", cuda_graph=not no_graph))
        path = tmp_path / f"{model.stem}.engine"
        if name == "device" and model.exists():
            path.write_bytes(Blueprint.of_model(load_model(str(model))).to_bytes())
        elif name != "device":
            build_here(name, model, path, outlines(model) if model.exists() else ())
        return TensorRtSession(path, EngineOptions("tensorrt" if name == "device" else name, not no_graph))

    with ExitStack() as stack:
        yield lambda model: stack.enter_context(closing(open_one(model)))


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 32)).astype(np.float32)}


def test_run_gives_every_output_by_name_as_the_cpu_does(opened: Opener, mlp_path: Path, cnn_path: Path) -> None:
    for path, feeds in ((mlp_path, rows(3)), (cnn_path, {"image": np.ones((2, 3, 16, 16), np.float32)})):
        expected = open_session(path, SessionOptions()).run(feeds)
        outputs = opened(path).run(feeds)
        assert outputs.keys() == expected.keys()
        for name, values in outputs.items():
            assert values.dtype == expected[name].dtype
            assert values.flags.owndata, "outputs do not hold the memory of a session"
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)


def test_run_follows_the_feeds_and_their_shapes(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    for count in (1, 4, 2, 4):
        feeds = rows(count, seed=count)
        outputs = session.run(feeds)
        assert outputs["y"].shape == (count, 8)
        np.testing.assert_allclose(session.run(feeds)["y"], outputs["y"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(session.run(rows(1, seed=1))["y"], session.run(rows(1, seed=2))["y"])
    turned = {"x": np.asfortranarray(rows(3)["x"])}  # not contiguous
    np.testing.assert_array_equal(session.run(turned)["y"], session.run(rows(3))["y"])
    timed(session, turned)


def test_run_and_time_may_be_mixed(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    before = session.run(rows(2))
    for count, seed in ((2, 9), (3, 9), (2, 8)):
        timed(session, rows(count, seed))
    assert [warning for warning in session.warnings if ": " not in warning] == [], "each names a cure"
    np.testing.assert_allclose(session.run(rows(2))["y"], before["y"], rtol=1e-5, atol=1e-6)


def test_time_takes_as_many_values_as_told(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    repetitions = calibrate(session.stopwatch(rows(2)).run_once, monotonic_ms, QUICK)
    assert repetitions.iterations * repetitions.executions_per_value >= QUICK.min_iterations
    latency = timed(session, rows(2), repetitions)
    assert (len(latency.raw_ms), latency.source) == (repetitions.iterations, "measured")
    assert min(latency.raw_ms) > 0
    assert 0 < latency.ci95_ms[0] <= latency.median_ms <= latency.ci95_ms[1]


def test_outputs_whose_shape_depends_on_values(opened: Opener, tmp_path: Path) -> None:
    graph = "(float[4] x) => (int64[1, n] where, float[4] y) { where = NonZero (x) y = Relu (x) }"
    session = opened(models.save(models.text(graph), tmp_path))
    for values, count in (([0, 1, 2, 0], 2), ([1, 1, 1, 1], 4), ([0, 0, 0, 0], 0)):
        feeds = {"x": np.array(values, np.float32)}
        assert session.run(feeds)["where"].shape == (1, count)
        assert len(timed(session, feeds).raw_ms) == 10


def test_types_other_than_float(opened: Opener, tmp_path: Path) -> None:
    graph = """(float[5, 2] table, int64[n] index, bool flag) => (float16[n, 2] half, bool inverse) {
        row = Gather (table, index) half = Cast <to = 10> (row) inverse = Not (flag)
    }"""
    session = opened(models.save(models.text(graph), tmp_path))
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    feeds = {"table": table, "index": np.array([4, 0], np.int64), "flag": np.array(True)}
    for _ in range(2):
        outputs = session.run(feeds)
        np.testing.assert_array_equal(outputs["half"], np.array([[8, 9], [0, 1]], np.float16))
        assert outputs["half"].dtype == np.float16
        assert not outputs["inverse"]
        timed(session, feeds)


def test_wrong_feeds_and_a_missing_file_are_engine_errors(opened: Opener, mlp_path: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        opened(tmp_path / "none.onnx")
    session = opened(mlp_path)
    for feeds in ({"x": np.zeros((2, 31), np.float32)}, {"x": np.zeros((2, 32), np.int64)}):
        with pytest.raises(EngineError):
            session.run(feeds)
    assert session.run(rows(2))["y"].shape == (2, 8)


def inner(session: EngineSession) -> Any:
    """The library's own object, which must be gone before its stream is."""
    return session._context if isinstance(session, TensorRtSession) else session._session  # type: ignore[attr-defined]


def test_a_closed_session_says_so_and_is_gone_though_a_stopwatch_is_kept(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    watches = [session.stopwatch(rows(count)) for count in (1, 2, 1)]
    watches[-1].run_once()
    reference = weakref.ref(inner(session))
    session.close()
    session.close()
    assert reference() is None
    calls = [partial(session.run, rows(1)), partial(timed, session, rows(1))]
    for call in (*calls, *(w.run_once for w in watches), *(partial(w.value_ms, 1) for w in watches)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_closed_session_is_gone_though_an_exception_of_it_is_kept(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    watch = session.stopwatch(rows(1))
    with pytest.raises(EngineError) as caught:
        session.run({"x": np.zeros((2, 31), np.float32)})
    reference = weakref.ref(inner(session))
    if isinstance(session, TensorRtSession):
        del caught  # Its frames hold the context; an answer is sent before the session closes.
    session.close()
    assert reference() is None
    del watch


@pytest.mark.parametrize("opened", ["cpu", *ON_GPU], indirect=True)
def test_an_object_that_keeps_a_session_alive_is_reported(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    kept = inner(session)
    with pytest.warns(RuntimeWarning, match="still alive after it was closed"):
        session.close()
    with pytest.raises(EngineError, match="closed"):
        session.run(rows(1))
    del kept


def test_what_a_cuda_graph_cannot_capture_is_named(mlp_path: Path, tmp_path: Path) -> None:
    assert graph_obstacle(mlp_path) is None
    path = models.save(models.text('(float[4] x) => (int64[1, n] y) { ["find"] y = NonZero (x) }'), tmp_path)
    assert graph_obstacle(path) == graph_obstacle(path.read_bytes()) == "NonZero (find)"
