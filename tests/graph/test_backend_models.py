"""ONNX's backend tests, single operators, under any plan: valid, run by ONNX Runtime, and read by TensorRT-RTX."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import onnx
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import rtx
from tests.graph.helpers import run
from tests.graph.models import save
from tests.graph.verify import verify


@pytest.mark.slow
@pytest.mark.tensorrt_rtx
def test_any_plan_of_an_operator_model_is_valid_and_runs(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, in the computation of expected outputs
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    library, faults, tried = rtx.library(), list[str](), 0
    for case in cases:
        path, chooser = save(case.model, tmp_path), random.Random(case.name)
        feed = dict(zip((value.name for value in case.model.graph.input), case.data_sets[0][0], strict=False))
        try:
            onnx.checker.check_model(str(path), full_check=True)
            model = load_model(path)
            run(path, feed)
        except Exception:  # nothing in FP32, which other tests are about; onnx 1.23 (MVN) or ONNX Runtime refuses it
            continue
        grouped = GroupedModel(model, find_groups(model, "op"))
        rewriter, is_read = Rewriter(grouped), rtx.refusal(library, path, build=False) is None
        for number, chance in enumerate((1.0, 0.5, 0.5)):
            free = (group.id for group in grouped.groups if group.pinned is None and chooser.random() <= chance)
            plan, tried = grouped.uniform(Precision.FP32).replace(dict.fromkeys(free, Precision.FP16)), tried + 1
            written = rewriter.export(plan, tmp_path / "mixed.onnx")
            try:
                verify(rewriter, plan, written)
                run(written, feed)
                assert not is_read or rtx.refusal(library, written, build=False) is None
            except Exception as error:
                faults.append(f"{case.name}, plan {number}: {str(error)[:300]}")
    assert tried > 1000
    assert not faults, "\n".join(faults)
