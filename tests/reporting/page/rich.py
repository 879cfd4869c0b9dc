"""Content that gives every part of the page something to show."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from mptune.data.run_outputs import Sketch
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.environment import Environment
from mptune.finding import Finding, Where
from mptune.graph.groups import LayerGroup
from mptune.reporting.page import PageContent
from mptune.tuning.evaluation import Origin
from mptune.tuning.result import Progress
from tests.reporting.conftest import Bench, explained

FORGED = "</script><script>window.forged=1</script><img src=x onerror=window.forged=1>"
COMMAND = "run `mptune confirm RUN` on the device"
HOSTILE = FORGED + "\"'\n\x1b[31m\U0001f600" + "x" * 10_000


def rich_content(bench: Bench, directory: Path, environment: Environment) -> PageContent:
    """A front with a pinned group, findings, reasons, outputs, failures, and hostile names in all of them."""
    front, evaluations = bench.front(directory / "a 'run'.mptune")
    first = bench.groups[0]
    groups = (replace(first, name=HOSTILE, pinned=HOSTILE, ops={HOSTILE: 2}), *bench.groups[1:])
    front = replace(
        front,
        model_path=Path("m<i>.onnx"),
        findings=(_finding("overflow", first), _finding("random-data", first), _finding("rows-mix", first)),
        warnings=(HOSTILE, COMMAND),
        explanation=explained(front, groups, HOSTILE),
    )
    failure = Failure(Stage.BUILD, FailureKind.NO_TACTIC, HOSTILE, None)
    failures = ((bench.plan(2), Origin("seed", HOSTILE), failure),)
    progress = Progress((0.0, 0.1, 0.1, 0.3), 3e-2, 4, 20.0, 12.0, 30.0, failures)
    outputs = {point.plan.fingerprint: _outputs(k + 1) for k, point in enumerate(front.points)}
    shown = {"format": 1, "metric": "relative_l2", "unit": "sample", "count": 3, "indices": [4, 9, 11]}
    shown |= {"samples": ["sample 4", "sample 9", "sample 11"], "plans": outputs, "left_out": []}
    return PageContent(front, evaluations, groups, environment, progress, None, shown)


def _finding(code: str, group: LayerGroup) -> Finding:
    where = Where(nodes=(HOSTILE,), groups=(group.id,), tensors=(HOSTILE,), samples=(3,))
    severity = "error" if code == "rows-mix" else "warning"
    return Finding(code, severity, "search", where, {"reached": math.inf, "limit": 65504.0}, HOSTILE, f"keep {HOSTILE}")


def _outputs(seed: int) -> dict[str, str | dict[str, Sketch]]:
    counts = [int(n) for n in np.random.default_rng(seed).integers(0, 50, 32)]
    values = {"range": [-1.0, 2.0], "counts": counts, "below": 0, "above": 0, "non_finite": 0}
    part = {
        "statistic": "relative_l2", "columns": None, "error": seed / 100,
        "worst_samples": [[2, seed / 50], [0, seed / 60]], "reference": values,
        "plan": {**values, "counts": counts[::-1]}, "difference": {**values, "non_finite": 2}, "every": 1,
    }  # fmt: skip
    levels = base64.b64encode((np.arange(64, dtype=np.uint8) * seed).tobytes()).decode()
    grid = {"sample": 2, "size": [32, 32], "scale": 0.5, "grid": [8, 8], "levels": levels}
    sketch = {"shape": [1, 3, 32, 32], "as_rows": False, "parts": [part], "part_count": 1, "error_map": grid}
    return {"source": "measured", "outputs": {HOSTILE: sketch}}
