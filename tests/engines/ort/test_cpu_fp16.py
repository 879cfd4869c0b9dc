"""FP16-typed transformers on the CPU provider: two faults of ONNX Runtime that sessions must steer around."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mptune.data.archive import save_samples
from mptune.engines.base import Failure
from mptune.engines.jobs.emulation import ErrorsJob
from mptune.engines.jobs.reference import ReferenceJob
from mptune.engines.jobs.samples import Scoring
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.parent import Worker
from mptune.settings import WorkerSettings
from tests.graph import models


def norm_then_products(folder: Path) -> Path:
    """A norm whose result reaches a product through a transpose: what the crashing fusion looks for."""
    nodes = [
        models.node("LayerNormalization", ["x", "gamma", "beta"], "n", "norm", axis=-1),
        models.node("Transpose", ["n"], "t", "transpose", perm=[1, 0, 2]),
        models.node("MatMul", ["t", "w"], "y", "product"),
    ]
    constants = [models.weight("gamma", 16), models.weight("beta", 16), models.weight("w", 16, 16)]
    proto = models.model(nodes, [models.value("x", [4, 3, 16])], [models.value("y", [3, 4, 16])], constants)
    return models.save(proto, folder)


def test_an_fp16_norm_before_a_product_neither_crashes_nor_changes_from_run_to_run(tmp_path: Path) -> None:
    path = norm_then_products(tmp_path)
    model = load_model(path)
    groups = find_groups(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    typed = Rewriter(GroupedModel(model, groups)).export(plan, tmp_path / "typed.onnx")
    sample = {"x": np.random.default_rng(0).standard_normal((4, 3, 16)).astype(np.float32)}
    save_samples(tmp_path / "samples.npz", [sample] * 4)
    with Worker(tmp_path / "logs", WorkerSettings()) as worker:
        reference = worker.call(ReferenceJob(path, tmp_path / "samples.npz", tmp_path / "reference.npz", "cpu"), 60)
        assert not isinstance(reference, Failure), reference
        job = ErrorsJob((typed,), Scoring(tmp_path / "samples.npz", tmp_path / "reference.npz"))
        result = worker.call(job, 60)
    assert not isinstance(result, Failure), result
    errors = result[0].per_output["y"]["relative_l2"]
    assert len(set(errors)) == 1, "the same sample gives the same error every time"
    assert 0 < errors[0] < 1e-2
