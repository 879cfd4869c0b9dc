"""What two models differ in, as a finding, and the candidate's precisions as a plan of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.pairs.alignment import Alignment, Difference, align
from mptune.diagnosis.pairs.constants import CONVERTERS_LIMIT
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.finding import Finding, OutputColumns
from mptune.graph.plan import LARGEST, Precision

_NO_EFFECT = 1e-6
"""An error up to this shows no effect of a difference: it is what another order of FP32 additions makes."""
_LEAST_SHARE = 0.1
"""Of the whole difference, that a cause makes alone."""
_NOT_FINITE = 1.0
"""What stands for the whole where it is not finite: the standard deviation of the output."""
_MOST_SECONDS = 60.0
_MOST_NAMED = 4
_MOST_BYTES = 1 << 30
"""Of constants that are changed together: protobuf ends at 2 GiB."""
_IN_FP32 = "keep this node in FP32 there (node_block_list)"


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


def structure_finding(sides: Sides, alignment: Alignment) -> tuple[Finding | None, tuple[Difference, ...]]:
    """The nodes whose differences change an output, the largest effect first; None where none does.

    Constants and attributes are tried in the model in FP32: what they do is not seen from the outputs of a candidate in
    FP16, which differ anyway. Another structure is not tried; it makes what those and rounding leave.

    Returns:
        The finding; and the constants and attributes that were seen to make less than a tenth of the difference.
    """
    parts = [
        part
        for name in sides.layouts
        for part in sides.parts(name, sides.candidate, sides.reference)
        if part.error > _NO_EFFECT
    ]
    if not parts or not alignment.differences:
        return None, ()
    worst = max(parts, key=lambda part: part.judged / part.limit.value)
    trials = _Trials(sides, [part for part in parts if not part.is_within] or parts, alignment.differences)
    causes, together = trials.causes(), trials.together
    if causes:
        return _named(causes, parts, worst), tuple(trials.harmless)
    if together is None or (together.share < _LEAST_SHARE and worst.is_within):
        return None, tuple(trials.harmless)
    return _none_alone(len(trials.tried), together, worst), tuple(trials.harmless)


def changes_of(differences: Sequence[Difference]) -> tuple[dict[str, np.ndarray], list[tuple[str, str, Any]]]:
    """Constants and attributes of the model with the candidate's values (``mptune.graph.writing.write_changed``)."""
    constants = {one.root: one.constant.values for one in differences if one.constant is not None}
    attributes = [(one.node, name, setting) for one in differences for name, setting in one.attributes.items()]
    return {name: values for name, values in constants.items() if values is not None}, attributes


def _named(causes: Sequence[tuple[Difference, _Effect | None]], parts: Sequence[Side], worst: Side) -> Finding:
    first, effect = causes[0]
    limit = None if first.constant is None else first.constant.limit
    alone = "" if effect is None else f" (alone, in FP32, it makes an error of {effect.error:.3g})"
    others = ", ".join(f"{one.node} ({one.what if e is None else f'{e.error:.3g}'})" for one, e in causes[1:])
    owners = worst.sides.runner.grouped.owners
    nodes = tuple(dict.fromkeys(one.node for one, _ in causes))
    return finding(
        "attribute-differs",
        tuple(OutputColumns(name) for name in dict.fromkeys(part.name for part in parts)),
        {
            "kind": first.kind,
            "what": first.what,
            "reference": first.left,
            "candidate": first.right,
            "differences": len(causes),
            **({} if limit is None else {"limited_to": limit}),
            **({} if effect is None else {"alone": effect.error}),
            **worst.evidence,
        },
        f"node {first.node}: {first.text}{alone}{others and f'; next {others}'}; output {str(worst.where)!r} then has"
        f" {worst.limit.sentence(worst.judged)} (FP16 throughout gives {worst.judged_fp16:.3g})",
        _cure(first),
        nodes=nodes,
        groups=tuple(dict.fromkeys(owners[node] for node in nodes if node in owners)),
    )


def _none_alone(count: int, together: _Effect, worst: Side) -> Finding:
    """Of constants and attributes of which none alone makes a tenth of the difference."""
    nodes = f"{count} constant{'s' * (count != 1)} or attribute{'s' * (count != 1)} differ{'s' * (count == 1)}"
    few = together.share < _LEAST_SHARE
    found = finding(
        "attribute-differs",
        (worst.where,),
        {"differences": count, "together": together.error, **worst.evidence},
        f"{nodes}, and none that was tried alone makes a tenth of the difference: together, in FP32, they make an error"
        f" of {together.error:.3g}; output {str(worst.where)!r} has {worst.limit.sentence(worst.judged)}",
        "" if few else "export both from the same source",
    )
    return replace(found, severity="info") if few else found


def _cure(difference: Difference) -> str:
    constant = difference.constant
    if constant is None or constant.limit is None:
        return "export both from the same source, or give this node the same value in both"
    if constant.largest > LARGEST[Precision.FP16]:
        return (
            f"{_IN_FP32}: FP16 holds up to {LARGEST[Precision.FP16]:.0f}, this constant reaches {constant.largest:.3g}"
        )
    return (
        "convert again without this limit (onnxconverter-common's float16 conversion takes"
        f" {CONVERTERS_LIMIT:.0f} unless max_finite_val is given), or {_IN_FP32}"
    )


@dataclass(frozen=True)
class _Effect:
    """What differences make of the outputs of the model in FP32.

    Attributes:
        error: the largest of a part.
        share: the largest of a part, by the whole difference there.
    """

    error: float
    share: float


class _Trials:
    """Gives the model in FP32 the candidate's constants and attributes, many together and then fewer.

    Attributes:
        tried: one for each constant and attribute, the largest relative change first.
        harmless: those of them that were seen to make less than a tenth of the difference.
        together: what all of these make; None where there are none, or the model does not run so.
    """

    def __init__(self, sides: Sides, parts: Sequence[Side], differences: Sequence[Difference]) -> None:
        self._sides, self._parts = sides, parts
        self.harmless: list[Difference] = []
        ways: dict[str | tuple[str, str], Difference] = {}
        self._untried: list[Difference] = []
        for one in sorted(differences, key=lambda each: -each.change):
            if any(changes_of([one])):
                ways.setdefault(one.root or (one.node, one.what), one)
            else:
                self._untried.append(one)
        self.tried = list(ways.values())
        self.together = self._effect(self.tried) if self.tried else None

    def causes(self) -> list[tuple[Difference, _Effect | None]]:
        """What makes a tenth of the difference, or more, alone, the largest first; no effect where it was not tried."""
        alone = self._alone()
        found: list[tuple[Difference, _Effect | None]] = list(alone)
        if self._untried and (left := self._left([one for one, _ in alone])) >= _LEAST_SHARE:
            found.insert(0 if not alone or left > alone[0][1].share else len(alone), (self._untried[0], None))
        return found

    def _alone(self) -> list[tuple[Difference, _Effect]]:
        """Halves of what makes enough are tried again, those that make most first."""
        deadline = time.monotonic() + _MOST_SECONDS
        waiting: list[tuple[float, _Effect | None, list[Difference]]] = []

        def add(effect: _Effect | None, part: list[Difference]) -> None:
            share = math.inf if effect is None else effect.share
            if part and share >= _LEAST_SHARE:
                waiting.append((share, effect, part))
            else:
                self.harmless += part

        add(self.together, self.tried)
        found: list[tuple[Difference, _Effect]] = []
        while waiting and len(found) < _MOST_NAMED and time.monotonic() < deadline:
            waiting.sort(key=lambda each: each[0])
            _, effect, some = waiting.pop()
            half = len(some) // 2
            if half:
                for part in (some[:half], some[half:]):
                    add(self._effect(part), part)
            elif effect is None:
                self._untried.append(some[0])
            else:
                found.append((some[0], effect))
        return sorted(found, key=lambda each: -each[1].share)

    def _effect(self, differences: Sequence[Difference]) -> _Effect | None:
        outputs, exact = self._outputs(differences), self._sides.runner.exact
        if outputs is None:
            return None
        errors = [self._sides.error(part.name, part.limit.columns, outputs, exact) for part in self._parts]
        share = max(error / _whole(part) for error, part in zip(errors, self._parts, strict=True))
        return _Effect(max(errors), share if max(errors) > _NO_EFFECT else 0.0)

    def _left(self, differences: Sequence[Difference]) -> float:
        """Share of the candidate's difference that these leave; 0 where rounding makes as much."""
        runner, error = self._sides.runner, self._sides.error
        outputs, plan = self._outputs(differences) or runner.exact, self._sides.plan
        rounded = runner.emulated(plan) if plan.reduced_groups else runner.exact
        shares = [0.0]
        for part in self._parts:
            left = error(part.name, part.limit.columns, self._sides.candidate, outputs)
            rounding = HEADROOM * error(part.name, part.limit.columns, rounded, runner.exact)
            if left > max(rounding, FP32_ROUNDING):
                shares.append(left / _whole(part))
        return max(shares)

    def _outputs(self, differences: Sequence[Difference]) -> Outputs | None:
        """The model's with these as in the candidate; None where it does not run."""
        constants, attributes = changes_of(differences)
        if sum(each.nbytes for each in constants.values()) > _MOST_BYTES:
            return None
        try:
            return self._sides.runner.changed(constants, attributes)
        except (BaselineError, KeyError):
            return None


def _whole(part: Side) -> float:
    """The whole difference of a part, in which effects are measured."""
    return part.error if math.isfinite(part.error) else _NOT_FINITE
