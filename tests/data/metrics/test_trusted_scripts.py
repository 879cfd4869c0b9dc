"""A script that only a run directory names is not run, and one inside of it never."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mptune.api.arguments import recorded_metric
from mptune.data.metrics.table import refuse_inside, script_of
from mptune.errors import RunError, SettingsError

RUN = Path("run.mptune")


def made_with(*metrics: str) -> Any:
    """As much of a run.json as names its metrics."""
    return SimpleNamespace(search=SimpleNamespace(metric=metrics[0], reported_metrics=metrics[1:]))


@pytest.fixture(autouse=True)
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
    Path("mine.py").rename("sub/mine.py")
    assert recorded_metric(made_with("mine.py:worst"), "sub/mine.py:worst", RUN, "worker") == (
        "sub/mine.py:worst",
        None,
    )
    with pytest.raises(SettingsError, match="and that of the run"):
        recorded_metric(made_with("mine.py:least"), "sub/mine.py:worst", RUN, "worker")


@pytest.mark.parametrize(
    "metric", ["run.mptune/evil.py:f", "run.mptune/../run.mptune/evil.py/:f", "link.py:f", "run.mptune/out.py:f"]
)
def test_a_script_in_the_run_directory_is_never_run(metric: str) -> None:
    (RUN / "evil.py").write_text("")
    Path("link.py").symlink_to("run.mptune/evil.py")
    (RUN / "out.py").symlink_to("../mine.py")
    with pytest.raises(RunError, match="lies in the run directory"):
        refuse_inside(metric, RUN)
    for given in (None, metric):
        with pytest.raises(RunError, match="lies in the run directory"):
            recorded_metric(made_with(metric), given, RUN, "confirm")
