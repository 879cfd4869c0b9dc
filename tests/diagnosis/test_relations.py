"""What an application does to outputs: said in words, and nothing is said of noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mptune.diagnosis.patterns.places import how_it_goes_on, what_is_there
from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.patterns.stale import find_stale

RNG = np.random.default_rng(5)
SCORES = RNG.standard_normal((12, 6))
BOXES = np.concatenate([RNG.uniform(10, 50, (6, 20, 4)), RNG.uniform(0, 1, (6, 20, 3))], axis=2)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x)
    found: np.ndarray = e / e.sum(axis=-1, keepdims=True)
    return found


def columns(x: np.ndarray, **changed: np.ndarray) -> np.ndarray:
    """Boxes with some columns replaced: ``c0=...``."""
    found = x.copy()
    for name, column in changed.items():
        found[..., int(name[1:])] = column
    return found


@pytest.mark.parametrize(
    ("exact", "change", "wanted"),
    [
        (SCORES, lambda x: 1 / (1 + np.exp(-x)), "it is the sigmoid of the reference"),
        (SCORES, softmax, "it is the softmax along axis 1 of the reference"),
        (SCORES, lambda x: np.log(softmax(x)), "it is the logarithm of the softmax along axis 1 of the reference"),
        (SCORES, lambda x: np.maximum(x, 0), "it is the positive part (Relu) of the reference"),
        (BOXES, lambda x: 1 / x, "it is the reciprocal of the reference"),
        (BOXES, lambda x: np.roll(x, -1, 1), "it is the reference moved by -1 along axis 1"),
        (
            SCORES,
            lambda x: np.round(x / 0.03) * 0.03,
            "it is the reference rounded to multiples of 0.03, as by an INT8",
        ),
        (
            BOXES,
            lambda x: columns(x, c0=x[..., 0] - x[..., 2] / 2, c2=x[..., 0] + x[..., 2] / 2),
            "column 0 is the reference minus 0.5 times its column 2;"
            " column 2 is 0.5 times the reference plus its column 0",
        ),
        (
            BOXES,
            lambda x: columns(x, c0=x[..., 0] / 64, c1=x[..., 1] / 64, c2=x[..., 2] / 64, c3=x[..., 3] / 64),
            "columns 0 to 3 are 0.0156 times the reference",
        ),
        (BOXES, lambda x: columns(x, c1=64 - x[..., 1]), "column 1 is -1 times the reference plus 64"),
        (
            BOXES,
            lambda x: columns(x, c5=x[..., 5] * x[..., 4], c6=x[..., 6] * x[..., 4]),
            "columns 5, 6 are the reference times its column 4",
        ),
        (BOXES, lambda x: np.clip(x, 12, 40), "it is the reference limited to 12..40"),
        (SCORES, lambda x: np.minimum(x, 0.8), "it is the reference limited to at most 0.8"),
        (
            SCORES,
            lambda x: np.clip(np.round(x / 0.03), -20, 20) * 0.03,
            "it is the reference rounded to multiples of 0.03 and limited to -0.6..0.6: as by an INT8",
        ),
        (SCORES, lambda x: np.round(x, 1), "it is the reference rounded to multiples of 0.1, as where it is written"),
        (
            np.abs(SCORES),
            lambda x: np.where(x < 0.5, 0.0, x),
            "it is the reference with values of",
        ),
        (
            BOXES,
            lambda x: x.transpose(0, 2, 1).reshape(x.shape),
            "it is the reference with its axes in the order (0, 2, 1), reshaped where it should be transposed",
        ),
        (
            softmax(SCORES),
            lambda x: softmax(0.5 * np.log(x)),
            "it is the reference's softmax along axis 1 with its logits times 0.5",
        ),
        (SCORES, lambda x: x + RNG.standard_normal(x.shape), ""),
        (BOXES, lambda x: x * RNG.uniform(0.9, 1.1, x.shape), ""),
        (BOXES, lambda x: x + 1e-3 * RNG.standard_normal(x.shape), ""),
        (SCORES, lambda x: x.astype(np.float16).astype(np.float64), ""),
    ],
)
def test_what_an_application_does(exact: np.ndarray, change: Callable[[np.ndarray], np.ndarray], wanted: str) -> None:
    got = change(exact)
    said = what_is_there([got[k : k + 1] for k in range(len(got))], [exact[k : k + 1] for k in range(len(got))])
    assert said.startswith(wanted)
    assert bool(said) == bool(wanted)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda k, x: x + 0.01 * (k + 1), "the difference grows from sample to sample"),
        (lambda k, x: x + 0.3 * (k >= 5), "the first 5 samples are right, those from 5 on differ"),
        (lambda k, x: x * (k == 0), "it is zero in all samples but the first"),
        (lambda k, x: x * (k not in (3, 7)), "samples 3, 7 are zero throughout"),
        (lambda k, x: x + 0.1 * RNG.standard_normal(x.shape), ""),
    ],
)
def test_how_it_goes_on(change: Callable[[int, np.ndarray], np.ndarray], wanted: str) -> None:
    exact = [RNG.standard_normal((1, 8)) for _ in range(24)]
    said = how_it_goes_on([change(k, x) for k, x in enumerate(exact)], exact)
    assert said.startswith(wanted)
    assert bool(said) == bool(wanted)


@pytest.mark.parametrize("whose", ["of the reference's before it", "of the recorded one before it"])
def test_samples_that_are_partly_the_one_before(whose: str) -> None:
    exact = [RNG.standard_normal((1, 8)) for _ in range(24)]
    got = [exact[0]]
    for k in range(1, 24):
        got.append(0.75 * exact[k] + 0.25 * (exact if "reference" in whose else got)[k - 1])
    assert f"each sample is 0.75 of its reference and 0.25 {whose}" in how_it_goes_on(got, exact)


def test_rows_of_later_samples_are_not_stale() -> None:
    found = find_stale(Compared.of(np.concatenate([BOXES[:2], BOXES[3:], BOXES[-1:]]), BOXES, BOXES), 1)
    assert found is not None
    assert (found.is_ahead, found.repeated, found.rows) == (True, None, (2, 3, 4))
    before = find_stale(Compared.of(np.concatenate([BOXES[:3], BOXES[2:-1]]), BOXES, BOXES), 1)
    assert before is not None
    assert (before.is_ahead, before.repeated) == (False, None)
    stuck = find_stale(Compared.of(np.concatenate([BOXES[:3], BOXES[[2, 2, 2]]]), BOXES, BOXES), 1)
    assert stuck is not None
    assert (stuck.is_ahead, stuck.repeated) == (False, 2)


def test_a_batch_that_holds_its_first_row_alone() -> None:
    found = find_stale(Compared.of(np.repeat(SCORES[:1], 12, 0), SCORES, SCORES), 1)
    assert found is not None
    assert found.single == 0
    before = find_stale(Compared.of(np.roll(BOXES, 1, 0), BOXES, BOXES), 1)
    assert before is not None
    assert before.single is None
    labels = np.array([0, 3, 2, 0, 3, 2, 1, 0, 2, 3, 0, 1])[:, None]
    assert find_stale(Compared.of(np.where(labels == 2, 1, labels), labels, labels), 1) is None
