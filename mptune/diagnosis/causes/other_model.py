"""Whether recorded outputs are those of the model with an attribute otherwise (``model_changes``): an engine's, say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx

from mptune.diagnosis.causes.model_changes import ModelChange, model_changes
from mptune.diagnosis.causes.preprocessing import (
    MOST_SAMPLES,
    WORTH_MORE,
    left_share,
    left_text,
    most_different,
)
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
    best, least = None, math.inf
    for number, change in enumerate(model_changes(model)):
        if number >= _MOST_CHANGES:
            break
        if _left(sides, unexplained, change, number, worst[:1]) > WORTH_MORE:
            continue
        share = _left(sides, unexplained, change, number, worst[:MOST_SAMPLES])
        if share < least:
            best, least = change, share
    if best is None or least > CLEAR:
        return None
    groups = {owner for node in best.nodes if (owner := sides.runner.grouped.owners.get(node))}
    count = len(worst[:MOST_SAMPLES])
    return Finding(
        "attribute-differs",
        "warning",
        "compare",
        Where(nodes=best.nodes, groups=tuple(sorted(groups)), outputs=tuple(side.where for side in unexplained)),
        {"kind": "attribute", "what": best.attribute, "left_share": least, "samples": count},
        f"the model gives what was recorded {best.words} ({left_text(least, count)}):"
        " that operator is computed in another way there; precision is not the problem",
        "export or build that model again with this operator as in training, or from the same source",
    )


def _left(sides: Sides, unexplained: Sequence[Side], change: ModelChange, number: int, samples: Sequence[int]) -> float:
    """What share of these samples' difference a change leaves; infinite where the model does not run with it."""
    name = f"changed-{number}"
    path = sides.runner.scratch(name)
    write_bytes(path, [change.model.SerializeToString(deterministic=True)])
    try:
        outputs = sides.runner.on(name, [sides.runner.samples[k] for k in samples], path)
    except BaselineError:
        return math.inf
    finally:
        path.unlink(missing_ok=True)
    return left_share(unexplained, samples, outputs)
