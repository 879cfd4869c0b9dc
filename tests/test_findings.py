"""Findings on their whole way: front.json, `inspect --json`, run.json, and what a person reads."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.errors import RunError
from mptune.finding import CODES, Finding
from mptune.graph.groups import find_groups
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.reporting.terminal.front import print_front
from mptune.reporting.text import front_warnings
from mptune.settings import DataSettings
from mptune.tuning.front import Front
from tests.fakes import FAST, Diary, FakeToolchain, Law
from tests.graph import models
from tests.graph.models import node, value

pytestmark = pytest.mark.usefixtures("opened_here")

KEYS = ["code", "severity", "origin", "where", "evidence", "text", "cure"]
PLACES = ["nodes", "groups", "tensors", "outputs", "inputs", "samples"]
LISTS_OF_TEXT = ("nodes", "groups", "tensors", "inputs")


def powers(folder: Path, exponent: float) -> Path:
    """Two products around x ** exponent: to the fourth the values leave FP16, squared they do not."""
    nodes = [
        node("MatMul", ["x", "w"], "a", "/first/MatMul"),
        node("Pow", ["a", "exponent"], "p", "/pow/Pow"),
        node("MatMul", ["p", "small"], "y", "/last/MatMul"),
    ]
    rng = np.random.default_rng(3)
    constants = [
        models.constant("w", np.eye(8) + 0.1 * rng.standard_normal((8, 8))),
        models.constant("small", 1e-3 * rng.standard_normal((8, 8))),
        models.constant("exponent", exponent),
    ]
    proto: onnx.ModelProto = models.model(nodes, [value("x", ["n", 8])], [value("y", ["n", 8])], constants)
    return models.save(proto, folder)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data.npz: eight different samples of up to 20."""
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(5).uniform(10, 20, (8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def search(model: Path, diary: Diary | None = None, **settings: object) -> Front:
    """A search on the CPU's real observations, with a fake toolchain for what comes after them."""
    pow_max = 1.6e5 if "overflow" in str(settings.pop("name", "")) else 400.0
    ranges = {name: TensorRange(20.0, (1, 8)) for name in ("x", "a", "y")} | {"p": TensorRange(pow_max, (1, 8))}
    toolchain = FakeToolchain(Law([g.id for g in find_groups(load_model(model))]), ranges=ranges)
    wanted = {"data": "data.npz", "budget": 6, "target": "cpu", "latency": FAST, **settings}
    return mptune.search(model, open_toolchain=toolchain.open, listener=diary, **wanted)  # type: ignore[arg-type]


def check_schema(documents: object) -> Sequence[dict[str, object]]:
    """Exactly the keys of a finding, each of its type; returns the findings."""
    assert isinstance(documents, list)
    for document in documents:
        assert list(document) == KEYS
        assert document["code"] in CODES
        assert document["severity"] in ("error", "warning", "info")
        assert document["origin"] in ("inspect", "search", "confirm", "compare", "apply")
        assert list(document["where"]) == PLACES
        assert all(isinstance(name, str) for place in LISTS_OF_TEXT for name in document["where"][place])
        assert all(list(output) == ["name", "columns"] for output in document["where"]["outputs"])
        assert all(type(index) is int for index in document["where"]["samples"])
        assert all(type(number) in (int, float, str) for number in document["evidence"].values())
        assert document["text"]
        assert "\n" not in document["text"] + document["cure"]
        assert Finding.from_json(document).to_json() == document
    return documents


def inspected(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Sequence[dict[str, object]]:
    assert main(["inspect", str(model), "--json", *options]) == 0
    return check_schema(json.loads(capsys.readouterr().out)["findings"])


def test_inspect_of_an_overflowing_pow(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = powers(place, 4.0)
    assert inspected(model, capsys) == [], "the graph alone does not show it"
    (finding,) = inspected(model, capsys, "--data", "data.npz")
    assert (finding["code"], finding["severity"], finding["origin"]) == ("overflow", "warning", "inspect")
    where, evidence = finding["where"], finding["evidence"]
    assert isinstance(where, dict)
    assert isinstance(evidence, dict)
    assert where["nodes"][0] == "/pow/Pow"
    assert where["tensors"] == ["p"]
    assert evidence["absmax"] > evidence["fp16_max"] == 65504
    assert [f.to_json() for f in mptune.inspect(model, data="data.npz").findings] == [finding]


def test_a_search_over_an_overflowing_pow(place: Path) -> None:
    front = search(powers(place, 4.0), name="overflow")
    (finding,) = check_schema(json.loads((place / "model.mptune/front.json").read_text())["findings"])
    assert (finding["code"], finding["severity"], finding["origin"]) == ("overflow", "info", "search")
    assert finding == front.findings[0].to_json()
    assert front.chosen is not None
    assert set(front.findings[0].where.groups) <= set(front.chosen.plan.fp32_groups), "hence info: it is kept in FP32"
    assert mptune.report("model.mptune") == front
    assert front_warnings(front) == front.warnings, "what the plan keeps in FP32 is no warning"


def test_findings_survive_a_resume_and_are_not_listed_twice(place: Path) -> None:
    model = powers(place, 4.0)
    diary = Diary()
    first = search(model, diary, name="overflow", data=None, data_settings=DataSettings(random_samples=1))
    assert [f.code for f in first.findings] == ["random-data", "too-few-samples", "overflow"]
    shown = [f.message for f in first.findings[:2]]
    assert [text for text in diary.warnings if text in shown] == shown
    again = search(model, name="overflow", data=None, data_settings=DataSettings(random_samples=1), budget=7)
    assert again.findings == first.findings
    document = json.loads((place / "model.mptune/front.json").read_text())
    assert not set(shown) & set(document["warnings"])
    run = json.loads((place / "model.mptune/run.json").read_text())
    assert not set(shown) & set(run["warnings"])
    assert [f["code"] for f in check_schema(run["findings"])] == ["random-data", "too-few-samples", "overflow"]
    stream = io.StringIO()
    print_front(again, stream)
    terminal = " ".join(stream.getvalue().split())
    page = (place / "model.mptune/report.html").read_text()
    readme = (place / "model.mptune/chosen/README.txt").read_text()
    for text in shown:
        assert all(where.count(text) == 1 for where in (terminal, readme))
    assert sorted(re.findall('<code class="code [a-z]+">([a-z0-9-]+)<', page)) == sorted(f.code for f in first.findings)


def test_a_target_that_is_not_here(place: Path) -> None:
    front = mptune.search(powers(place, 2.0), data="data.npz", budget=3, target="h200", latency=FAST)  # type: ignore[arg-type]
    (finding,) = check_schema(json.loads((place / "model.mptune/front.json").read_text())["findings"])
    assert (finding["code"], finding["severity"]) == ("target-not-here", "info")
    assert not any("latency is predicted" in text for text in front.warnings)
    assert any("latency is predicted" in text for text in front_warnings(front)), "still shown"
    resumed = mptune.search("model.onnx", data="data.npz", budget=3, target="h200", latency=FAST)  # type: ignore[arg-type]
    assert resumed.findings == front.findings


def test_a_finding_with_a_code_that_does_not_exist_is_refused(place: Path) -> None:
    search(powers(place, 4.0), name="overflow")
    path = place / "model.mptune/run.json"
    run = json.loads(path.read_text())
    run["findings"].append({**run["findings"][0], "code": "of-the-future"})
    path.write_text(json.dumps(run))
    with pytest.raises(RunError, match="of-the-future"):
        mptune.report("model.mptune")
