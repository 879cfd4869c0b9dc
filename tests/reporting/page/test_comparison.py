"""The page of a comparison: well formed, self-contained, escaped, and all that the JSON beside it says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.diagnosis.comparison import Comparison
from mptune.diagnosis.limits import Limit
from mptune.errors import RunError
from mptune.finding import Finding, OutputColumns, Where
from mptune.reporting.page.comparison import render_comparison, write_comparison
from tests.reporting.page.test_html import Balance

NASTY = '</style><script>alert("1")</script><!--\x1b[31m&$title'


def comparison(text: str) -> Comparison:
    finding = Finding(
        code="stale-rows",
        severity="warning",
        origin="compare",
        where=Where(
            nodes=(text,), groups=(text,), tensors=(text,), outputs=(OutputColumns(text, (0, 2)),), samples=(1,)
        ),
        evidence={text: text, "share": 0.25},
        text=text,
        cure=text,
    )
    figures = {"judged": 0.25, "limit": 1e-3, "judged_fp16": 5e-4, "largest_difference": float("inf"), text: 3.0}
    limits = {text: Limit(1e-3, columns=(0, 2))}
    return Comparison("differs", (finding,), {text: figures}, f"a/{text}", f"b/{text}", 4, (text,), limits)


def test_what_comes_from_outside_is_escaped_and_nothing_is_fetched_or_run() -> None:
    page = render_comparison(comparison(NASTY))
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not set(balance.seen) & {"script", "img", "iframe", "object", "a", "form"}
    assert page.count("</style>") == 1
    assert "<!--" not in page
    assert "\x1b" not in page
    assert unescape(page).count("alert(") > 10
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"
    assert len(page) < 40_000


def test_commands_stand_in_code() -> None:
    page = render_comparison(comparison("run `mptune inspect M<1>` first"))
    prose = re.findall(r"<(?:p|li)[^>]*>(?:<span>Do: </span>)?run <code>mptune inspect M&lt;1&gt;</code> first", page)
    assert len(prose) == 3, "text, cure and warning"


def test_many_names_are_counted() -> None:
    where = Where(nodes=tuple(f"n{k}" for k in range(30)))
    finding = Finding(
        code="precision", severity="warning", origin="compare", where=where, evidence={}, text="text", cure=""
    )
    page = render_comparison(Comparison("differs", (finding,), {}, "a", "b", 1))
    assert "<code>n11</code> and 18 more" in page
    assert "n12" not in page


def test_the_command_writes_both_files(mlp_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=rows)
    np.savez(tmp_path / "outputs.npz", y=np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32))
    words = ["compare", str(mlp_path), "--data", str(tmp_path / "data.npz")]
    words += ["--outputs", str(tmp_path / "outputs.npz"), "--out", str(tmp_path / "a" / "b"), "--json"]
    assert main(words) == 3
    folder = tmp_path / "a" / "b"
    printed = capsys.readouterr().out
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(printed)
    document = json.loads(printed)
    page = unescape((folder / "comparison.html").read_text())
    assert document["verdict"] in page
    assert all(finding["text"] in page for finding in document["findings"])
    assert f"{document['outputs']['y']['error']:.4g}" in page
    assert sorted(p.name for p in folder.iterdir()) == ["comparison.html", "comparison.json"]


def test_every_output_has_a_finding_or_a_warning(mlp_path: Path, tmp_path: Path) -> None:
    """So the page's sentence for a comparison without findings, which points to the warnings, is always true."""
    rows = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    same = mptune.compare(mlp_path, mlp_path, data={"x": rows})
    assert same.agrees
    assert [finding.code for finding in same.findings] == ["agrees"]
    assert "No code fits it" not in render_comparison(same)
    noise = tmp_path / "noise.npz"
    np.savez(noise, y=np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32))
    other = mptune.compare(mlp_path, data={"x": rows}, reference_outputs=noise)
    assert not other.agrees
    assert not other.findings
    assert any(text.startswith("output 'y'") for text in other.warnings)
    assert "No code fits it" in render_comparison(other)


def test_a_place_that_cannot_be_written_is_one_error(mlp_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError):
        write_comparison(comparison("x"), tmp_path / "file")
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 32), np.float32))
    with pytest.raises(RunError):
        mptune.compare(mlp_path, data=tmp_path / "data.npz", repeat=2, out=tmp_path / "file")
