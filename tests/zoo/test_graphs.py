"""What the graph alone shows is named by ``mptune inspect MODEL``; a sound twin is silent."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import mptune
from mptune.finding import CODES, Finding
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS

EVERY = {**GRAPHS, **FURTHER_GRAPHS}


def inspected(proto: onnx.ModelProto, folder: Path) -> tuple[Finding, ...]:
    onnx.save(proto, folder / "model.onnx")
    return mptune.inspect(folder / "model.onnx").findings


@pytest.mark.parametrize("name", EVERY)
def test_what_the_graph_shows_is_named(name: str, tmp_path: Path) -> None:
    make, _, nodes = EVERY[name]
    code = name.split()[0].rstrip(":")
    (finding,) = [f for f in inspected(make(), tmp_path) if f.code == code]
    assert finding.where.nodes == nodes
    assert finding.evidence
    assert finding.cure
    assert finding.severity == CODES[code].severity


@pytest.mark.parametrize("name", EVERY)
def test_a_sound_twin_is_silent(name: str, tmp_path: Path) -> None:
    assert inspected(EVERY[name][1](), tmp_path) == ()


def test_what_is_fed_back_says_which_line_to_use(tmp_path: Path) -> None:
    (finding,) = [f for f in inspected(GRAPHS["state-fed-back"][0](), tmp_path) if f.code == "state-fed-back"]
    pairs = [text.split("`")[0] for text in finding.cure.split("--feedback ")[1:]]
    assert pairs, finding.cure
    assert "--steps K" in finding.cure
