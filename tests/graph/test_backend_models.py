"""ONNX's backend tests, single operators, under any plan: valid, run by ONNX Runtime, and read by TensorRT-RTX."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import rtx
from tests.graph.helpers import run
from tests.graph.models import save
from tests.graph.verify import verify

PARTS = 8  # a failure of one part leaves the others


@pytest.mark.slow
@pytest.mark.tensorrt_rtx
@pytest.mark.parametrize("part", range(PARTS))
def test_any_plan_of_an_operator_model_is_valid_and_runs(part: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, in the computation of expected outputs
        from onnx.backend.test.case.node import collect_testcases

        cases = sorted(collect_testcases(None), key=lambda case: case.name)[part::PARTS]
    library = rtx.library()
    faults, tried = list[str](), 0
    for case in cases:
        path, chooser = save(case.model, tmp_path), random.Random(case.name)
        try:
            model = load_model(path)
            arrays = case.data_sets[0][0] if case.data_sets else ()
            feed = {value.name: array for value, array in zip(case.model.graph.input, arrays, strict=False)}
            run(path, feed)
        except Exception:  # not for mptune (its reason has tests of its own), or not for ONNX Runtime
            continue
        grouped = GroupedModel(model, find_groups(model, "op"))
        free = [group.id for group in grouped.groups if group.pinned is None]
        rewriter, is_read = Rewriter(grouped), rtx.refusal(library, path, build=False) is None
        for number, chance in enumerate((1.0, 0.5, 0.5)):
            fp16 = {group: Precision.FP16 for group in free if chooser.random() <= chance}
            plan = grouped.uniform(Precision.FP32).replace(fp16)
            written = rewriter.export(plan, tmp_path / "mixed.onnx")
            tried += 1
            try:
                verify(rewriter, plan, written)
                run(written, feed)
                assert not is_read or rtx.refusal(library, written, build=False) is None
            except Exception as error:
                faults.append(f"{case.name} plan {number}: {type(error).__name__}: {str(error)[:300]}")
    assert tried > 100
    assert not faults, "\n".join(faults)
