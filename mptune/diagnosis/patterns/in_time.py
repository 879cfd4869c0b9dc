"""How a difference lies along the samples: from one on, growing, of single ones, mixed with the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.diagnosis.patterns.bounds import LEFT

_FEWEST_IN_TIME = 16
"""Of fewer samples, a difference that grows is chance."""
_FEWEST_MIXED = 4
_MOST_SHARE = 8.0
"""Of a sample's own reference, where it is continued from the one before."""
_FEW = 0.25
"""Of the samples, that a difference has to itself at most."""
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
    if few := _few_samples(off):
        return few
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


def which_samples(samples: Sequence[int]) -> str:
    """Samples by index, in words: ``samples 3, 7``, ``samples 10 to 14``, ``samples 9, 19, 29 (every 10th)``."""
    count = len(samples)
    if count == 1:
        return f"sample {samples[0]}"
    steps = set(np.diff(samples).tolist())
    if count > 2 and steps == {1}:
        return f"samples {samples[0]} to {samples[-1]}"
    listed = ", ".join(map(str, samples[:_NAMED])) + (", ..." if count > _NAMED else "")
    if count > 2 and len(steps) == 1:
        step = int(steps.pop())
        ending = "th" if step % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
        return f"samples {listed} (every {step}{ending})"
    return f"samples {listed}"


def _zero_samples(got: Sequence[np.ndarray], off: np.ndarray) -> str:
    """Whether all samples that differ are zero throughout."""
    zero = [k for k, array in enumerate(got) if off[k] and not array.any()]
    if not zero or len(zero) < int(off.sum()) or len(zero) == len(got):
        return ""
    return f"{which_samples(zero)} {'are' if len(zero) > 1 else 'is'} zero throughout, the others right"


def _few_samples(off: np.ndarray) -> str:
    """The samples that differ, where they are few or come at even steps."""
    samples = [int(k) for k in np.flatnonzero(off)]
    is_even = len(samples) > 2 and len(set(np.diff(samples).tolist())) == 1 and samples[1] - samples[0] > 1
    if not samples or (len(samples) > _FEW * len(off) and not is_even):
        return ""
    return f"{which_samples(samples)} of {len(off)} differ{'s' * (len(samples) == 1)}, the others are right"


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
        if not LEFT < share < _MOST_SHARE or abs(1 - share) < LEFT or rest > LEFT * apart:
            continue
        doing = "smooths over time or blends frames" if share < 1 else "goes on from the one before beyond it"
        return (
            f"each sample is {share:.3g} of its reference and {1 - share:.3g} {whose}: as where an application {doing}"
        )
    return ""
