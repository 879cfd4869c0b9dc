"""Which cause each output's difference has, output by output; what stands where no cause is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mptune.diagnosis.causes.explained import rounding_cause, rounding_finding, structural_finding
from mptune.diagnosis.causes.half import precision_finding, resembles_rounding
from mptune.diagnosis.causes.infinite import (
    InfiniteConstants,
    are_mostly_same,
    infinite_constants,
    infinite_finding,
    lost_places,
)
from mptune.diagnosis.causes.other_model import other_attribute
from mptune.diagnosis.causes.preprocessing import other_preparation
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.across import with_an_input
from mptune.diagnosis.patterns.other_samples import Unrelated, unrelated
from mptune.diagnosis.patterns.places import how_it_goes_on, what_is_there, where_it_lies
from mptune.diagnosis.patterns.roundings import Explanation
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.diagnosis.sides import Side, Sides
from mptune.finding import Finding, Where

_LEFT_OF_ROWS = 0.5
"""Share of the difference between two sets of rows, up to which another set explains one of them."""
_OFF = 0.01
"""A value is off by more of its output's standard deviation than this."""
_FEW_OFF = 0.5
"""Share of the values that changed decisions make wrong at most."""
_WORTH_TRYING = 0.1
"""Of FP16's error, above which a difference within its limit that no rounding reproduces is looked into."""
_AS_LARGE = 0.5
"""Of FP16's error: what is as large as that."""


class Causes:
    """Sorts outputs by what makes their differences. Each is taken once; then findings, then places."""

    def __init__(self, sides: Sides, *, are_other_models: bool) -> None:
        """Begin with no output.

        Args:
            sides: of the comparison.
            are_other_models: whether two models differ in more than precision, or one draws random numbers: no rounding
                is made out behind that.
        """
        self._sides = sides
        self._are_other_models = are_other_models
        self._found: list[Finding] = []
        self._precision: dict[str, tuple[Side, Explanation]] = {}
        self._infinite: dict[str, tuple[Side, InfiniteConstants]] = {}
        self._alike: list[Side] = []
        self._doubtful: dict[str, tuple[Side, Finding]] = {}
        self._unexplained: list[Side] = []

    def take(self, side: Side) -> None:
        """Sort an output in."""
        found = structural_finding(side)
        if found is None:
            cause = rounding_cause(side)
            found = rounding_finding(side, cause)
            if found is None:
                if not self._has_cause(side, cause) and not self._are_other_models and not side.is_within:
                    self._unexplained.append(side)
                return
            if self._are_other_models and found.code == "agrees" and side.error > FP32_ROUNDING:
                return  # what the models differ in makes it, not a rounding
            if cause is None and found.code == "agrees" and not self._are_other_models and _is_worth_trying(side):
                self._doubtful[side.name] = side, found
                return
        self._found.append(found)

    def _has_cause(self, side: Side, cause: Explanation | None) -> bool:
        """Whether a precision, or constants that it does not hold, make an output's difference; notes which."""
        cause = None if self._are_other_models else cause or _fp16_takes_rows(side)
        if cause is None and _fp16_overflows(side):
            cause = Explanation("fp16", 0.0, 1.0)
        if cause is not None:
            self._precision[side.name] = (side, cause)
        elif (constants := infinite_constants(side)) is not None:
            self._infinite[side.name] = (side, constants)
        elif not self._are_other_models and _is_as_far_off_as_fp16(side):
            self._alike.append(side)
        else:
            return False
        return True

    def findings(self) -> list[Finding]:
        """One for each cause. What could be FP16 by its size alone is, where nothing else is found."""
        self._look_at_preparation()
        self._look_at_samples()
        for side in self._alike:
            if what_is_there(side.got, side.wanted):
                self._unexplained.append(side)
            else:
                self._precision[side.name] = (side, Explanation("fp16", 1.0, side.judged_fp16 / side.judged))
        self._alike.clear()
        found = list(self._found)
        if self._infinite:
            constants = {name: constants for name, (_, constants) in self._infinite.items()}
            found.append(infinite_finding(constants, [side for side, _ in self._infinite.values()]))
        if self._precision:
            causes = {name: cause for name, (_, cause) in self._precision.items()}
            found.append(precision_finding([side for side, _ in self._precision.values()], causes))
        return found

    def _look_at_preparation(self) -> None:
        """Whether samples prepared in another way, or another attribute, explain all that has no cause yet."""
        sides = [*self._unexplained, *self._alike]
        has_cause = self._precision or self._infinite or any(each.severity != "info" for each in self._found)
        if not sides and not has_cause:
            self._look_at_doubtful()
            return
        self._found += (agreeing for _, agreeing in self._doubtful.values())
        if not sides or self._sides.origin not in ("recorded", "engine"):
            return
        is_plain = all(what_is_there(side.got, side.wanted) for side in sides)
        found, is_whole = self._otherwise(sides, is_quick=is_plain)
        self._found += found
        if is_whole:
            self._unexplained.clear()
            self._alike.clear()

    def _otherwise(self, sides: Sequence[Side], *, is_quick: bool) -> tuple[Sequence[Finding], bool]:
        """What of the samples or of the model is otherwise where outputs were recorded; whether that explains all."""
        prepared = other_preparation(self._sides, sides, is_quick=True)
        attribute = None if prepared.explains_all else other_attribute(self._sides, sides)
        if not prepared.explains_all and not is_quick and (attribute is None or not _is_exact(attribute)):
            prepared = other_preparation(self._sides, sides)
        if attribute is not None and _is_nearer(attribute, prepared.findings):
            return [attribute], True
        return prepared.findings, bool(prepared.findings) and prepared.is_whole

    def _look_at_doubtful(self) -> None:
        """Whether outputs within their limits, whose differences no rounding reproduces, have another cause."""
        if not self._doubtful:
            return
        causes, _ = self._otherwise([side for side, _ in self._doubtful.values()], is_quick=False)
        self._found += [cause for cause in causes if _is_exact(cause)] or [
            _as_large_as_fp16(side, agreeing) if _is_no_rounding(side) else agreeing
            for side, agreeing in self._doubtful.values()
        ]

    def _look_at_samples(self) -> None:
        """Whether outputs that nothing explains have nothing to do with their reference, as of other inputs."""
        if self._sides.origin != "recorded":
            return
        sides = [side for side in self._unexplained if not _has_the_size_of_fp16(side)]
        found = {side.name: of for side in sides if (of := _unrelated(side)) is not None and not _places(side)}
        if found:
            self._found.append(_other_samples([side for side in sides if side.name in found], found))
            self._unexplained = [side for side in self._unexplained if side.name not in found]

    def places(self) -> list[str]:
        """Where the differences without a known cause lie, and what is there; a line for each such output."""
        lines = []
        for side in self._unexplained:
            said = _places(side)
            said += [_of_the_size_of_fp16(side)] if _has_the_size_of_fp16(side) else []
            lines.append(f"output {side.name!r}: {'; '.join(said) or self._nothing_known()}")
        return lines

    def _nothing_known(self) -> str:
        tried = "no known cause explains its difference: none of the roundings, stale rows, orders, functions"
        if self._sides.origin != "recorded":
            return f"{tried} and places tried gives it"
        return (
            f"{tried}, inputs and attributes tried gives it; with the model that the engine was built of as CANDIDATE,"
            " --trace names the first node that differs"
        )


def _is_exact(found: Finding) -> bool:
    """Whether an explanation leaves no more than rounding does."""
    return float(found.evidence["left_share"]) <= float(found.evidence["rounding_share"])


def _is_nearer(attribute: Finding, prepared: Sequence[Finding]) -> bool:
    """Whether another attribute leaves less than all ways to prepare the samples that were found."""
    return all(float(attribute.evidence["left_share"]) < float(one.evidence["left_share"]) for one in prepared)


def _places(side: Side) -> list[str]:
    """Where an output's difference lies, what is there, and how it goes on along the samples, where that is plain."""
    said = [place for look in (where_it_lies, what_is_there) if (place := look(side.got, side.wanted))]
    if len(said) < 2 and (beside := _with_an_input(side)):
        said = [beside]
    return [*said, *filter(None, [how_it_goes_on(side.got, side.wanted)])]


def _with_an_input(side: Side) -> str:
    stacked = _stacked(side)
    if stacked is None:
        return ""
    samples = side.sides.runner.samples
    inputs = {
        name: np.stack([np.asarray(sample[name], np.float64) for sample in samples])
        for name, first in samples[0].items()
        if first.dtype.kind == "f" and all(sample[name].shape == first.shape for sample in samples)
    }
    return with_an_input(*stacked, inputs)


def _stacked(side: Side) -> tuple[np.ndarray, np.ndarray] | None:
    """Both sides, (samples, ...), float64; None where shapes differ or values are no finite numbers."""
    if any(a.dtype.kind not in "fiu" for each in (side.got, side.wanted) for a in each):
        return None
    if len({a.shape for each in (side.got, side.wanted) for a in each}) != 1:
        return None
    got, wanted = (np.stack([np.asarray(a, np.float64) for a in each]) for each in (side.got, side.wanted))
    return (got, wanted) if np.isfinite(got).all() and np.isfinite(wanted).all() else None


def _unrelated(side: Side) -> Unrelated | None:
    stacked = _stacked(side)
    return None if stacked is None else unrelated(*stacked)


def _other_samples(sides: Sequence[Side], found: Mapping[str, Unrelated]) -> Finding:
    """Of outputs that have nothing to do with their reference."""
    worst = max(sides, key=lambda side: abs(found[side.name].correlation))
    of = found[worst.name]
    names = ", ".join(repr(side.name) for side in sides[:4]) + (", ..." if len(sides) > 4 else "")
    text = (
        f"output{'s' * (len(sides) > 1)} {names}: a sample has nothing to do with its reference (correlation"
        f" {of.correlation:.2f}, chance gives {of.chance:.2f} either way)"
    )
    if all(each.is_alike for each in found.values()):
        text += ", but mean and spread over the samples are the reference's: outputs of the same model on other inputs"
        text += " look like that"
    else:
        text += ", and mean or spread over the samples are others, too: another model, or other inputs, give that"
    return Finding(
        "data-do-not-fit",
        "warning",
        "compare",
        Where(outputs=tuple(side.where for side in sides)),
        {"correlation": of.correlation, "correlation_by_chance": of.chance, "samples": len(worst.wanted)},
        text,
        "record the outputs of the samples in --data, in their order, from one export of the model",
    )


def _fp16_overflows(side: Side) -> bool:
    """Whether the output and the all-FP16 emulation have values that are not finite at mostly the same places."""
    lost = lost_places(side, side.sides.candidate)
    return lost is not None and are_mostly_same(lost, lost_places(side, side.sides.runner.emulated(side.sides.plan)))


def _has_the_size_of_fp16(side: Side) -> bool:
    """Whether FP16 throughout gives as large an error beyond the limit, in other values."""
    return 0 < side.judged <= HEADROOM * side.judged_fp16 and math.isfinite(side.judged_fp16)


def _of_the_size_of_fp16(side: Side) -> str:
    return (
        f"FP16 throughout, emulated, gives an error of that size, too ({side.judged_fp16:.3g}), in other values, so"
        " whether FP16 makes the difference is not shown; `mptune inspect MODEL --data PATH` names what FP16 breaks"
    )


def _is_as_far_off_as_fp16(side: Side) -> bool:
    """Whether the error has the size that it has in FP16 throughout, and as few values are off: decisions do that.

    Where decisions change, most values stay right, in the candidate as in FP16. What a deployment does otherwise, such
    as to its inputs, moves all of them.
    """
    if not _has_the_size_of_fp16(side):
        return False
    try:
        got = side.rows(side.sides.candidate)
        emulated = side.rows(side.sides.runner.emulated(side.sides.runner.all_fp16))
        wanted = side.rows(side.sides.reference)
    except ValueError:
        return False
    if not got.shape == emulated.shape == wanted.shape or not wanted.size:
        return False
    exact = wanted.astype(np.float64)
    most = _OFF * float(np.std(exact[np.isfinite(exact)])) if np.isfinite(exact).any() else 0.0
    ours, fp16 = (float(np.mean(~(np.abs(each - exact) <= most))) for each in (got, emulated))
    return 0 < fp16 <= _FEW_OFF and ours <= HEADROOM * fp16


def _is_worth_trying(side: Side) -> bool:
    """Whether a difference within the limit, which no rounding reproduces, may be another's than a rounding's."""
    sides = side.sides
    is_known = sides.origin not in ("recorded", "engine") or sides.has_row_set(side.name)
    return not is_known and side.error > max(FP32_ROUNDING, _WORTH_TRYING * side.emulated)


def _is_no_rounding(side: Side) -> bool:
    """Whether a difference of the size of FP16's has nothing of a rounding. Decisions fall otherwise in each engine."""
    has_size = _AS_LARGE * side.emulated <= side.error <= HEADROOM * side.emulated
    if not has_size or any(array.dtype.kind != "f" for array in side.wanted):
        return False
    return not resembles_rounding(side) and not resembles_rounding(side, of_groups=True)


def _as_large_as_fp16(side: Side, agreeing: Finding) -> Finding:
    what = what_is_there(side.got, side.wanted)
    text = (
        f"output {str(side.where)!r} has {side.limit.sentence(side.judged)}: as large as FP16 rounding, but not FP16"
        f" rounding (FP16 throughout, emulated, gives {side.judged_fp16:.3g}, in other values){what and f'; {what}'}"
    )
    cure = "compare how the samples are prepared on both sides, and whether the engine was built of this model"
    return replace(agreeing, severity="warning", text=text, cure=cure)


def _fp16_takes_rows(side: Side) -> Explanation | None:
    """FP16, where an output is compared as a set of rows and the emulation has nearly the candidate's rows."""
    sides = side.sides
    if not sides.has_row_set(side.name) or not 0 < side.error < math.inf:
        return None
    left = sides.worst(side.name, sides.candidate, sides.runner.emulated(sides.plan)).error / side.error
    return Explanation("fp16", left, 1.0) if left <= _LEFT_OF_ROWS else None
