"""Which finding says why a layer group stays in FP32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mptune.finding import CODES, Finding

BREAKING_CODES = (
    "overflow",
    "vanishing-epsilon",
    "mask",
    "stagnation",
    "index-in-float",
    "spacing",
    "cancellation",
)
"""Codes of values that FP16 cannot hold, or holds so coarsely that the outputs suffer; the plainest first."""

FP16_CODES = frozenset((*BREAKING_CODES, "long-sum", "norm-written-out", "no-fp16-kernel"))
"""Codes of what FP16 breaks or lacks; the others are about the model in FP32, the data, the target or the run."""

_PINNING_CODES = (*BREAKING_CODES, "no-fp16-kernel", "no-bf16-kernel", "quantised-parts")
"""Codes of the findings that pin groups to FP32."""

LARGE_FROM = 0.1
"""An error from here on, in standard deviations of the outputs, is no rounding that a user would take."""


def breaks(finding: Finding) -> bool:
    """Whether a finding is about what FP16 breaks: not a mask that is held as the largest finite value, and masks."""
    is_held_mask = finding.code == "mask" and "held_as" in finding.evidence
    return finding.code in BREAKING_CODES and not is_held_mask


def finding_of(group: str, findings: Iterable[Finding], pin_reason: str | None = None) -> Finding | None:
    """The finding that is a reason to keep a group in FP32; None where there is none.

    Args:
        group: its id.
        findings: of the run.
        pin_reason: why the group is pinned; None where it is searched. The finding with these words comes first.
    """
    codes = BREAKING_CODES if pin_reason is None else _PINNING_CODES
    there = [one for one in findings if group in one.where.groups and one.code in codes]
    found = [one for one in there if breaks(one) or one.code not in BREAKING_CODES]
    if not found:
        return None
    return min(found, key=lambda one: (not _says(one, pin_reason), codes.index(one.code)))


def in_code_order(words: Iterable[str], others: Sequence[str]) -> list[str]:
    """Words, those that are codes first, in the order of ``CODES``; then ``others`` in their order."""
    ranks: Mapping[str, int] = {word: k for k, word in enumerate((*CODES, *others))}
    return sorted(set(words), key=lambda word: ranks.get(word, len(ranks)))


def _says(finding: Finding, pin_reason: str | None) -> bool:
    """Whether a pin's reason, ``tensor: what was seen of it``, is the finding's text."""
    return pin_reason is not None and any(
        finding.text.endswith(pin_reason.removeprefix(tensor))
        for tensor in finding.where.tensors
        if pin_reason.startswith(f"{tensor}: ")
    )
