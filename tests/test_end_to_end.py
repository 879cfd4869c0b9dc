"""The README's command on the model that comes with mptune, as a person types it; and with engines that misbehave."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mptune.settings import SearchSettings
from tests.conftest import DIGITS_DATA
from tests.reporting.infer_support import run_alone


def test_the_front_shows_the_trade_off(digits_run: Path) -> None:
    front = json.loads((digits_run / "digits_vit.mptune" / "front.json").read_text())
    points = front["points"]
    assert len(points) >= 4
    latencies, errors = [p["latency"]["median_ms"] for p in points], [p["error"]["value"] for p in points]
    assert (latencies, errors) == (sorted(latencies), sorted(errors, reverse=True))
    assert errors[-1] == 0
    assert {p["latency"]["source"] for p in points} == {"predicted"}
    assert {p["error"]["source"] for p in points} == {"emulated"}
    held_out = [p["error"]["held_out"] is not None for p in points]
    assert (held_out[0], held_out[-1]) == (True, True)
    # Both baselines count among the points that are taken again, and need not be on the front.
    assert min(len(points), SearchSettings().confirm_points) - 2 <= sum(held_out) <= SearchSettings().confirm_points
    assert (front["evaluations"], front["failures"]) == (16, 0)


def test_the_chosen_model_is_the_plan_and_runs_without_mptune(digits_run: Path) -> None:
    chosen = digits_run / "digits_vit.mptune" / "chosen"
    onnx.checker.check_model(str(chosen / "model.onnx"), full_check=True)
    command = [sys.executable, "-I", "infer.py", "--data", "in.npz", "--save", "out.npz", "--iterations", "3"]
    images = np.load(DIGITS_DATA)["image"]
    np.savez(chosen / "in.npz", image=images)
    done = subprocess.run([*command, "--provider", "cpu"], cwd=chosen, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    logits = np.load(chosen / "out.npz")["logits"]
    assert logits.shape == (len(images), 10)
    assert logits.dtype == np.float32
    plan = json.loads((chosen / "plan.json").read_text())
    point = chosen_point(json.loads((chosen.parent / "front.json").read_text()))
    assert sum(p == "fp16" for p in plan["precision"].values()) == point["fp16_groups"]


def chosen_point(front: dict[str, Any]) -> dict[str, Any]:
    return next(point for point in front["points"] if point["plan"] == front["chosen"])


def test_infer_finds_the_reported_error_with_numpy_and_onnxruntime_alone(digits_run: Path, tmp_path: Path) -> None:
    chosen = digits_run / "digits_vit.mptune" / "chosen"
    point = chosen_point(json.loads((chosen.parent / "front.json").read_text()))
    assert point["error"]["source"] == "emulated"
    assert point["error"]["held_out"] > 0
    packages = tmp_path / "packages"
    packages.mkdir()
    done = run_alone(chosen / "infer.py", "--check", packages=packages)
    assert done.returncode == 0, done.stdout + done.stderr
    words = next(line for line in done.stdout.splitlines() if line.startswith("worst_part")).replace(",", "").split()
    figure, reported, on_all = float(words[1]), float(words[3]), float(words[7].strip("("))
    assert figure == pytest.approx(reported, rel=1e-4)
    assert on_all == pytest.approx(point["error"]["held_out"], rel=1e-5)
    assert "AGREES" in done.stdout
    assert (chosen / "check.npz").stat().st_size < 100_000

    # The model of another plan beside it, and one that is broken.
    other = tmp_path / "other"
    shutil.copytree(chosen, other)
    mixed = onnx.load(other / "model.onnx")
    next(e for e in mixed.metadata_props if e.key == "mptune.plan").value = "123"
    onnx.save(mixed, other / "model.onnx")
    refused = run_alone(other / "infer.py", "--check", packages=packages)
    assert refused.returncode == 1
    assert "error: model.onnx is of plan 123" in refused.stderr
    weight = max(mixed.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(mixed, other / "broken.onnx")
    broken = run_alone(other / "infer.py", "--check", "--model", str(other / "broken.onnx"), packages=packages)
    assert broken.returncode == 1
    assert "DIFFERS" in broken.stdout


def test_the_outputs_of_the_front_are_sketched_as_the_front_says(digits_run: Path) -> None:
    run = digits_run / "digits_vit.mptune"
    front = json.loads((run / "front.json").read_text())
    outputs = json.loads((run / "outputs.json").read_text())
    baselines = [front["baseline"][name] for name in ("fp32", "fp16")]  # TF32's point has the plan of all-FP32
    points = {point["plan"]: point for point in (*front["points"], *filter(None, baselines))}
    held_out = {plan: point["error"]["held_out"] for plan, point in points.items()}
    assert set(outputs["plans"]) == {plan for plan, error in held_out.items() if error is not None}
    assert next(iter(outputs["plans"])) == front["chosen"]
    for plan, figure in outputs["plans"].items():
        assert figure["source"] == points[plan]["error"]["source"]
        (part,) = figure["outputs"]["logits"]["parts"]
        assert part["error"] == pytest.approx(held_out[plan], rel=1e-6)
        # The held-out error is of the same outputs: none of its statistics may contradict the sketch.
        worst = part["worst_samples"][0]
        assert worst[1] >= part["error"]
        assert 0 <= worst[0] < outputs["count"]
        for name in ("reference", "plan", "difference"):
            outside = sum(part[name][key] for key in ("below", "above", "non_finite"))
            assert sum(part[name]["counts"]) + outside == 10 * outputs["count"]
    images = np.load(DIGITS_DATA)["image"]
    assert len(outputs["indices"]) == outputs["count"] < len(images)
