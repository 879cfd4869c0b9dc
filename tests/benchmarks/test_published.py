"""Published latencies: the table, the share that is fitted to them, and the summary that is kept."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.published.__main__ import FITS, agreements, table, within
from benchmarks.published.fit import Case, Network, fit_share
from benchmarks.published.table import Published, read_table
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import Precision
from mptune.targets.roofline import NETWORK_SHARE, roofline
from mptune.targets.target import EXPECTED_FACTOR, load_target

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = [BENCHMARKS / "models" / f"{name}.onnx" for name in ("digits_vit", "line_encoder")]


@pytest.fixture(scope="module")
def summary() -> dict:
    return json.loads((BENCHMARKS / "results/published.json").read_text())


def test_the_table_names_a_source_and_a_profile_for_each_latency() -> None:
    rows = read_table()
    assert len(rows) == 126
    assert all(row.source and row.family and load_target(row.target) for row in rows)
    assert {row.precision for row in rows} == {"FP16", "TF32", "FP32"}
    wide = next(row for row in rows if row.network == "pspnet_r50d8")
    assert (wide.size, wide.batch) == ((512, 1024), 1)
    unfitted = {row.module for row in rows if not row.is_fitted}
    assert unfitted == {"jetson-orin-nano-8gb, power mode not stated"}
    assert any(row.is_fitted and row.target == "jetson-orin-nano-8gb" for row in rows)  # the one at 15 W


@pytest.mark.parametrize("precision", ["FP16", "TF32", "FP32"])
@pytest.mark.parametrize("name", ["jetson-agx-orin-64gb", "t4"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_network_is_predicted_as_by_the_terms_of_a_search(path: Path, name: str, precision: str) -> None:
    model, target = load_model(path), load_target(name)
    groups = GroupedModel(model, find_groups(model))
    terms = roofline(groups, target, static_shapes(model).shapes, tf32=precision == "TF32")
    free = [group.id for group in groups.groups if group.pinned is None]
    fp16 = groups.uniform(Precision.FP32).replace(dict.fromkeys(free, Precision.FP16))
    expected = {"FP16": terms.predict(fp16), "FP32": terms.base_ms}
    expected["TF32"] = terms.base_ms - terms.tf32_gain_ms
    predicted = Network(model).predictor(target, precision)(NETWORK_SHARE)
    assert predicted == pytest.approx(expected[precision], rel=1e-9)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_fit_returns_the_share_that_latencies_were_made_with(share: float) -> None:
    cases = []
    for path, name, precision in product(MODELS, ("jetson-orin-nano-8gb-super", "t4"), ("FP16", "TF32")):
        predict = Network(load_model(path)).predictor(load_target(name), precision)
        row = Published("here", name, precision, path.stem, (8, 8), 1, path.stem, predict(share), is_fitted=True)
        cases.append(Case(row, predict))
    assert fit_share(cases) == pytest.approx(share, rel=1e-3)


class TestSummary:
    """``results/published.json``, which `python -m benchmarks.published` writes."""

    def test_it_is_of_the_share_and_the_table_as_they_are(self, summary: dict) -> None:
        assert summary["share"] == NETWORK_SHARE == round(summary["fitted_share"], 2)
        rows = [[row.module, row.precision, row.network, row.family, row.ms] for row in read_table()]
        assert [row[:5] for row in summary["rows"]] == rows

    @pytest.mark.parametrize("fit", ["with all", "family left out"])
    @pytest.mark.parametrize("precision", ["FP16", "TF32"])
    @pytest.mark.parametrize("module", ["jetson-agx-orin-64gb", "jetson-orin-nano-8gb-super"])
    def test_orin_modules_are_predicted_without_bias(self, summary, module: str, precision: str, fit: str) -> None:
        now, before = (agreements(summary, which)[module, precision] for which in (fit, "large kernels"))
        assert now.count >= 10
        assert 0.8 <= now.median <= 1.25
        assert now.log_sd <= 0.22
        assert not 0.8 <= 1 / before.median <= 1.25

    def test_the_page_has_its_table_and_its_factor(self, summary: dict) -> None:
        count, rows = within(summary, EXPECTED_FACTOR)
        assert round(100 * count / rows) == 87  # messages say it, too
        assert set(FITS) == {column.removeprefix("log ratio, ") for column in summary["columns"][5:]}
        assert table(summary) in (BENCHMARKS / "README.md").read_text()
