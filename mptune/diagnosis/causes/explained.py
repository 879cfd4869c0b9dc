"""How a finding of a comparison is made."""

from __future__ import annotations

from mptune.finding import CODES, Finding, OutputColumns, Where


def finding(
    code: str,
    outputs: tuple[OutputColumns, ...],
    evidence: dict[str, int | float | str],
    text: str,
    cure: str,
    *,
    samples: tuple[int, ...] = (),
    nodes: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    tensors: tuple[str, ...] = (),
) -> Finding:
    """A finding of a comparison, with its code's severity."""
    where = Where(nodes=nodes, groups=groups, tensors=tensors, outputs=outputs, samples=samples)
    return Finding(code, CODES[code].severity, "compare", where, evidence, text, cure)
