"""What Python gives to ``mptune.search``: arrays, models in memory, functions as metrics, shapes, progress."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import mptune
from mptune.api.arguments import data_argument, listening, recorded_plugins, shapes_argument
from mptune.commands.searching import search as search_command
from mptune.data.calibration import load_calibration
from mptune.errors import DataError, ModelError, RunError, SettingsError
from mptune.graph.loading.tensors import TensorInfo
from mptune.run_json import ModelSection, differences, identity_of, plugins_sha256
from mptune.settings import DataSettings, InMemory, SearchSettings, ShapeRange
from mptune.tuning.front import Front
from tests import fakes
from tests.fakes import Diary, make_toolchain
from tests.tuning.factory import make_fixed_settings, make_run_file

pytestmark = pytest.mark.usefixtures("opened_here")

Feed = Mapping[str, np.ndarray]

ROWS = np.random.default_rng(7).normal(size=(8, 32)).astype(np.float32)


def search(model: Any = "model.onnx", **arguments: Any) -> Front:
    """Real emulated errors, predicted latencies."""
    wanted = {"data": ROWS, "budget": 4, "target": "jetson-orin-nano-8gb", **arguments}
    return mptune.search(model, **wanted)


# -- the signature ------------------------------------------------------------------------------------------------


def test_every_setting_is_a_keyword_and_documented() -> None:
    parameters = inspect.signature(mptune.search).parameters
    others = {"metric_function", "reported_metrics", "rollout"}
    assert set(SearchSettings.__dataclass_fields__) - others <= set(parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for name, parameter in parameters.items():
        assert f"        {name}: " in (mptune.search.__doc__ or ""), name
        field = SearchSettings.__dataclass_fields__.get(name)
        if field is not None and parameter.default is not None and parameter.default != ():
            assert parameter.default == field.default, name


@pytest.mark.parametrize("name", ["search", "inspect", "apply", "compare", "check"])
def test_data_have_a_type_that_says_what_may_be_given(name: str) -> None:
    assert inspect.signature(getattr(mptune, name)).parameters["data"].annotation.startswith("arguments.DataLike")


OTHERWISE = {"context", "json_", "gpus", "engine", "shapes", "workspace_mb", "limits", "feedback", "precisions"}
OTHERWISE |= {"explain", "open_", "quiet", "help_all"}
"""Options whose name or form is another one in Python, or which are of the terminal alone."""


def test_the_command_line_has_the_same_names_and_defaults() -> None:
    python = inspect.signature(mptune.search).parameters
    for name, option in inspect.signature(search_command).parameters.items():
        if name not in OTHERWISE:
            assert python[name].default == option.default, name
    assert ",".join(python["precisions"].default) == inspect.signature(search_command).parameters["precisions"].default


# -- data in memory -----------------------------------------------------------------------------------------------

X = TensorInfo("x", "float", ("n", 32))
MASK = TensorInfo("mask", "float", ("n", 4))


def load(data: Any, *inputs: TensorInfo, batch: int = 1) -> tuple[Feed, ...]:
    return load_calibration(InMemory(data), inputs or (X,), DataSettings(batch=batch), 0).samples


class Tensor:
    """As much of a tensor of another library as NumPy asks for."""

    def __init__(self, values: np.ndarray, error: Exception | None = None) -> None:
        self._values, self._error = values, error

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        if self._error is not None:
            raise self._error
        return self._values


@pytest.mark.parametrize(
    "data",
    [ROWS, {"x": ROWS}, [{"x": row[None]} for row in ROWS], [row[None] for row in ROWS], Tensor(ROWS)],
    ids=["array", "dict", "dicts", "arrays", "tensor"],
)
def test_every_form_gives_the_same_samples(data: Any) -> None:
    samples = load(data)
    assert len(samples) == 8
    np.testing.assert_array_equal(np.concatenate([sample["x"] for sample in samples]), ROWS)


def filled_again() -> Iterator[dict[str, np.ndarray]]:
    """A loader that fills one buffer for every sample."""
    buffer = np.empty((1, 32), np.float32)
    for row in ROWS:
        buffer[:] = row
        yield {"x": buffer}


class Batches:
    """A data set that is iterated over and has no length, as a data loader."""

    def __iter__(self) -> Iterator[Tensor]:
        return (Tensor(sample["x"]) for sample in filled_again())


@pytest.mark.parametrize("data", [filled_again, Batches, lambda: (sample["x"] for sample in filled_again())])
def test_a_loader_that_fills_one_buffer_again_gives_every_sample(data: Callable[[], Any]) -> None:
    for content in (data(), data_argument(data()).content):  # type: ignore[union-attr]
        np.testing.assert_array_equal(np.concatenate([sample["x"] for sample in load(content)]), ROWS)


@pytest.mark.parametrize(
    ("data", "inputs", "message", "hint"),
    [
        (3, (X,), "type int hold no samples", "dict of arrays"),
        ([], (X,), "type list hold no samples", "read only once"),
        (ROWS, (X, MASK), "one array, the model has 2 inputs", "mask=..."),
        ([{"x": ROWS[:1]}, 5], (X,), "sample 1 is a int", "dict per sample"),
        ({"x": [[1.0]]}, (X,), "is a list, not an array", "np.asarray"),
        (np.ma.masked_array(ROWS, ROWS > 1), (X,), "arrays: input 'x' is a masked array", "filled"),
        (iter([{"x": np.ma.masked_array(ROWS[:1])}]), (X,), "sample 0: input 'x' is a masked array", "filled"),
        (np.array([{}], dtype=object), (X,), "not an array of numbers", "float32"),
        (Tensor(ROWS, TypeError("can't convert cuda:0")), (X,), "cannot be read as an array: can't", "cpu().numpy()"),
        ([{"x": ROWS[0]}], (X,), r"expected shape \(n, 32\), got \(32,\)", "array[None]"),
    ],
)
def test_what_does_not_fit_is_one_line_and_a_hint(
    data: Any, inputs: tuple[TensorInfo, ...], message: str, hint: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(data, *inputs)
    assert hint in caught.value.hint


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".json", ".onnx"])
def test_data_in_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError):
        load_calibration(tmp_path / f"pipe{suffix}", (X,), DataSettings(), 0)


def test_the_same_arrays_resume_a_run_and_others_do_not(place: Path) -> None:
    first = search(data=({"x": row[None]} for row in ROWS))  # a generator is read once
    diary = Diary()
    assert search(data=ROWS, listener=diary) == first
    assert not diary.done
    np.savez("data.npz", x=ROWS)
    assert search(data="data.npz") == first, "the samples count, not where they come from"
    with pytest.raises(RunError, match="another version of the data"):
        search(data=ROWS + 1)


# -- a model in memory --------------------------------------------------------------------------------------------


def test_a_model_in_memory_is_kept_in_its_run(place: Path) -> None:
    proto = onnx.load("model.onnx")
    front, run = search(proto), Path("model.mptune")  # by the graph's name
    assert front.run_dir == run
    assert onnx.load(run / "source.onnx") == proto
    diary = Diary()
    assert search(onnx.load("model.onnx"), listener=diary) == front
    assert not diary.done
    assert mptune.pick(run, max_error=1.0).chosen is not None
    other = onnx.load("model.onnx")
    other.graph.node[0].name = "renamed"
    with pytest.raises(RunError, match="another model"):
        search(other)
    assert onnx.load(run / "source.onnx") == proto
    inspection = mptune.inspect(proto, data=ROWS)
    assert (inspection.samples, inspection.observed) == (8, "arrays")
    assert inspection.model.sha256 == mptune.inspect(proto).model.sha256 == front.model_sha256


def test_a_model_in_memory_that_has_no_name_or_cannot_be_tuned(place: Path) -> None:
    proto = onnx.load("model.onnx")
    proto.graph.name = ""
    with pytest.raises(SettingsError, match="without a graph name"):
        search(proto)
    assert search(proto, out="here.mptune").run_dir == Path("here.mptune")
    proto.graph.name = "../a b/c"
    assert search(proto).run_dir == Path("a_b_c.mptune")
    proto.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(ModelError, match="refers to external data") as caught:
        search(proto)
    assert "onnx.load(path)" in caught.value.hint
    proto.graph.initializer[0].ClearField("data_location")
    del proto.graph.node[:]
    with pytest.raises(ModelError, match="the ModelProto holds no ONNX graph"):
        search(proto)


# -- a function as the metric -------------------------------------------------------------------------------------


def test_a_function_of_this_process_is_the_metric(place: Path) -> None:
    shapes: list[tuple[int, ...]] = []
    unpicklable = io.BytesIO()  # a closure over something that could not go into the worker

    def largest(outputs: Feed, reference: Feed) -> float:
        assert not unpicklable.closed
        shapes.append(reference["y"].shape)
        return float(np.abs(outputs["y"] - reference["y"]).max())

    front = search(metric=largest)
    assert front.metric == "callable:largest"
    assert set(shapes) == {(1, 8)}
    for point in front.points:
        assert point.error_value == pytest.approx(replace(point, metric="max_abs").error_value)
    asked = len(shapes)
    assert search(metric=largest) == front == mptune.report("model.mptune")
    assert len(shapes) == asked, "a finished run asks nothing"
    assert mptune.pick("model.mptune", knee=True).metric == "callable:largest"
    more = search(metric=largest, budget=6)
    assert (more.evaluations, len(shapes) > asked) == (6, True)
    warned: list[str] = []
    mptune.export("model.mptune", "run.tar.gz", warn=warned.append)
    assert any("Python function" in text for text in warned)
    for call in (lambda: search(metric="callable:largest"), lambda: mptune.confirm("model.mptune", target="cpu")):
        with pytest.raises(SettingsError, match="'largest' is a Python function, which a run directory") as caught:
            call()
        assert "metric=FUNCTION" in caught.value.hint


def test_a_metric_is_a_name_or_a_function_that_works(place: Path) -> None:
    with pytest.raises(DataError, match="metric callable:lambda failed: ZeroDivisionError") as caught:
        search(metric=lambda outputs, reference: 1 / 0)
    assert "function(outputs, reference)" in caught.value.hint
    with pytest.raises(SettingsError, match="cannot be a int"):
        search(metric=3)
    with pytest.raises(SettingsError, match="unknown metric 'relative_l3'"):
        search(metric="relative_l3")


# -- shapes and progress ------------------------------------------------------------------------------------------


X_SHAPES = (ShapeRange("x", (1, 32), (4, 32), (8, 32)),)


def test_shapes_have_several_forms() -> None:
    text = "x:1x32,4x32,8x32"
    for shapes in ({"x": ((1, 32), (4, 32), (8, 32))}, text, [text], X_SHAPES):
        assert shapes_argument(shapes) == X_SHAPES
    assert shapes_argument({"x": (8, 32)}) == (ShapeRange("x", (8, 32), (8, 32), (8, 32)),)
    for wrong in ({"x": 3}, {"x": ((1,), (2,))}, {"x": "8x32"}, {"x": ((1,), (2,), "a")}):
        with pytest.raises(SettingsError, match="is not understood") as caught:
            shapes_argument(wrong)
        assert "(1, 32), (4, 32), (8, 32)" in caught.value.hint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("progress", "stream", "shows"),
    [
        *((None, stream, shows) for stream, shows in ((io.StringIO(), False), (Terminal(), True), (None, False))),
        *((True, stream, shows) for stream, shows in ((io.StringIO(), True), (None, False))),
        (False, Terminal(), False),
    ],
)
def test_progress_shows_by_default_in_a_terminal(
    progress: bool | None, stream: io.StringIO | None, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with listening(progress, None) as listener:
        listener.stage("searching")
    assert ("searching" in (stream.getvalue() if stream else "")) is shows


def test_progress_shows_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, stderr = type("ZMQInteractiveShell", (), {}), io.StringIO()  # what Jupyter's kernel calls its shell
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell))  # type: ignore[arg-type]
    with listening(None, None) as listener:
        listener.stage("searching")
    assert "searching" in stderr.getvalue()


def test_a_listener_and_progress_both_hear(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "dumb")
    stages = []
    for progress in (None, True):
        diary, toolchain = Diary(), make_toolchain(fails=["g000"])
        fakes.search(toolchain, data=None, budget=3, listener=diary, progress=progress, out=f"{progress}.mptune")
        assert ("failed: build" in stderr.getvalue()) is bool(progress)
        assert diary.failures
        assert diary.warnings, "there are no data"
        stages.append(diary.stages[:2])
    assert stages[0] == stages[1]


def test_the_standard_logger_gets_a_line_for_each_plan_and_none_is_printed(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "mptune"):
        front = fakes.search(make_toolchain(fails=["g000"]), budget=6, progress=False)
    levels = [record.levelno for record in caplog.records if record.message.startswith("[")]
    assert levels.count(logging.INFO) == front.evaluations - front.failures > 0
    assert levels.count(logging.WARNING) == front.failures > 0
    assert f"] {front.fp32.plan.fingerprint}: 10 ms measured, error " in caplog.text
    assert "failed: build" in caplog.text
    assert "stopped: the budget is spent" in caplog.messages
    assert not any("one-group errors: 1 of" in message for message in caplog.messages), "counts are for DEBUG"
    assert capsys.readouterr() == ("", "")
    # Python's last resort prints warnings where nothing handles them.
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("mptune").handlers)


def test_plugins_of_a_run_are_loaded_only_where_they_are_named(tmp_path: Path) -> None:
    """They are native code, and the run may come from a stranger; the devices of a run have files of their own."""
    mine, other = tmp_path / "mine.so", tmp_path / "other.so"
    mine.write_bytes(b"mine")
    other.write_bytes(b"other")
    settings = SearchSettings(plugins=(mine,))
    made = make_fixed_settings(settings, plugins_sha256=plugins_sha256((mine,)))
    file = make_run_file(settings, ModelSection(path="m", sha256=""), made)
    assert recorded_plugins(file, [mine], tmp_path, "worker") == (mine.resolve(),)
    assert recorded_plugins(file, str(other), tmp_path, "confirm", may_differ=True) == (other.resolve(),)
    with pytest.raises(RunError, match="another version of the plugins"):
        recorded_plugins(file, other, tmp_path, "worker")
    with pytest.raises(RunError, match="not loaded unless you name them") as caught:
        recorded_plugins(file, None, tmp_path, "confirm", may_differ=True)
    assert f"--plugin {mine}" in caught.value.hint
    with pytest.raises(SettingsError, match="is no file"):
        recorded_plugins(file, tmp_path / "gone.so", tmp_path, "worker")
    before, now = (
        identity_of(file.model_copy(update={"fixed_settings": f}))
        for f in (made, make_fixed_settings(settings, plugins_sha256=plugins_sha256((other,))))
    )
    assert differences(before, now, "there", "here") == {"version of the plugins": ""}
