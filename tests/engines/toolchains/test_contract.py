"""What every EngineSession must do, run against every implementation that can run here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from mptune.engines.base import EngineError, EngineSession
from mptune.engines.latency import calibrate, monotonic_ms
from mptune.engines.ort.cuda_session import graph_obstacle, open_session
from mptune.engines.ort.session import Provider, SessionOptions
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.settings import LatencySettings
from tests.device.blueprint import Blueprint
from tests.device.program import load_model
from tests.engines.engine_support import QUICK, build_here, timed
from tests.graph import models
from tests.graph.models import node, value
from tests.graph.rtx import outlines

Opener = Callable[[Path], EngineSession]


ON_GPU = [
    pytest.param(name, marks=pytest.mark.gpu)
    for name in ("cuda", "cuda-no-graph", "tensorrt", "tensorrt-no-graph", "tensorrt-rtx")
]


@pytest.fixture(params=["cpu", "device", "device-no-graph", *ON_GPU])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens sessions of one implementation and closes them in the end; on ``device``, TensorRT's in host memory."""
    name = request.param.removesuffix("-no-graph")
    latency = LatencySettings(**{**vars(QUICK), "cuda_graph": name == request.param})
    sessions: list[EngineSession] = []
    if name == "device":
        request.getfixturevalue("fake_cuda")
        open_one = _device_opener(latency, tmp_path)
    elif name in ("tensorrt", "tensorrt-rtx"):
        open_one = _tensorrt_opener(name, latency, tmp_path)
    else:
        provider: Provider = "cpu" if name == "cpu" else "cuda"

        def open_one(model: Path) -> EngineSession:
            return open_session(model, SessionOptions(provider, "timed", cuda_graph=latency.cuda_graph))

    def open_and_keep(model: Path) -> EngineSession:
        sessions.append(open_one(model))
        return sessions[-1]

    yield open_and_keep
    for session in sessions:
        session.close()


def _tensorrt_opener(kind: Kind, latency: LatencySettings, folder: Path) -> Opener:
    """Builds an engine for one to four rows, then opens it."""

    def open_one(model: Path) -> EngineSession:
        samples = () if not model.exists() else outlines(model)
        path = build_here(kind, model, folder / f"{model.stem}.engine", samples)
        return TensorRtSession(path, EngineOptions(kind, latency.cuda_graph))

    return open_one


def _device_opener(latency: LatencySettings, folder: Path) -> Opener:
    """Takes any model as one that was built."""

    def open_one(model: Path) -> EngineSession:
        path = folder / f"{model.stem}.engine"
        if model.exists():
            path.write_bytes(Blueprint.of_model(load_model(str(model))).to_bytes())
        return TensorRtSession(path, EngineOptions("tensorrt", latency.cuda_graph))

    return open_one


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 32)).astype(np.float32)}


def test_run_gives_every_output_by_name_as_the_cpu_does(opened: Opener, mlp_path: Path, cnn_path: Path) -> None:
    for path, feeds in ((mlp_path, rows(3)), (cnn_path, {"image": np.ones((2, 3, 16, 16), np.float32)})):
        expected = open_session(path, SessionOptions()).run(feeds)
        outputs = opened(path).run(feeds)
        assert outputs.keys() == expected.keys()
        for name, values in outputs.items():
            assert values.dtype == expected[name].dtype
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)


def test_run_follows_the_feeds_and_their_shapes(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    for count in (1, 4, 2, 4):
        feeds = rows(count, seed=count)
        outputs = session.run(feeds)
        assert outputs["y"].shape == (count, 8)
        np.testing.assert_allclose(session.run(feeds)["y"], outputs["y"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(session.run(rows(1, seed=1))["y"], session.run(rows(1, seed=2))["y"])


def test_run_and_time_may_be_mixed(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    before = session.run(rows(2))
    timed(session, rows(2, seed=9))
    timed(session, rows(3, seed=9))
    timed(session, rows(2, seed=8))
    assert [warning for warning in session.warnings if ": " not in warning] == [], "each names a cure"
    np.testing.assert_allclose(session.run(rows(2))["y"], before["y"], rtol=1e-5, atol=1e-6)


def test_two_sessions_live_side_by_side(opened: Opener, mlp_path: Path, cnn_path: Path) -> None:
    first, second = opened(mlp_path), opened(cnn_path)
    image = {"image": np.ones((2, 3, 16, 16), np.float32)}
    for _ in range(2):
        timed(first, rows(2))
        timed(second, image)
    second.close()
    assert np.isfinite(first.run(rows(2))["y"]).all()


def test_time_takes_as_many_values_as_told(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    repetitions = calibrate(session.stopwatch(rows(2)).run_once, monotonic_ms, QUICK)
    assert repetitions.iterations * repetitions.executions_per_value >= QUICK.min_iterations
    latency = timed(session, rows(2), repetitions)
    assert len(latency.raw_ms) == repetitions.iterations
    assert latency.source == "measured"
    assert 0 < latency.ci95_ms[0] <= latency.median_ms <= latency.ci95_ms[1]
    assert all(value > 0 for value in latency.raw_ms)


def test_feeds_that_are_not_contiguous_are_understood(opened: Opener, mlp_path: Path) -> None:
    session = opened(mlp_path)
    wide = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    turned = session.run({"x": wide.T})
    straight = session.run({"x": np.ascontiguousarray(wide.T)})
    np.testing.assert_array_equal(turned["y"], straight["y"])
    timed(session, {"x": wide.T})


def test_outputs_whose_shape_depends_on_values(opened: Opener, tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], "where"), node("Relu", ["x"], "y")]
    outputs = [value("where", [1, "found"], TensorProto.INT64), value("y", [4])]
    session = opened(models.save(models.model(nodes, [value("x", [4])], outputs), tmp_path))
    for values, found in (([0, 1, 2, 0], 2), ([1, 1, 1, 1], 4), ([0, 0, 0, 0], 0)):
        feeds = {"x": np.array(values, np.float32)}
        assert session.run(feeds)["where"].shape == (1, found)
        assert len(timed(session, feeds).raw_ms) == 10


def test_types_other_than_float(opened: Opener, tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["table", "index"], "row"),
        node("Cast", ["row"], "half", to=TensorProto.FLOAT16),
        node("Not", ["flag"], "inverse"),
    ]
    inputs = [value("table", [5, 2]), value("index", ["n"], TensorProto.INT64), value("flag", [], TensorProto.BOOL)]
    outputs = [value("half", ["n", 2], TensorProto.FLOAT16), value("inverse", [], TensorProto.BOOL)]
    session = opened(models.save(models.model(nodes, inputs, outputs), tmp_path))
    feeds = {
        "table": np.arange(10, dtype=np.float32).reshape(5, 2),
        "index": np.array([4, 0], np.int64),
        "flag": np.array(True),
    }
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
    with pytest.raises(EngineError, match="closed"):
        session.run(rows(1))
    with pytest.raises(EngineError, match="closed"):
        timed(session, rows(1))
    for watch in watches:
        with pytest.raises(EngineError, match="closed"):
            watch.run_once()
        with pytest.raises(EngineError, match="closed"):
            watch.value_ms(1)


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
    outputs = [value("y", [1, "n"], TensorProto.INT64)]
    path = models.save(models.model([node("NonZero", ["x"], "y", "find")], [value("x", [4])], outputs), tmp_path)
    assert graph_obstacle(path) == "NonZero (find)"
    assert graph_obstacle(path.read_bytes()) == "NonZero (find)"
