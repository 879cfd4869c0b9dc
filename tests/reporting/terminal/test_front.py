"""The table of a front on stdout, in a pipe and in narrow terminals."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.reporting.terminal.front import print_front
from mptune.tuning.fronts.neighbours import neighbours
from tests.reporting.conftest import predicted

MakeFront = Callable[..., tuple]


def printed(front: object, monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    print_front(front, stream)  # type: ignore[arg-type]
    return stream.getvalue()


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_table_fits_and_is_complete(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    front, _ = make_front()
    text = printed(front, monkeypatch, columns)
    table = text.split("\n\n")[1].splitlines()
    assert all(len(line) <= columns for line in table)
    assert "\x1b" not in text
    for point in front.points:
        assert point.plan.fingerprint in text
    for needed in ("0.900", "1.67x", "2.0e-03", "4.0e-04", "2/6", "all-FP32", "all-FP16"):
        assert needed in text
    assert [line[0] for line in table[1:] if front.chosen.plan.fingerprint in line] == [">"]
    assert ("+-0.5%" in text) == (columns >= 100)


def test_header_choice_and_warnings(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    front, _ = make_front()
    text = printed(front, monkeypatch)
    assert f"model    {front.model_path}" in text
    assert "latency  measured on NVIDIA H200" in text
    assert "searched 7 plans, 2 of them failed; 4 on the front" in text
    assert "chosen   " + front.chosen.plan.fingerprint in text
    assert "warning: the calibration data are random" in text
    assert "limits not met" not in text


def test_what_the_points_beside_the_chosen_one_would_give(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = make_front()
    text = printed(front, monkeypatch)
    beside = neighbours(front.points, front.chosen)
    assert beside
    for other in beside:
        (line,) = [line for line in text.splitlines() if line.startswith(("faster", "slower"))
                   and other.evaluation.plan.fingerprint in line]  # fmt: skip
        assert line.startswith("faster" if other.latency_ms_delta < 0 else "slower")
        assert other.error is not None
        assert f"error x{other.error.value:.2f} (95 %: " in line


def test_a_predicted_target_is_named_as_such(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(predicted(make_front()[0]), monkeypatch)
    assert "PREDICTED for jetson-orin-nano-8gb" in text
    assert "pred. ms" in text
    assert "emulated" in text


def test_mixed_error_sources_are_marked(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    front, _ = make_front()
    points = (replace(front.points[0], error_source="emulated"), *front.points[1:])
    text = printed(replace(front, points=points), monkeypatch)
    assert "~2.4e-02" in text
    assert "~3.0e-04" not in text


def test_limits_not_met_stand_at_the_end(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    front, _ = make_front(limits_met=False, chosen_reason="no plan has error <= 1e-9; this is the nearest")
    assert printed(front, monkeypatch).splitlines()[-1] == (
        "limits not met: no plan has error <= 1e-9; this is the nearest"
    )


def test_nothing_feasible(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    front, _ = make_front(chosen=None, points=(), chosen_reason="no plan is feasible")
    assert "chosen   none: no plan is feasible" in printed(front, monkeypatch)


def test_says_what_was_written_and_what_comes_next(
    make_front: MakeFront, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = make_front()
    monkeypatch.chdir(run_dir.parent)
    assert "infer.py" not in printed(front, monkeypatch)
    (run_dir / "chosen").mkdir()
    for name in ("chosen/model.onnx", "chosen/infer.py", "report.html"):
        (run_dir / name).touch()
    assert "engine   model.mptune" not in printed(front, monkeypatch)
    (run_dir / "chosen" / "model.engine").touch()
    text = printed(front, monkeypatch)
    assert "engine   model.mptune/chosen/model.engine" in text
    assert "try it   python model.mptune/chosen/infer.py" in text
    assert "page     model.mptune/report.html" in text
    assert "mptune pick model.mptune with --max-error X" in text


def test_names_are_never_markup(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    front, _ = make_front(warnings=("[red]odd[/red] name",), target="[bold]", model_path=Path("[i]m.onnx"))
    text = printed(front, monkeypatch)
    for needed in ("[red]odd[/red] name", "target   [bold]", "[i]m.onnx"):
        assert needed in text
