"""Outputs that are fed back as inputs over sequences of samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from mptune.data.samples import Rollout, outputs_of
from mptune.errors import SettingsError

NAMES = {"inputs": ["x", "state:0"], "outputs": ["y", "next:0"], "samples": 10}


def counted(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"next": feed["state"].astype(np.float64) + feed["x"], "y": feed["state"] * 2}


def test_each_sequence_starts_at_its_recorded_state_and_goes_on_by_itself() -> None:
    samples = [{"x": np.float32([1]), "state": np.float32([100 * k])} for k in range(11)]
    outputs = outputs_of(counted, samples, Rollout((("next", "state"),), 5))
    assert [each["next"].tolist() for each in outputs] == [[5.0], [505.0]], (
        "the eleventh sample begins no whole sequence"
    )
    assert outputs[0]["next after 1 steps"].tolist() == [1.0]
    assert outputs[1]["next after 2 steps"].tolist() == [502.0]
    assert outputs[1]["y"].tolist() == [1008.0]
    assert len(outputs_of(counted, samples, None)) == 11
    assert Rollout.parse(["next:0:state:0"], None, **NAMES) == Rollout((("next:0", "state:0"),), 10), "of all samples"
    assert Rollout.parse([], None, **NAMES) is None


@pytest.mark.parametrize(
    ("texts", "steps", "words"),
    [
        (["next:0"], 5, "feedback= next:0: the model has no such OUTPUT:INPUT"),
        (["y:z"], 5, "no such OUTPUT:INPUT"),
        (["y:x", "next:0:x"], 5, "feeds input 'x' twice"),
        (["y:x"], 1, "the data hold 10 samples"),
        (["y:x"], 11, "the data hold 10 samples"),
        ([], 4, "steps= is 4, and nothing is fed back"),
    ],
)
def test_what_cannot_be_fed_back_is_said(texts: list[str], steps: int, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Rollout.parse(texts, steps, **NAMES)
    assert words in caught.value.message
    assert caught.value.hint
