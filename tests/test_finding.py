"""The record of a finding: its JSON form, and the list of codes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mptune.finding import Finding, OutputColumns, Where


def _finding(**changes: object) -> Finding:
    given: dict[str, object] = {
        "code": "overflow",
        "severity": "warning",
        "origin": "search",
        "where": Where(nodes=("/pow",), groups=("g001",), tensors=("square",)),
        "evidence": {"absmax": 1.4e5, "fp16_max": 65504},
        "text": "square reached 1.4e+05, FP16 ends at 65504",
        "cure": "keep the group in FP32",
    }
    return Finding(**{**given, **changes})  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    where = Where(
        nodes=("a", "b"),
        groups=("g001",),
        tensors=("t",),
        outputs=(OutputColumns("boxes", (0, 3)), OutputColumns("scores")),
        inputs=("x",),
        samples=(0, 7),
    )
    finding = _finding(where=where)
    document = finding.to_json()
    assert document["where"]["outputs"] == [{"name": "boxes", "columns": [0, 3]}, {"name": "scores", "columns": None}]
    again = Finding.from_json(json.loads(json.dumps(document, allow_nan=False)))
    assert again == finding
    assert len({again, finding}) == 1


def test_evidence_is_plain_json() -> None:
    given = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": np.float32(0.5), "e": 3, "f": "TF32"}
    finding = _finding(evidence=given)
    assert finding.evidence == {"a": "inf", "b": "-inf", "c": "nan", "d": 0.5, "e": 3, "f": "TF32"}
    assert Finding.from_json(json.loads(json.dumps(finding.to_json(), allow_nan=False))) == finding
    given["e"] = 4
    assert finding.evidence["e"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "overfow"}, "no code 'overfow'"),
        ({"code": ""}, "no code ''$"),
        ({"severity": "fatal"}, "no severity 'fatal'"),
        ({"origin": "report"}, "no origin 'report'"),
    ],
)
def test_what_does_not_exist_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _finding(**changes)
    with pytest.raises(ValueError, match=message):
        Finding.from_json({**_finding().to_json(), **changes})


def test_the_message_is_one_line() -> None:
    assert _finding().message == "square reached 1.4e+05, FP16 ends at 65504; keep the group in FP32"
    assert _finding(cure="").message == "square reached 1.4e+05, FP16 ends at 65504"
