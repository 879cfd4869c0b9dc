"""What a script of the user's does to its process stays there and is named as the script's; one that a run names is not
run, and one inside of it never."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from mptune.api.arguments import recorded_metric
from mptune.data.metrics.table import number_of, refuse_inside, script_of
from mptune.data.scripts import end_scripts, resolve_metric, run_loader
from mptune.errors import DataError, RunError, SettingsError

FAULTS = """from __future__ import annotations
import os, sys
import numpy as np
from dataclasses import dataclass
from mptune_test_neighbour import FACTOR
kept, executed = [], []

def leaves(*arguments): os._exit(0)
def crashes(*arguments): os.abort()
def closes(*arguments): os.closerange(1, 100)
def interrupts(*arguments): raise KeyboardInterrupt
def huge(outputs, reference): return 10**400
def loads(): return [{"x": np.full((1, 3), k, np.float32)} for k in range(2)]

def forks(outputs, reference):
    child = os.fork()
    if not child:
        raise ValueError("in the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def moves(outputs, reference):
    here = os.getcwd()
    os.chdir("/")
    return float(here == "/")

def counts(outputs, reference):
    executed.append(1)
    return len(executed)

counts_too = counts

def destroys(outputs, reference):
    kept.append(outputs["y"])
    if any(array[0] != -1.0 for array in kept[:-1]):
        return -1.0
    value = outputs["y"].sum() + outputs["strided"].sum() + reference["y"].sum()
    outputs["y"][:] = -1.0
    outputs.clear()
    reference.clear()
    return value

@dataclass
class Scale:
    by: float = FACTOR

def modules(outputs, reference):
    assert Scale().by == 2.0
    import unittest
    return float(hasattr(unittest, "TestCase")) + 2.0 * any(name in sys.modules for name in ("onnx", "scipy"))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("scripts") / "mine.py"
    path.write_text(FAULTS)
    path.with_name("unittest.py").write_text("raise RuntimeError('a stranger')\n")
    path.with_name("mptune_test_neighbour.py").write_text("FACTOR = 2.0")
    yield path
    end_scripts()


def called(spec: str) -> Callable[..., Any]:
    """The function of a script's metric."""
    return resolve_metric(spec).load()


ENDS = {
    "leaves": "its process ended: exited with status 0",
    "crashes": 'its process ended: killed by SIGABRT (File "{script}", line 9 in crashes)',
    "interrupts": "KeyboardInterrupt",
    "closes": "its process ended: exited with status 1",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_metric_or_loader_that_ends_or_breaks_its_process_is_one_error_that_names_it(name: str, script: Path) -> None:
    words = ENDS[name].format(script=script)
    with pytest.raises(DataError) as caught:
        number_of("m", called(f"{script}:{name}"), ({}, {}), " on sample 3")
    assert caught.value.message == f"metric m failed on sample 3: {words}"
    with pytest.raises(DataError) as caught:
        run_loader(script, name)
    assert caught.value.message == f"{script}:{name} failed: {words}"


def test_a_number_beyond_float64_is_one_error_that_names_its_function(script: Path) -> None:
    with pytest.raises(DataError, match=rf"m failed: it returned 1000.*is not one number of float64 \({script}:12\)"):
        number_of("m", called(f"{script}:huge"), ({}, {}))


def test_the_next_call_of_a_metric_is_like_the_first(script: Path) -> None:
    moves, destroys = called(f"{script}:moves"), called(f"{script}:destroys")
    assert (moves({}, {}), Path.cwd() != Path("/")) == (0.0, True)
    outputs = {"y": np.ones(5), "strided": np.ones((4, 4))[:, ::2], "empty": np.ones((0, 3))}
    assert [destroys(outputs, {"y": np.ones(2)}) for _ in range(3)] == [15.0] * 3
    assert outputs["y"].sum() == 5


def test_functions_share_a_module_which_imports_its_neighbours_and_nothing_heavy(script: Path) -> None:
    end_scripts()
    assert called(f"{script}:modules")({}, {}) == 1.0
    first, second = (called(f"{script}:{name}") for name in ("counts", "counts_too"))
    assert [first({}, {}), second({}, {}), first({}, {})] == [1.0, 2.0, 3.0]
    assert called(f"{script}:forks")({}, {}) == 1.0, "a process that it forked ends with it"


def scripts_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "mptune.processes" in " ".join(child.cmdline())]


def test_a_loaders_arrays_arrive_and_its_process_ends(script: Path) -> None:
    called(f"{script}:moves")
    process = scripts_processes()
    samples = run_loader(script, "loads")
    assert [sample["x"].tolist() for sample in samples] == [[[0.0] * 3], [[1.0] * 3]]
    assert (len(process), scripts_processes()) == (1, []), "one process for all scripts"


@pytest.mark.parametrize(
    ("text", "spec", "match", "hint"),
    [
        ("", "none.py:f", "no such file", "Python file"),
        ("def f(o, r): ...", "metrics.py", "names no function", "script.py:function"),
        ("def f(o, r): ...", "metrics.py:g", "has no function 'g'", "def metric(outputs, reference)"),
        ("f = 3", "metrics.py:f", "has no function 'f'", "def metric(outputs, reference)"),
        ("", "metric.txt:f", "names no function", ".py"),
        ("def f(:", "metrics.py:f", "failed to load: SyntaxError", "python metrics.py"),
        ("import no_such_module_here", "metrics.py:f", "failed to load: ModuleNotFoundError", "python metrics.py"),
        ("raise SystemExit(3)", "metrics.py:f", "failed to load: SystemExit: 3", "python metrics.py"),
    ],
)
def test_what_is_no_metric(text: str, spec: str, match: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text(text)
    before = list(sys.path)
    with pytest.raises(DataError, match=match) as caught:
        resolve_metric(str(tmp_path / spec))
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert sys.path == before


RUN = Path("run.mptune")


def made_with(*metrics: str) -> Any:
    """As much of a run.json as names its metrics."""
    return SimpleNamespace(search=SimpleNamespace(metric=metrics[0], reported_metrics=metrics[1:]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script and a run directory."""
    (tmp_path / "run.mptune").mkdir()
    (tmp_path / "mine.py").write_text("def worst(outputs, reference):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_script_of_a_run_has_to_be_named_in_each_call(place: Path) -> None:
    assert script_of("a.py:f") == script_of("a.py/:f") == Path("a.py")
    assert script_of("relative_l2") is script_of("callable:f") is script_of("a.txt:f") is None
    recorded = made_with("relative_l2", "mine.py:worst")
    assert recorded_metric(recorded, "mine.py:worst", RUN, "confirm") == ("relative_l2", None)
    for given in (None, "relative_l2"):
        with pytest.raises(RunError, match="is not run unless you name it") as caught:
            recorded_metric(recorded, given, RUN, "confirm")
        assert "`mptune confirm run.mptune --metric mine.py:worst`" in caught.value.hint
    (place / "sub").mkdir()
    moved = str(Path("mine.py").rename("sub/mine.py")) + ":worst"
    assert recorded_metric(made_with("mine.py:worst"), moved, RUN, "worker") == (moved, None)
    with pytest.raises(SettingsError, match="and that of the run"):
        recorded_metric(made_with("mine.py:least"), moved, RUN, "worker")


@pytest.mark.parametrize(
    "metric", ["run.mptune/evil.py:f", "run.mptune/../run.mptune/evil.py/:f", "link.py:f", "run.mptune/out.py:f"]
)
@pytest.mark.usefixtures("place")
def test_a_script_in_the_run_directory_is_never_run(metric: str) -> None:
    (RUN / "evil.py").write_text("")
    Path("link.py").symlink_to("run.mptune/evil.py")
    (RUN / "out.py").symlink_to("../mine.py")
    with pytest.raises(RunError, match="lies in the run directory"):
        refuse_inside(metric, RUN)
    for given in (None, metric):
        with pytest.raises(RunError, match="lies in the run directory"):
            recorded_metric(made_with(metric), given, RUN, "confirm")
