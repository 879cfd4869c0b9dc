"""What two models differ in, as a finding, and the candidate's precisions as a plan of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.pairs.alignment import Alignment, Difference, align
from mptune.diagnosis.pairs.constants import CONVERTERS_LIMIT
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.finding import Finding, OutputColumns
from mptune.graph.plan import Precision

NO_EFFECT = 1e-6
"""An error up to this shows no effect of a difference: it is what another order of FP32 additions makes."""

_OF_ROUNDING = 0.01
"""Nor does one up to this share of FP16's own error, where the candidate is FP16 or BF16: 1e-4 of the squares."""

_MOST_TRIED = 8
"""Constants that are tried one by one, of those that change the outputs together."""

_UNLIMITED = (
    f"convert again without this limit (onnxconverter-common's float16 conversion takes {CONVERTERS_LIMIT:.0f} unless"
    " max_finite_val is given; FP16 holds up to 65504), or keep this node in FP32 there (node_block_list)"
)


def alignment_of(left: Runner, right: Runner) -> Alignment:
    """Align two models; inputs by name, else by position."""
    ours, theirs = [i.name for i in left.model.inputs], [i.name for i in right.model.inputs]
    inputs = {name: name for name in theirs} if set(theirs) <= set(ours) else dict(zip(ours, theirs, strict=True))
    return align(left.model, right.model, inputs)


def with_candidate_plan(sides: Sides, alignment: Alignment) -> Sides:
    """The sides with the groups that the candidate computes in FP16 or BF16, where there are some."""
    owners = sides.runner.grouped.owners
    groups = {owners[node]: precision for node, precision in alignment.reduced.items() if node in owners}
    return replace(sides, plan=sides.runner.grouped.uniform(Precision.FP32).replace(groups))


def structure_finding(sides: Sides, alignment: Alignment) -> Finding | None:
    """The first node whose difference changes an output, and by how much; None where none does."""
    outputs = [sides.output(name) for name in sides.layouts]
    changed = [side for side in outputs if side.error > NO_EFFECT]
    differences = _with_effect(sides, alignment) if changed else ()
    if not differences:
        return None
    first = differences[0]
    worst = max(changed, key=lambda side: side.judged / side.limit.value)
    group = sides.runner.grouped.owners.get(first.node)
    more = len(differences) - 1
    others = f"; {more} more node{'s' * (more != 1)} differ{'s' * (more == 1)}" if more else ""
    limit = None if first.constant is None else first.constant.limit
    alone = max((side.error for side in _alone(sides, [first])), default=None) if _values([first]) else None
    effect = "" if alone is None else f" (alone, in FP32, it makes an error of {alone:.3g})"
    return finding(
        "attribute-differs",
        tuple(OutputColumns(side.name) for side in changed),
        {
            "kind": first.kind,
            "what": first.what,
            "reference": first.left,
            "candidate": first.right,
            "differences": len(differences),
            **({} if limit is None else {"limited_to": limit}),
            **({} if alone is None else {"alone": alone}),
            **worst.evidence,
        },
        f"node {first.node}: {first.text}{effect}{others}; output {str(worst.where)!r} then has"
        f" {worst.limit.sentence(worst.judged)} (FP16 throughout gives {worst.judged_fp16:.3g})",
        "export both from the same source, or give this node the same value in both" if limit is None else _UNLIMITED,
        nodes=(first.node,),
        groups=(group,) if group else (),
    )


def _with_effect(sides: Sides, alignment: Alignment) -> tuple[Difference, ...]:
    """Those that change an output: constants are tried in the model in FP32, all else is taken to change one.

    What a constant does is not seen from the outputs of a candidate in FP16, which differ anyway.
    """
    differences = alignment.differences
    constants = [one for one in differences if _values([one])]
    share = _OF_ROUNDING if alignment.reduced else 0.0

    def change(some: Sequence[Difference]) -> bool:
        found = _alone(sides, some)
        return not found or any(side.error > max(NO_EFFECT, share * side.emulated) for side in found)

    if not constants:
        return differences
    without = constants
    if change(constants):
        without = [one for one in constants[:_MOST_TRIED] if len(constants) > 1 and not change([one])]
    return tuple(one for one in differences if one not in without)


def _alone(sides: Sides, differences: Sequence[Difference]) -> list[Side]:
    """Every output of the model in FP32 with constants of the candidate, against its own; none where that fails."""
    try:
        changed = sides.runner.with_constants(_values(differences))
    except (BaselineError, KeyError):
        return []
    return [sides.worst(name, changed, sides.runner.exact) for name in sides.layouts]


def _values(differences: Sequence[Difference]) -> dict[str, np.ndarray]:
    """Constants of the model -> their values with what differs as in the candidate."""
    found = {one.root: one.constant.values for one in differences if one.constant is not None}
    return {name: values for name, values in found.items() if values is not None}
