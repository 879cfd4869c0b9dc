"""The JSON Schemas in docs/reference are true of the files that searches write, and have all of their keys."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from mptune.cli import main
from tests.docs.pages import ROOT
from tests.docs.test_commands import searched

__all__ = ["searched"]


def closed(schema: Any) -> Any:
    """The schema that allows no other keys: a new one stands in the schema, too."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    allowed = {"additionalProperties": False} if isinstance(schema.get("required"), list) else {}
    return {**{key: closed(value) for key, value in schema.items()}, **allowed}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / "docs" / "reference" / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(closed(schema))


def test_the_files_of_a_run_follow_them(searched: Path) -> None:
    run = searched / "model.mptune"
    front, plan = (json.loads((run / name).read_text()) for name in ("front.json", "chosen/plan.json"))
    validator("front").validate(front)
    validator("plan").validate(plan)
    assert front["baseline"]["tf32"] is not None
    assert front["findings"]


@pytest.mark.parametrize("name", ["chosen", "points", "baseline"])
def test_a_key_that_is_missing_or_new_is_refused(searched: Path, name: str) -> None:
    front = json.loads((searched / "model.mptune/front.json").read_text())
    lacking, other = copy.deepcopy(front), copy.deepcopy(front)
    del lacking[name]
    other["points"][0]["error"][name] = 1.0
    assert not validator("front").is_valid(lacking)
    assert not validator("front").is_valid(other)


@pytest.mark.parametrize(
    ("options", "samples", "code"),
    [
        (["--metric", "max_abs", "--metric", "relative_l2", "--max-latency-ms", "1e-3"], 1.0, 3),
        (["--metric", "max_abs", "--max-memory", "1GB", "--io", "fp16", "--opset", "20"], 1.0, 0),
        ([], 1e30, 4),  # stopped by a finding: there is no front
    ],
)
def test_other_results_follow_them(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], samples: float, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    image = np.load(searched / "samples.npz")["image"]
    np.savez("samples.npz", image=np.float32(samples) * image)
    command = ["search", str(searched / "model.onnx"), "--data", "samples.npz", "--budget", "3", *options]
    assert main(command) == code
    front = json.loads(Path("model.mptune/front.json").read_text())
    validator("front").validate(front)
    assert (front["choice"] is None) is (code == 4)
    if "--io" in options:
        plan = json.loads(Path("model.mptune/chosen/plan.json").read_text())
        validator("plan").validate(plan)
        assert (plan["io"], plan["opset"]) == ("fp16", 20)
