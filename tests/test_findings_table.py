"""A finding: its record, its row in the one table of words, and its way to front.json and to what a person reads."""

from __future__ import annotations

import ast
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.finding import CODES, Finding, OutputColumns, Where
from mptune.findings.wording import SEVERITIES, counted, listed
from mptune.graph.groups import find_groups
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.reporting.terminal.front import print_front
from mptune.reporting.text import front_warnings
from mptune.settings import DataSettings
from mptune.tuning.front import Front
from tests.fakes import FAST, Diary, FakeToolchain, Law
from tests.graph import models
from tests.graph.models import constant

pytestmark = pytest.mark.usefixtures("opened_here")

PACKAGE = Path(__file__).resolve().parent.parent / "mptune"
TABLE = PACKAGE / "findings"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if TABLE not in path.parents and path.name != "finding.py")

SENTENCE = 45
"""Characters from which a part of a wording between two names is a sentence of its own."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _place(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def _strings(path: Path) -> Iterator[ast.Constant]:
    """All texts of a file, and parts of its f-strings, but for docstrings."""
    nodes = list(ast.walk(_tree(path)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node


def test_no_finding_is_built_without_the_table() -> None:
    faults = []
    for path in OTHERS:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "Finding" or name.endswith(".Finding"):
                faults.append(f"{_place(path, node)} builds a finding: use Finding.from_code")
            if name in ("replace", "dataclasses.replace") and {word.arg for word in node.keywords} & {"text", "cure"}:
                faults.append(f"{_place(path, node)} changes the words of a finding")
    assert faults == []


def test_no_wording_of_the_table_is_anywhere_else() -> None:
    texts = (node.value for path in TABLE.glob("*.py") for node in _strings(path))
    sentences = {part for text in texts for part in re.split(r"\{\w+\}", text) if len(part) >= SENTENCE}
    assert len(sentences) > 100
    faults = []
    for path in OTHERS:
        for node in _strings(path):
            faults += [f"{_place(path, node)}: {part!r}" for part in sentences if part in node.value]
    assert faults == []


def test_lists_and_counts_in_words() -> None:
    assert listed("abcd", 2, " and {others} more") == "a, b and 2 more"
    assert (counted(1, "row"), counted(3, "row")) == ("1 row", "3 rows")


def test_a_text_that_lacks_a_value_gives_way_to_the_meaning() -> None:
    for code in CODES:
        finding = Finding.from_code(code, "search", Where(), {}, kind="no such kind")
        assert finding.text
        assert finding.severity in SEVERITIES
    assert Finding.from_code("target-not-here", "search", Where(), {}).text == CODES["target-not-here"].meaning


def make_finding(**changes: object) -> Finding:
    row = {"code": "overflow", "severity": "warning", "origin": "search", "text": "it is so", "cure": "do this"}
    return Finding(**{**row, "where": Where(), "evidence": {}, **changes})  # type: ignore[arg-type]


def test_every_part_of_a_finding_survives_json_as_plain_values() -> None:
    evidence = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": np.float32(0.5), "e": 3, "f": "TF32"}
    outputs = OutputColumns("boxes", (0, 3)), OutputColumns("scores")
    where = Where(("a", "b"), ("g001",), ("t",), outputs, ("x",), (0, 7))
    finding = make_finding(where=where, evidence=evidence)
    evidence["e"] = 4
    document = finding.to_json()
    assert document["evidence"] == {"a": "inf", "b": "-inf", "c": "nan", "d": 0.5, "e": 3, "f": "TF32"}
    assert document["where"]["outputs"] == [{"name": "boxes", "columns": [0, 3]}, {"name": "scores", "columns": None}]
    again = Finding.from_json(json.loads(json.dumps(document, allow_nan=False)))
    assert len({again, finding}) == 1
    assert (finding.message, make_finding(cure="").message) == ("it is so; do this", "it is so")


@pytest.mark.parametrize(
    ("field", "value"), [("code", "overfow"), ("code", ""), ("severity", "fatal"), ("origin", "report")]
)
def test_what_does_not_exist_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"no {field} '{value}'"):
        make_finding(**{field: value})
    with pytest.raises(ValueError, match=f"no {field} '{value}'"):
        Finding.from_json({**make_finding().to_json(), field: value})


KEYS = ["code", "severity", "origin", "where", "evidence", "text", "cure"]
PLACES = ["nodes", "groups", "tensors", "outputs", "inputs", "samples"]


@pytest.fixture
def powers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two products around x ** 4, which leaves FP16 with data.npz: eight different samples of up to 20."""
    graph = """(float[n,8] x) => (float[n,8] y) <float exponent = {4}> {
        ["/first/MatMul"] a = MatMul(x, w) ["/pow/Pow"] p = Pow(a, exponent) ["/last/MatMul"] y = MatMul(p, small) }"""
    rng = np.random.default_rng(3)
    np.savez(tmp_path / "data.npz", x=rng.uniform(10, 20, (8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return models.save(models.text(graph, constant("w", np.eye(8)), models.weight("small", 8, 8, scale=1e-3)), tmp_path)


def search_for_findings(model: Path, diary: Diary | None = None, **settings: object) -> Front:
    """A search on what was observed, with a fake toolchain for what comes after it."""
    ranges = {name: TensorRange(1.6e5 if name == "p" else 20.0, (1, 8)) for name in "xayp"}
    toolchain = FakeToolchain(Law([g.id for g in find_groups(load_model(model))]), ranges=ranges)
    wanted = {"data": "data.npz", "budget": 6, "target": "cpu", "latency": FAST, **settings}
    return mptune.search(model, open_toolchain=toolchain.open, listener=diary, **wanted)  # type: ignore[arg-type]


def check_schema(documents: object) -> Sequence[dict[str, object]]:
    """Exactly the keys of a finding, each of its type; returns the findings."""
    assert isinstance(documents, list)
    for document in documents:
        assert list(document) == KEYS
        assert list(document["where"]) == PLACES
        assert all(type(number) in (int, float, str) for number in document["evidence"].values())
        assert document["text"]
        assert "\n" not in document["text"] + document["cure"]
        assert Finding.from_json(document).to_json() == document
    return documents


def test_inspect_and_a_search_of_an_overflowing_pow(powers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(powers), "--json", "--data", "data.npz"]) == 0
    (finding,) = check_schema(json.loads(capsys.readouterr().out)["findings"])
    assert (finding["code"], finding["severity"], finding["origin"]) == ("overflow", "warning", "inspect")
    (again,) = mptune.inspect(powers, data="data.npz").findings
    assert again.to_json() == finding
    assert (again.where.nodes[0], again.where.tensors) == ("/pow/Pow", ("p",))
    assert again.evidence["absmax"] > again.evidence["fp16_max"] == 65504

    front = search_for_findings(powers)
    (finding,) = check_schema(json.loads(Path("model.mptune/front.json").read_text())["findings"])
    assert (finding["code"], finding["severity"], finding["origin"]) == ("overflow", "info", "search")
    assert finding == front.findings[0].to_json()
    assert front.chosen is not None
    assert set(front.findings[0].where.groups) <= set(front.chosen.plan.fp32_groups), "hence info: it is kept in FP32"
    assert mptune.report("model.mptune") == front
    assert front_warnings(front) == front.warnings, "what the plan keeps in FP32 is no warning"


def test_findings_survive_a_resume_and_are_not_listed_twice(powers: Path) -> None:
    diary = Diary()
    first = search_for_findings(powers, diary, data=None, data_settings=DataSettings(random_samples=1))
    assert [f.code for f in first.findings] == ["random-data", "too-few-samples", "overflow"]
    shown = [f.message for f in first.findings[:2]]
    assert [text for text in diary.warnings if text in shown] == shown
    again = search_for_findings(powers, data=None, data_settings=DataSettings(random_samples=1), budget=7)
    assert again.findings == first.findings
    document = json.loads(Path("model.mptune/front.json").read_text())
    assert not set(shown) & set(document["warnings"])
    run = json.loads(Path("model.mptune/run.json").read_text())
    assert not set(shown) & set(run["warnings"])
    assert [f["code"] for f in check_schema(run["findings"])] == ["random-data", "too-few-samples", "overflow"]
    stream = io.StringIO()
    print_front(again, stream)
    terminal = " ".join(stream.getvalue().split())
    page = Path("model.mptune/report.html").read_text()
    readme = Path("model.mptune/chosen/README.txt").read_text()
    for text in shown:
        assert all(where.count(text) == 1 for where in (terminal, readme))
    assert sorted(re.findall('<code class="code [a-z]+">([a-z0-9-]+)<', page)) == sorted(f.code for f in first.findings)


def test_a_target_that_is_not_here(powers: Path) -> None:
    front = mptune.search(powers, data="data.npz", budget=3, target="h200", latency=FAST)  # type: ignore[arg-type]
    (finding,) = [f for f in front.findings if f.code == "target-not-here"]
    assert finding.severity == "info"
    assert not any("latency is predicted" in text for text in front.warnings)
    assert any("latency is predicted" in text for text in front_warnings(front)), "still shown"
    resumed = mptune.search("model.onnx", data="data.npz", budget=3, target="h200", latency=FAST)  # type: ignore[arg-type]
    assert resumed.findings == front.findings
