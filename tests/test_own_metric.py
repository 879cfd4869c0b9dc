"""A metric of the user's that is wrong: one error that quotes its line, at once, and no blame on the model or FP16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.errors import MptuneError
from tests.conftest import save_mlp
from tests.fakes import FAST, Diary

pytestmark = pytest.mark.usefixtures("opened_here")


def broken_search(folder: Path, body: str, listener: Diary) -> MptuneError:
    """The error of a search whose metric has this body, with ONNX Runtime on the CPU."""
    save_mlp(folder / "model.onnx")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32))
    (folder / "mine.py").write_text(f"import sys\n\n\ndef metric(outputs, reference):\n    {body}\n")
    with pytest.raises(MptuneError) as caught:
        mptune.search(
            folder / "model.onnx",
            data=folder / "data.npz",
            out=folder / "run",
            budget=8,
            target="cpu",
            metric=f"{folder / 'mine.py'}:metric",
            latency=FAST,
            listener=listener,
        )
    return caught.value


@pytest.mark.parametrize(
    ("body", "words", "line"),
    [
        ("return float('nan')", "is nan for all-FP32, whose outputs are finite", "metric"),
        ("sys.exit(3)", "failed on sample 0: SystemExit: 3", "5: sys.exit(3)"),
        ("return outputs['logits']", "failed on sample 0: KeyError", "5: return outputs['logits']"),
        ("return 'good'", "it returned 'good', which is not one number", "4"),
    ],
)
def test_a_search_with_it_stops_at_once_and_quotes_the_line(tmp_path: Path, body: str, words: str, line: str) -> None:
    diary = Diary()
    error = broken_search(tmp_path, body, diary)
    assert words in error.message
    assert f"{tmp_path / 'mine.py'}:{line}" in error.message
    assert error.exit_code == 1
    assert "\n" not in error.message
    assert "does not run" not in error.message
    assert "FP16" not in error.message
    assert diary.done == [], "nothing is built for it"
    assert not any("one-group errors: 8" in stage for stage in diary.stages)
    assert list((tmp_path / "run" / "logs").iterdir()) == []
