"""Which samples differ, in words."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.diagnosis.patterns.places import which_differ, which_samples

RNG = np.random.default_rng(9)
LOGITS = RNG.standard_normal((24, 6)) + np.arange(6)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([3], "sample 3"),
        ([3, 7], "samples 3, 7"),
        ([4, 5, 6], "samples 4 to 6"),
        ([10, 20, 30], "samples 10, 20, 30 (every 10th)"),
        ([1, 3, 5, 7], "samples 1, 3, 5, 7 (every 2nd)"),
        ([0, 1, 5], "samples 0, 1, 5"),
    ],
)
def test_samples_in_words(samples: list[int], words: str) -> None:
    assert which_samples(samples) == words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([13], "sample 13 of 24 differs, the others are right"),
        ([0, 8, 16], "samples 0, 8, 16 (every 8th) of 24 differ"),
        (list(range(1, 24, 2)), "samples 1, 3, 5, 7, 9, 11, 13, 15, ... (every 2nd) of 24 differ"),
        ([1, 2, 5, 6, 7, 11, 12, 20, 21], ""),
        (list(range(5, 24)), "the first 5 samples are right, those from 5 on differ"),
        (list(range(24)), ""),
    ],
)
def test_which_samples_differ(wrong: list[int], words: str) -> None:
    got = LOGITS.copy()
    got[wrong] *= 1.2
    said = which_differ(list(got[:, None]), list(LOGITS[:, None]))
    assert said.startswith(words)
    assert bool(said) == bool(words)
