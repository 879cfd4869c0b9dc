"""Groups that compute the same with other weights, and sequences of groups that repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mptune.graph.loading.model import Model, Node

_NAMES_ONLY = frozenset({"Identity", "Dropout"})
"""Give a value another name: exporters put one before a weight that layers share, in all of them but the first."""

_SMALL = 64
"""Integer constants up to this many elements are part of the structure: axes, shapes, indices."""
_MAX_PERIOD = 96


def structural_hash(model: Model, nodes: Sequence[Node]) -> str:
    """16 hexadecimal digits that are equal for groups of the same operators, attributes, wiring and weight shapes.

    Names, weights and the order in which independent nodes stand do not count.
    """
    made: dict[str, str] = {}
    digests = []
    for node in nodes:
        if node.op_type in _NAMES_ONLY and node.is_standard:
            made[node.outputs[0]] = made.get(node.inputs[0]) or _source_text(model, node.inputs[0])
            continue
        seen: dict[str, int] = {}
        parts = [node.domain, node.op_type, *sorted(_attribute_text(a) for a in node.proto.attribute)]
        for name in node.inputs:
            parts.append(f"{seen.setdefault(name, len(seen))}:{made.get(name) or _source_text(model, name)}")
        digest = _digest(parts)
        digests.append(digest)
        made.update((out, f"{digest}.{slot}") for slot, out in enumerate(node.outputs) if out)
    return _digest(sorted(digests))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _attribute_text(attribute: object) -> str:
    return attribute.SerializeToString(deterministic=True).hex()  # type: ignore[attr-defined, no-any-return]


def _source_text(model: Model, name: str) -> str:
    """What a value from outside the group is: nothing, a constant of some shape, or a computed value."""
    if not name:
        return "none"
    while name in model.producer and name not in model.initializers:
        maker = model.nodes[model.producer[name]]
        if maker.op_type not in _NAMES_ONLY:
            break
        name = maker.inputs[0]
    constant = model.initializers.get(name)
    if constant is None:
        return f"value {model.info(name).dtype}"
    text = f"constant {constant.dtype} {constant.shape}"
    if constant.dtype in ("int64", "int32", "bool") and constant.nbytes <= 8 * _SMALL:
        text += f" {constant.numpy().reshape(-1).tolist()}"
    return text


def find_runs(patterns: Sequence[str]) -> list[tuple[int, int]]:
    """Blocks in a sequence of groups without names: (start, length) of every turn of a run that repeats.

    A run is at least two equal turns of two or more groups, the longest cover first; a last turn that differs in
    its final group only (the network's output is cut from it) belongs to the run.
    """
    turns_found: list[tuple[int, int]] = []
    alike = [1] * len(patterns)  # how many equal groups begin here
    for at in range(len(patterns) - 2, -1, -1):
        alike[at] += alike[at + 1] if patterns[at] == patterns[at + 1] else 0
    start = 0
    while start < len(patterns) - 3:
        turns, period = (1, 1) if alike[start] > _MAX_PERIOD else _best_run(patterns, start)
        if turns < 2:
            start += 1
            continue
        following = patterns[start + turns * period : start + (turns + 1) * period]
        if len(following) == period and list(following[:-1]) == list(patterns[start : start + period - 1]):
            turns += 1
        turns_found += [(start + turn * period, period) for turn in range(turns)]
        start += turns * period
    return turns_found


def _best_run(patterns: Sequence[str], start: int) -> tuple[int, int]:
    """The number of turns and the period of the run from ``start`` that covers most; of equals, the shortest period."""
    best = (1, 1)
    for period in range(2, min(_MAX_PERIOD, (len(patterns) - start) // 2) + 1):
        matched = 0
        while start + period + matched < len(patterns) and (
            patterns[start + matched] == patterns[start + period + matched]
        ):
            matched += 1
        turns = 1 + matched // period
        if turns > 1 and turns * period > best[0] * best[1] and len(set(patterns[start : start + period])) > 1:
            best = (turns, period)
    return best
