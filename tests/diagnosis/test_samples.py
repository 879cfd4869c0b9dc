"""What a difference looks like over the samples: of other inputs, late, the same in all, in some of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mptune.diagnosis.patterns.across import with_an_input
from mptune.diagnosis.patterns.in_time import which_samples
from mptune.diagnosis.patterns.other_samples import unrelated
from mptune.diagnosis.patterns.places import how_it_goes_on, what_is_there
from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.patterns.stale import find_stale

RNG = np.random.default_rng(9)
MAPS = RNG.standard_normal((24, 2, 12, 12))
LOGITS = RNG.standard_normal((24, 6)) + np.arange(6)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """To so many bits beside the leading one."""
    fraction, exponent = np.frexp(x)
    found: np.ndarray = np.ldexp(np.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    return found


def said_of(got: np.ndarray, exact: np.ndarray) -> str:
    return what_is_there([got[k : k + 1] for k in range(len(got))], [exact[k : k + 1] for k in range(len(got))])


def test_outputs_of_other_inputs() -> None:
    other = RNG.standard_normal((24, 6)) + np.arange(6)
    found = unrelated(other, LOGITS)
    assert found is not None
    assert found.is_alike
    shifted = unrelated(other[:, ::-1].copy(), LOGITS)
    assert shifted is not None
    assert not shifted.is_alike


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 0.5 * RNG.standard_normal(x.shape),
        lambda x: x + 1.2 * RNG.standard_normal(x.shape),
        lambda x: 0.3 * x,
        lambda x: -x,
        lambda x: np.where(np.arange(len(x))[:, None] % 2, RNG.standard_normal(x.shape), x),
    ],
)
def test_outputs_that_have_something_to_do_with_their_samples(change: Callable[[np.ndarray], np.ndarray]) -> None:
    assert unrelated(change(LOGITS), LOGITS) is None


def test_few_samples_prove_nothing() -> None:
    assert unrelated(RNG.standard_normal((6, 40)), RNG.standard_normal((6, 40))) is None
    one = np.outer(RNG.standard_normal(8), np.ones(5))  # one number a sample, eight of them
    assert unrelated(np.outer(RNG.standard_normal(8), np.ones(5)), one) is None


@pytest.mark.parametrize(
    ("lag", "batch", "delay"), [(3, 1, 3), (5, 1, 5), (1, 1, None), (2, 1, None), (4, 4, None), (12, 4, None)]
)
def test_a_delay_that_stays_the_same(lag: int, batch: int, delay: int | None) -> None:
    late = np.concatenate([LOGITS[:1]] * lag + [LOGITS[:-lag]])
    compared = Compared.of(np.repeat(late[..., None], 8, 2), np.repeat(LOGITS[..., None], 8, 2), None)
    found = find_stale(compared, batch)
    assert found is not None
    assert found.delay(len(LOGITS), batch) == delay


def test_some_stale_rows_are_no_delay() -> None:
    stale = LOGITS.copy()
    stale[[5, 9, 14]] = LOGITS[[2, 6, 11]]
    found = find_stale(Compared.of(stale, LOGITS, None), 1)
    assert found is None or found.delay(len(LOGITS), 1) is None


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
    ],
)
def test_which_samples_differ(wrong: list[int], words: str) -> None:
    got = LOGITS.copy()
    got[wrong] *= 1.2
    said = how_it_goes_on(list(got[:, None]), list(LOGITS[:, None]))
    assert said.startswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("exact", "change", "words"),
    [
        (MAPS, lambda x: np.repeat(x[:1] + 0.5, len(x), 0), "it is the same in all samples"),
        (
            MAPS,
            lambda x: x + np.linspace(0, 1, 12) ** 2,
            "the difference is the same in every sample (from ",
        ),
        (
            MAPS,
            lambda x: x + np.where(np.arange(12) < 4, 4.0, 8.0),
            "the difference is the same in every sample (4, 8)",
        ),
        (
            MAPS,
            lambda x: x * np.where(np.arange(12) < 4, 0.5, 1.0),
            "it is the reference times factors that are the same in every sample (0.5, in 96 of 288 values)",
        ),
        (MAPS, lambda x: (x + np.roll(x, 1, 3)) / 2, "it is the reference moved by 0.5 along axis 3"),
        (
            MAPS,
            lambda x: 0.25 * np.roll(x, 1, 2) + 0.5 * x + 0.25 * np.roll(x, -1, 2),
            "it is the reference filtered along axis 2",
        ),
        (
            MAPS,
            lambda x: x[:, :, ::2, ::2].repeat(2, 2).repeat(2, 3),
            "its values are the same in blocks of 2 along axes 2 and 3",
        ),
        (LOGITS, lambda x: -np.sort(-x, 1), "it is the reference's entries along axis 1 in descending order"),
        (
            LOGITS - np.arange(6),
            lambda x: np.repeat(x.argmax(1)[:, None], 6, 1).astype(float),
            "it is the place of the reference's largest entry along axis 1",
        ),
        (
            LOGITS,
            lambda x: np.ascontiguousarray(x.T).reshape(x.shape),
            "it is the reference with its axes in the order (1, 0), reshaped where it should be transposed (axis 0",
        ),
        (
            LOGITS / np.linalg.norm(LOGITS, axis=1, keepdims=True),
            lambda x: x * np.linspace(0.5, 3, 24)[:, None],
            "each sample is its reference times a factor of its own (from 0.5 to 3), which all have the same length",
        ),
        (LOGITS, lambda x: x - x.max(1, keepdims=True), "each sample is its reference plus a number of its own"),
        (np.abs(LOGITS) + 0.1, lambda x: 50 / x, "it is 50 times the reciprocal of the reference"),
        (MAPS, lambda x: rounded(x, 7), "it is the reference rounded to BF16"),
        (MAPS, lambda x: rounded(x, 3), "it is the reference rounded to FP8 (E4M3)"),
        (rounded(MAPS, 3), lambda x: rounded(x * 1.03, 3), ""),
        (MAPS, lambda x: np.where(np.abs(x) < 0.1, 0, x), "it is the reference with magnitudes of"),
        (MAPS, lambda x: x * RNG.uniform(0.9, 1.1, x.shape), ""),
        (MAPS, lambda x: x + RNG.standard_normal(x.shape), ""),
    ],
)
def test_what_all_samples_have_in_common(
    exact: np.ndarray, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    said = said_of(change(exact), exact)
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_an_output_that_an_input_is_added_to() -> None:
    given = {"latent": RNG.standard_normal(MAPS.shape), "mask": np.ones((24, 1))}
    assert with_an_input(MAPS + given["latent"], MAPS, given) == "it is the reference plus 1 times the input 'latent'"
    mixed = with_an_input(0.8 * MAPS - 0.6 * given["latent"], MAPS, given)
    assert mixed == "it is 0.8 times the reference minus 0.6 times the input 'latent'"
    assert not with_an_input(MAPS + RNG.standard_normal(MAPS.shape), MAPS, given)
