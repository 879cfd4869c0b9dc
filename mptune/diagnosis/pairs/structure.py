"""What two models differ in, as a finding, and the candidate's precisions as a plan of the model."""

from __future__ import annotations

from dataclasses import replace

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.pairs.alignment import Alignment, align
from mptune.diagnosis.runner import Runner
from mptune.diagnosis.sides import Sides
from mptune.finding import Finding, OutputColumns
from mptune.graph.plan import Precision

NO_EFFECT = 1e-6
"""An error up to this shows no effect of a difference: it is what another order of FP32 additions makes."""


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
    """The first node that differs, and what it does to the outputs; None where it changes none of them."""
    if not alignment.differences:
        return None
    outputs = [sides.output(name) for name in sides.layouts]
    changed = [side for side in outputs if side.error > NO_EFFECT]
    if not changed:
        return None
    first = alignment.differences[0]
    worst = max(changed, key=lambda side: side.judged / side.limit.value)
    group = sides.runner.grouped.owners.get(first.node)
    more = len(alignment.differences) - 1
    others = f"; {more} more node{'s' * (more != 1)} differ{'s' * (more == 1)}" if more else ""
    return finding(
        "attribute-differs",
        tuple(OutputColumns(side.name) for side in changed),
        {
            "kind": first.kind,
            "what": first.what,
            "reference": first.left,
            "candidate": first.right,
            "differences": len(alignment.differences),
            **worst.evidence,
        },
        f"node {first.node}: {first.text}{others}; output {str(worst.where)!r} then has"
        f" {worst.limit.sentence(worst.judged)} (FP16 throughout gives {worst.judged_fp16:.3g})",
        "export both from the same source, or give this node the same value in both",
        nodes=(first.node,),
        groups=(group,) if group else (),
    )
