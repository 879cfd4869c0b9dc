"""Which samples differ, in words."""

from __future__ import annotations

import pytest

from mptune.diagnosis.causes.preprocessing import which_samples


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([3], "sample 3"),
        ([3, 7], "samples 3, 7"),
        ([4, 5, 6], "samples 4 to 6"),
        ([10, 20, 30], "samples 10, 20, 30"),
        ([0, 1, 5], "samples 0, 1, 5"),
    ],
)
def test_samples_in_words(samples: list[int], words: str) -> None:
    assert which_samples(samples) == words
