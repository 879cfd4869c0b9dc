"""Which finding says why a layer group stays in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mptune.finding import BREAKING_CODES, PINNING_CODES, Finding
from mptune.findings.wording import SEVERITIES

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
    codes = BREAKING_CODES if pin_reason is None else PINNING_CODES
    there = [finding for finding in findings if group in finding.where.groups and finding.code in codes]
    reasons = [finding for finding in there if breaks(finding) or finding.code not in BREAKING_CODES]
    if not reasons:
        return None
    return min(reasons, key=lambda finding: (not _says(finding, pin_reason), codes.index(finding.code)))


def in_order(findings: Iterable[Finding], errors: Mapping[str, float]) -> tuple[Finding, ...]:
    """The most severe first; of these what breaks, the largest one-group error first; then the rest, as it comes.

    A group without a one-group error, as one that is pinned because it breaks, comes before the others, by the plainest
    of its findings. What one group has stays in the order of the graph: what goes wrong first is why the rest does.

    Args:
        findings: in the order of the graph.
        errors: one-group errors.
    """
    listed = list(findings)
    plainest: dict[str, int] = {}
    for finding in filter(breaks, listed):
        for group in finding.where.groups:
            plainest[group] = min(plainest.get(group, len(BREAKING_CODES)), BREAKING_CODES.index(finding.code))

    def rank(finding: Finding) -> tuple[int, bool, float, int]:
        severity, groups = SEVERITIES.index(finding.severity), finding.where.groups
        if not (breaks(finding) and finding.is_about_model):
            return severity, True, 0.0, 0
        error = max((errors.get(group, math.inf) for group in groups), default=math.inf)
        return severity, False, -error, min((plainest[group] for group in groups), default=0)

    return tuple(sorted(listed, key=rank))


def _says(finding: Finding, pin_reason: str | None) -> bool:
    """Whether a pin's reason, ``tensor: what was seen of it``, is the finding's text."""
    return pin_reason is not None and any(
        finding.text.endswith(pin_reason.removeprefix(tensor))
        for tensor in finding.where.tensors
        if pin_reason.startswith(f"{tensor}: ")
    )
