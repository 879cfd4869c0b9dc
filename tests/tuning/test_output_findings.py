"""What the chosen plan's evaluation shows; sound twins say nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.output_findings import SampleIndices, plan_findings
from tests.tuning.factory import make_evaluation

RNG = np.random.default_rng(0)
SCALES = np.array([300.0, 300.0, 80.0, 80.0, 0.2])
INDICES = SampleIndices(tuple(range(10, 16)), (3, 4, 5, 6))


def compared(noise: np.ndarray, samples: int = 6) -> OutputError:
    """Detections [1, 40, 5], moved by noise of the standard deviation that is given for each column."""
    reference = [SCALES * RNG.standard_normal((1, 40, 5)) for _ in range(samples)]
    outputs = [{"y": y + noise * RNG.standard_normal(y.shape)} for y in reference]
    return compare_outputs(outputs, Reference([{"y": y} for y in reference]))


def evaluated(error: OutputError, held_out: OutputError | None = None, metric: str = "worst_part") -> Evaluation:
    return replace(make_evaluation(1.0, 1e-3), error=error, held_out=held_out, metric=metric)


EVEN = 1e-3 * SCALES


@pytest.mark.parametrize("metric", ["relative_l2", "worst_part"])
def test_a_column_that_is_hidden(metric: str) -> None:
    noise = np.append(EVEN[:4], 0.05)
    (finding,) = plan_findings(evaluated(compared(noise), metric=metric), INDICES)
    assert (finding.code, finding.severity) == ("column-hidden", "warning")
    assert [(o.name, o.columns) for o in finding.where.outputs] == [("y", (4,))]
    assert finding.evidence["column_error"] == pytest.approx(0.25, rel=0.3)
    assert "--tolerance 'y[4]=abs:X'" in finding.cure


def test_held_out_samples_that_differ() -> None:
    (finding,) = plan_findings(evaluated(compared(EVEN), compared(20 * EVEN, 4)), INDICES)
    assert (finding.code, finding.where.samples) == ("held-out-differs", (3, 4, 5, 6))
    assert "more samples" in finding.cure
    assert not plan_findings(evaluated(compared(EVEN), compared(1.1 * EVEN, 4)), INDICES)


def test_an_engine_that_is_not_what_was_emulated() -> None:
    error = compared(EVEN)
    assert not plan_findings(evaluated(error).with_emulated(error.value("worst_part") * 1.1, 6, 1e-7), INDICES)
    (finding,) = plan_findings(evaluated(error).with_emulated(error.value("worst_part") / 4, 6, 1e-7), INDICES)
    assert finding.code == "emulation-differs"
    assert finding.text.endswith("apart by more than a factor of 1.5")
