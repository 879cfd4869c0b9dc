"""Random plans of a model: valid, with no Cast in vain, run by ONNX Runtime, and built by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path

from mptune.engines.loading import load_typed_model
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import feeds, plans, run
from tests.graph.verify import verify

PLANS, ENGINES = 50, 4
"""At each granularity."""


def check(path: Path, folder: Path, refused: str | None) -> None:
    """Check 100 plans of the model, and engines of eight of them.

    Args:
        path: ONNX file.
        folder: where files are written.
        refused: what TensorRT-RTX says of the model in FP32 already; None where it takes the model.
    """
    library, model = rtx.library(), load_typed_model(path)
    bank = WeightBank.write(model, folder)
    typed = folder / "typed.onnx"
    for granularity in ("fusion", "op"):
        groups = find_groups(model, granularity)
        grouped = GroupedModel(model, groups)
        rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
        chosen = plans(model, groups, PLANS - 2, seed=7)
        for plan in chosen:
            feed = feeds(model)
            verify(rewriter, plan, rewriter.write(plan, typed))
            run(typed, feed)
            run(emulator.write(plan, folder / "emulated.onnx"), feed)
        fp32 = PrecisionPlan.uniform(model.sha256, [group.id for group in groups], Precision.FP32)
        said = rtx.refusal(library, rewriter.write(fp32, typed))
        if refused is not None:
            assert refused in str(said)
            continue
        assert said is None
        for plan in chosen[:ENGINES]:
            assert rtx.refusal(library, rewriter.write(plan, typed)) is None, plan
