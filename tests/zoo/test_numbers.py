"""Each situation is named by ``inspect``, or by the evaluation of a plan, and its sound twin is silent."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.finding import CODES
from mptune.inspection import Inspection
from mptune.tuning.output_findings import SampleIndices, plan_findings
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.numbers import SHOWN, Show
from tests.zoo.numbers.further import FURTHER, HELD
from tests.zoo.plans import PLANS, SEARCH, evaluated
from tests.zoo.tracker import recorded, tracker

EVERY = {**SHOWN, **FURTHER}
NAMES = [*SHOWN, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
ALL_GRAPHS = {**GRAPHS, **FURTHER_GRAPHS}


def code_of(name: str) -> str:
    return name.split()[0].rstrip(",:")


def inspected(show: Show, folder: Path) -> Inspection:
    onnx.save(show.proto, folder / "model.onnx")
    np.savez(folder / "data.npz", **show.data)  # type: ignore[arg-type]
    return mptune.inspect(folder / "model.onnx", data=folder / "data.npz" if show.data else None)


@pytest.mark.parametrize("name", NAMES)
def test_what_shows_a_code_is_named_with_its_node_and_numbers_and_its_twin_is_silent(name: str, tmp_path: Path) -> None:
    code, (shown, twin) = code_of(name), EVERY[name]
    found = [f for f in inspected(shown(), tmp_path).findings if f.code == code]
    assert found, f"{code} is not found"
    assert set(shown().nodes) <= {node for finding in found for node in finding.where.nodes}
    assert all(f.evidence and f.cure and f.text != CODES[code].meaning for f in found)
    wrong = "warning" if code not in ("long-sum", "norm-written-out") and name not in HELD else "info"
    assert {finding.severity for finding in found} == {wrong}
    of_twin = inspected(twin(), tmp_path).findings
    assert [f.text for f in of_twin if f.code == code or f.severity != "info"] == []


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_what_the_graph_shows_is_named_without_data_and_its_twin_is_silent(name: str, tmp_path: Path) -> None:
    shown, twin, nodes = ALL_GRAPHS[name]
    code = code_of(name)
    (finding,) = [f for f in inspected(Show(shown(), {}), tmp_path).findings if f.code == code]
    assert finding.where.nodes == nodes
    assert finding.severity == CODES[code].severity
    assert re.search("--feedback .* --steps K" if code == "state-fed-back" else ".", finding.cure)
    of_twin = inspected(Show(twin(), {}), tmp_path).findings
    assert [f.text for f in of_twin if f.code == code or f.severity != "info"] == []


INDICES = SampleIndices(tuple(range(SEARCH)), tuple(range(SEARCH, 12)))
PLACES = {"one-sample-decides": (3,), "held-out-differs": (8, 9, 10, 11)}
COLUMNS = {"column-hidden": {4}, "column-hidden in a channel": {4}, "near-zero": {6, 7}}


@pytest.mark.parametrize("name", PLANS)
def test_what_a_plan_shows_is_named_and_a_sound_twin_shows_nothing(name: str, tmp_path: Path) -> None:
    code = code_of(name)
    found = plan_findings(evaluated(PLANS[name][0](), tmp_path), INDICES)
    (finding,) = [f for f in found if f.code == code]
    assert finding.where.samples == PLACES.get(name, ())
    columns = {column for output in finding.where.outputs for column in output.columns or ()}
    assert COLUMNS.get(name, set()) <= columns
    assert finding.severity == ("info" if code == "near-zero" else "warning")
    assert plan_findings(evaluated(PLANS[name][1](), tmp_path / "twin"), INDICES) == ()


def test_the_tracker_names_the_add_and_pins_its_group(tmp_path: Path) -> None:
    found = inspected(Show(tracker(), recorded()), tmp_path)
    (finding,) = [f for f in found.findings if f.code == "stagnation"]
    assert finding.where.nodes == ("advance",)
    assert finding.evidence["share"] > 0.9
    assert 0.25 <= finding.evidence["spacing"] <= 0.5
    (pinned,) = (group for group in found.groups if group.pin is not None)
    assert (pinned.group.id,) == finding.where.groups
    assert "advance" in pinned.group.nodes
    assert "'pos' stays unchanged" in pinned.pin.reason


def test_how_many_samples_show_it_is_said_and_the_largest(tmp_path: Path) -> None:
    show = SHOWN["overflow"][1]()
    show.data["x"][5] *= 300
    (finding, *_) = [f for f in inspected(show, tmp_path).findings if f.code == "overflow"]
    assert finding.where.samples == (5,)
    assert finding.text.endswith("in 1 of 8 samples: sample 5")
    show.data["x"][:] = show.data["x"][5] * np.linspace(0.5, 1, 8, dtype=np.float32)[:, None]
    (finding, *_) = [f for f in inspected(show, tmp_path).findings if f.code == "overflow"]
    assert finding.text.endswith("in all 8 samples, most in sample 7")
    assert (finding.evidence["samples_beyond"], finding.evidence["samples"]) == (8, 8)
