"""How a difference lies along the samples: from one on, growing, of single ones, mixed with the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.diagnosis.patterns.bounds import LEFT

_FEWEST_IN_TIME = 16
"""Of fewer samples, a difference that grows is chance."""
_FEWEST_MIXED = 4
_NAMED = 8


def along_samples(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """How a difference lies along the samples where that is plain, in words; "" else.

    Args:
        got: of each sample, finite, the same shapes as ``wanted``.
        wanted: of each sample.
    """
    count = len(wanted)
    if count < 4:
        return ""
    apart = np.array(
        [float(np.sqrt(np.mean((a - b) ** 2))) if b.size else 0.0 for a, b in zip(got, wanted, strict=True)]
    )
    size = float(np.sqrt(np.mean([np.mean(b**2) if b.size else 0.0 for b in wanted]))) + 1e-30
    off = apart > 1e-5 * size
    if not any(a.any() for a in got[1:]) and not off[0] and off[1:].any():
        return "it is zero in all samples but the first: as where a batch was fixed at 1"
    if zero := _zero_samples(got, off):
        return zero
    if mixed := _mixed_with_before(got, wanted):
        return mixed
    first = int(np.argmax(off))
    if off.any() and first >= 2 and off[first:].mean() > 0.8:
        return f"the first {first} samples are right, those from {first} on differ: as where a state is carried on"
    if count < _FEWEST_IN_TIME:
        return ""
    quarter = count // 4
    begin, end = float(np.mean(apart[:quarter])), float(np.mean(apart[-quarter:]))
    ranks = np.argsort(np.argsort(apart))
    if np.corrcoef(ranks, np.arange(count))[0, 1] > 0.7 and end > 2 * begin:
        return (
            f"the difference grows from sample to sample, from {begin:.3g} to {end:.3g} (root mean square of the first"
            " and the last quarter): as where errors of a state add up"
        )
    return ""


def _zero_samples(got: Sequence[np.ndarray], off: np.ndarray) -> str:
    """Whether all samples that differ are zero throughout."""
    zero = [k for k, array in enumerate(got) if off[k] and not array.any()]
    if not zero or len(zero) < int(off.sum()) or len(zero) == len(got):
        return ""
    listed = ", ".join(map(str, zero[:_NAMED])) + (", ..." if len(zero) > _NAMED else "")
    return (
        f"sample{'s' * (len(zero) > 1)} {listed} {'are' if len(zero) > 1 else 'is'} zero throughout, the others right"
    )


def _mixed_with_before(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """Whether each sample is partly the one before: of the reference, or of what was recorded."""
    if len(wanted) < _FEWEST_MIXED or len({array.shape for array in wanted}) > 1 or not wanted[0].size:
        return ""
    a, b = (np.stack([array.ravel() for array in side]) for side in (got, wanted))
    apart = float(np.linalg.norm(a[1:] - b[1:]))
    for before, whose in ((b[:-1], "of the reference's before it"), (a[:-1], "of the recorded one before it")):
        moved, own = a[1:] - before, b[1:] - before
        share = float((moved * own).sum() / max(float((own * own).sum()), 1e-30))
        rest = float(np.linalg.norm(moved - share * own))
        if LEFT < share < 1 - LEFT and rest <= LEFT * apart:
            return (
                f"each sample is {share:.3g} of its reference and {1 - share:.3g} {whose}: as where an application"
                " smooths over time or blends frames"
            )
    return ""
