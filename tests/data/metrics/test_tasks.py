"""Task metrics: built in, and loaded from a user's script."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from mptune.data.metrics.comparing import compare_outputs
from mptune.data.metrics.tasks import load_metric, resolve_metric, sample_functions
from mptune.errors import DataError, SettingsError

top1_disagreement = sample_functions(resolve_metric("top1_disagreement"))["top1_disagreement"]
endpoint_error = sample_functions(resolve_metric("endpoint_error"))["endpoint_error"]


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str, name: str = "metrics.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


class TestResolve:
    def test_a_script_is_called_by_what_the_user_wrote(self, script) -> None:
        spec = script("def worst(outputs, reference):\n    return abs(outputs['y'] - reference['y']).max()") + ":worst"
        extra = sample_functions(resolve_metric(spec))
        error = compare_outputs([{"y": np.array([1.0, 5.0])}], [{"y": np.array([1.0, 2.0])}], extra)
        assert error.value(spec) == 3.0

    def test_higher_is_better_cannot_be_the_objective(self) -> None:
        with pytest.raises(SettingsError, match="sqnr_db cannot be the objective") as caught:
            resolve_metric("sqnr_db")
        assert "relative_l2" in caught.value.hint


class TestScript:
    def refused(self, spec: str, match: str, hint: str) -> None:
        before = list(sys.path)
        with pytest.raises(DataError, match=match) as caught:
            load_metric(spec)
        assert hint in caught.value.hint
        assert "\n" not in caught.value.message
        assert sys.path == before

    def test_it_can_import_its_neighbours_and_hold_dataclasses(self, script) -> None:
        script("FACTOR = 2.0", "mptune_test_neighbour.py")
        spec = script(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "from mptune_test_neighbour import FACTOR\n"
            "@dataclass\nclass Scale:\n    by: float\n"
            "def metric(outputs, reference):\n    return Scale(FACTOR).by\n"
        )
        assert load_metric(f"{spec}:metric")({}, {}) == 2.0

    @pytest.mark.parametrize(
        ("name", "text", "spec", "match", "hint"),
        [
            ("other.py", "", "none.py:f", "no such file", "Python file"),
            ("metrics.py", "def f(o, r): ...", "metrics.py", "names no function", "script.py:function"),
            ("metrics.py", "def endpoint(o, r): ...", "metrics.py:endpont", "has no function 'endpont'", "'endpoint'"),
            ("metrics.py", "x = 1", "metrics.py:f", "has no function 'f'", "def metric(outputs, reference)"),
            ("metrics.py", "f = 3", "metrics.py:f", "has no function 'f'", "def metric"),
            ("metric.txt", "x", "metric.txt:f", "names no function", ".py"),
        ],
    )
    def test_what_names_no_metric(self, script, tmp_path: Path, name, text, spec, match, hint) -> None:
        script(text, name)
        self.refused(str(tmp_path / spec), match, hint)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("def f(:", "SyntaxError"),
            ("import no_such_module_here", "ModuleNotFoundError"),
            ("raise SystemExit(3)", "SystemExit: 3"),
        ],
    )
    def test_a_script_that_fails_to_load(self, script, text: str, match: str) -> None:
        self.refused(script(text) + ":f", f"failed to load: {match}", "python metrics.py")


@pytest.mark.parametrize(
    ("metric", "shape", "kind"),
    [(top1_disagreement, (3,), r"shape \(rows, classes\)"), (endpoint_error, (1, 3, 4, 4), r"shape \(N, 2, H, W\)")],
)
def test_no_output_of_the_metrics_kind(metric, shape: tuple[int, ...], kind: str) -> None:
    with pytest.raises(DataError, match=f"no output of {kind}") as caught:
        metric({}, {"y": np.ones(shape, np.float32)})
    assert caught.value.hint


def test_top1_disagreement_is_that_of_the_worst_output_of_its_kind() -> None:
    a = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]], np.float32)
    reference = {"a": a, "b": a, "features": np.ones((1, 2, 3), np.float32), "label": np.array([[1, 2]])}
    assert top1_disagreement({**reference, "b": np.concatenate([a[:1, ::-1], a[1:]])}, reference) == 0.25
    assert top1_disagreement({**reference, "b": a[:, ::-1]}, reference) == 1.0


def test_endpoint_error_leaves_out_invalid_pixels_of_the_reference_only() -> None:
    reference = np.zeros((1, 2, 1, 2), np.float32)
    reference[0, 1, 0, 0] = np.nan
    output = np.zeros_like(reference)
    output[0, 0, 0, 1] = 2
    assert endpoint_error({"flow": output}, {"flow": reference}) == 2.0
    assert math.isnan(endpoint_error({"flow": np.full_like(reference, np.nan)}, {"flow": reference}))
    with pytest.raises(DataError, match=r"'flow' has shape .*, its target") as caught:
        endpoint_error({"flow": np.ones((1, 2, 3, 3))}, {"flow": np.ones((1, 2, 4, 4), np.float32)})
    assert caught.value.hint
