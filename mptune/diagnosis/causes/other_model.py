"""Whether recorded outputs are those of the model with an attribute otherwise (``model_changes``): an engine's, say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx

from mptune.diagnosis.causes.left import MOST_SAMPLES, WORTH_MORE, Left, left_of, left_text, most_different
from mptune.diagnosis.causes.model_changes import ModelChange, model_changes
from mptune.diagnosis.patterns.scaled import CLEAR
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.files import write_bytes
from mptune.finding import Finding, Where

_MOST_CHANGES = 32
"""Each is a session of ONNX Runtime."""


def other_attribute(sides: Sides, unexplained: Sequence[Side]) -> Finding | None:
    """The attribute with which the model gives what was recorded; None where there is none.

    Args:
        sides: of the comparison; the right one is recorded.
        unexplained: the outputs that no other cause explains.
    """
    worst = most_different(unexplained)
    if not worst:
        return None
    model = onnx.load(sides.runner.widened, load_external_data=False)
    best, least = None, Left(math.inf, 1.0, 0)
    for number, change in enumerate(model_changes(model)):
        if number >= _MOST_CHANGES:
            break
        if _left(sides, unexplained, change, number, worst[:1]).share > WORTH_MORE:
            continue
        left = _left(sides, unexplained, change, number, worst[:MOST_SAMPLES])
        if left.share < least.share:
            best, least = change, left
    if best is None or least.share > CLEAR:
        return None
    groups = {owner for node in best.nodes if (owner := sides.runner.grouped.owners.get(node))}
    on = left_text(least.share, least.count)
    text = (
        f"the model gives what was recorded {best.words} ({on}): that operator is computed in another way there;"
        " precision is not the problem"
    )
    if not least.is_exact:
        text = (
            f"the model comes near to what was recorded {best.words} ({on}; rounding would leave"
            f" {100 * least.rounding:.2g} %): that operator may be computed in such a way there"
        )
    return Finding(
        "attribute-differs",
        "warning",
        "compare",
        Where(nodes=best.nodes, groups=tuple(sorted(groups)), outputs=tuple(side.where for side in unexplained)),
        {
            "kind": "attribute",
            "what": best.attribute,
            "left_share": least.share,
            "rounding_share": least.rounding,
            "samples": least.count,
        },
        text,
        "export or build that model again with this operator as in training, or from the same source",
    )


def _left(sides: Sides, unexplained: Sequence[Side], change: ModelChange, number: int, samples: Sequence[int]) -> Left:
    """What a change leaves of these samples' difference; infinite where the model does not run with it."""
    name = f"changed-{number}"
    path = sides.runner.scratch(name)
    write_bytes(path, [change.model.SerializeToString(deterministic=True)])
    try:
        outputs = sides.runner.on(name, [sides.runner.samples[k] for k in samples], path)
    except BaselineError:
        return Left(math.inf, 1.0, len(samples))
    finally:
        path.unlink(missing_ok=True)
    return left_of(unexplained, samples, outputs)
