"""State inputs that a deployment fed from its own outputs: what it recorded of the sample before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.causes.feeds.change import Feed, FeedChange, inputs_text
from mptune.diagnosis.sides import Sides
from mptune.graph.hazards.interface import state_pairs

_NAMED = 4
_FED_BACK = (
    "its state went on from what it had given itself, so that an earlier difference goes on, too",
    "see what differs in the first sample of the sequence; give the state as the samples have it for a comparison of"
    " single steps",
)


@dataclass(frozen=True)
class FedBack:
    """The samples with recorded outputs in the state inputs that they belong to.

    Attributes:
        inputs: names of the state inputs.
        feeds: of each sample; the first one as it is.
        words: what they hold, after what is done to them.
    """

    inputs: tuple[str, ...]
    feeds: tuple[Feed, ...]
    words: str


def fed_back(sides: Sides, feeds: Sequence[Feed]) -> FedBack | None:
    """The recorded outputs of the sample before in the state inputs; None where the model has none that fit.

    Args:
        sides: of the comparison; the right one is recorded.
        feeds: the samples, in their order.
    """
    pairs = [(out, given) for out, given in state_pairs(sides.runner.model) if out in sides.layouts]
    changed = [dict(feed) for feed in feeds]
    for out, given in pairs:
        for k in range(1, len(feeds)):
            before = np.asarray(sides.candidate[k - 1][out])
            if before.shape != feeds[k][given].shape or not np.isfinite(before).all():
                return None
            changed[k][given] = before.astype(feeds[k][given].dtype)
    if not pairs:
        return None
    which = ", ".join(f"{out!r}" for out, _ in pairs[:_NAMED])
    return FedBack(
        tuple(given for _, given in pairs), tuple(changed), f", with its own {which} of the sample before there"
    )


def fed_back_changes(sides: Sides, feeds: Sequence[Feed]) -> Iterator[FeedChange]:
    """That as a way to feed the samples.

    Args:
        sides: of the comparison; the right one is recorded.
        feeds: the samples, in their order.
    """
    own = fed_back(sides, feeds)
    if own is not None:
        given = own.feeds
        yield FeedChange(
            f"for {inputs_text(own.inputs)}{own.words}",
            own.inputs,
            lambda k: given[k] if k else None,
            *_FED_BACK,
            clear=0.0,
        )
