"""Each model that is wrong in FP32 is named by the plain command, with its node; its sound twin stays silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mptune
from mptune.cli import main
from mptune.errors import BaselineError
from mptune.graph.loading.model import load_model
from mptune.tuning.output_findings import training_findings
from tests.zoo.fp32 import specimens
from tests.zoo.in_process import in_process, place

ZOO = specimens()
CODES = {one.code for one in ZOO.values()} | {"engine-differs"}


@pytest.mark.parametrize("name", ZOO)
def test_what_is_wrong_is_named_with_its_node_and_a_twin_stays_silent(name: str, tmp_path: Path) -> None:
    specimen = ZOO[name]
    found = in_process(specimen, tmp_path)
    if not specimen.code:
        assert found == ()
        return
    (finding,) = [f for f in found if f.code == specimen.code]
    assert found == (finding,) or name not in ("noise", "faint_noise", "dropout"), "what draws is named once"
    assert finding.where.nodes == (specimen.node,)
    assert specimen.node in finding.text
    assert finding.severity == ("warning" if name in ("stuck", "centred_fixed") else "error")


@pytest.mark.parametrize("name", ["centred", "pooled", "stuck", "centred_twin"])
def test_the_plain_command_names_it_and_no_twin(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specimen = ZOO[name]
    model, data = place(specimen, tmp_path)
    code = main(["inspect", str(model), "--data", str(data), "--json", "--strict"])
    found = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["code"] in CODES]
    wanted = [(specimen.code, [specimen.node], "inspect")] if specimen.code else []
    assert [(f["code"], f["where"]["nodes"], f["origin"]) for f in found] == wanted
    assert code == (4 if found and found[0]["severity"] == "error" else 0)


def test_without_data_the_graph_alone_names_what_draws(tmp_path: Path) -> None:
    for name in ("noise", "dropout", "batch_norm"):
        model = load_model(place(ZOO[name], tmp_path)[0])
        (finding,) = training_findings(model, "inspect", is_run=False)
        assert (finding.code, finding.where.nodes) == ("not-deterministic", (ZOO[name].node,))
    for name in ("dropout_twin", "batch_norm_twin"):
        assert training_findings(load_model(place(ZOO[name], tmp_path)[0]), "inspect", is_run=False) == ()


def test_an_error_stops_a_search_and_what_was_found_is_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    place(ZOO["centred"], tmp_path)
    command = ["search", "model.onnx", "--data", "data.npz", "--budget", "3", "--target", "jetson-orin-nano-8gb"]
    assert main([*command, "--json"]) == 4
    shown = capsys.readouterr()
    front_json = tmp_path / "model.mptune/front.json"
    front = json.loads(shown.out)
    assert front == json.loads(front_json.read_text())
    assert "rows" in shown.err
    assert "hint: " in shown.err
    assert (front["points"], front["chosen"], {*front["baseline"].values()}) == ([], None, {None})
    (finding,) = (f for f in front["findings"] if f["code"] == "rows-mix")
    assert (finding["where"]["nodes"], finding["origin"]) == (["mean"], "search")
    with pytest.raises(BaselineError) as caught:
        mptune.search("model.onnx", data="data.npz", budget=3, target="jetson-orin-nano-8gb")
    assert caught.value.exit_code == 4
    assert [f.code for f in caught.value.findings] == ["rows-mix"]

    assert main([*command, "--json", "--skip-checks"]) == 0
    front = json.loads(capsys.readouterr().out)
    assert front["points"]
    assert [f["severity"] for f in front["findings"] if f["code"] == "rows-mix"] == ["error"]
    assert main(command) == 4, "the checks hold again"
    assert json.loads(front_json.read_text()) == front, "the run has a front already"
