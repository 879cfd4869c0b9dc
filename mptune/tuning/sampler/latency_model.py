"""Posterior of latency: the additive law's terms, from a roofline and from profiles, conditioned on what was timed.

Which of them is to be trusted, how far, and by how much the law itself may miss, is not assumed: of a few widths and
noises the most probable given the evaluations are taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.boundaries import Boundary, Crossings
from mptune.tuning.sampler.layer_profiles import Profiles
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import BuiltPlans, LinearGaussian, Prior

_GAIN_WIDTHS = (0.1, 0.3, 0.6, 1.2)

_ROOFLINE_WIDTH, _PROFILE_WIDTH = 0.6, 0.3
"""Of these, by what a roofline's gains are taken to miss where they are weighed against profiled ones, and by what the
two together."""

_SHARED = (0.0, 0.9)
"""Shares of the prior's variance that groups of one kind have in common: a roofline misses repeated blocks alike."""

_ROUNDS = 4
_ODD = 5.0
"""Standard deviations by which a latency misses what all others say of it before it is believed less."""

_LAW_NOISES = (3e-4, 2e-3, 6e-3, 1.2e-2)
"""Shares of the base latency by which the additive law may miss: 2e-3 was measured on an H200, tactics make it more."""


@dataclass(frozen=True)
class _Terms:
    """What is known of the law's terms before anything is conditioned on: gains, costs and the fixed gain.

    Attributes:
        mean: in ms.
        unit: what widths are shares of, in ms.
        profiles: tell what the law leaves out; None where nothing was profiled or nothing of it is believed.
        scale: what a profiled millisecond is worth.
    """

    mean: Floats
    unit: Floats
    profiles: Profiles | None = None
    scale: float = 1.0

    def neighbours_ms(self, halves: Bools, crossed: Bools) -> Floats:
        """What the plans take longer than by the law, in ms; the arguments are those of ``Profiles``."""
        if self.profiles is None:
            return np.zeros(halves.shape[1])
        return self.scale * self.profiles.neighbours_ms(halves, crossed)


class LatencyModel:
    """Posterior of ``latency saved against all-FP32 = gains - boundary costs``, in milliseconds."""

    def __init__(self, prior: Prior, seen: BuiltPlans) -> None:
        """Condition the prior on what has been timed, and profiled."""
        self._prior = prior
        self._groups = len(prior.groups)
        self._crossings = Crossings(prior.boundaries)
        self.base_ms, self._base_sd_ms = seen.base_ms, seen.base_sd_ms
        timed = np.isfinite(seen.latency_ms)
        if not prior.fixed_gain_ms:
            timed &= seen.plans.any(axis=1)  # The baseline itself says nothing about what is saved against it.
        noise_ms = seen.latency_sd_ms[timed]
        halves, crossed = self._sides(seen.plans[timed])
        rows = self._columns(halves, crossed).T.astype(float)
        saved = seen.base_ms - seen.latency_ms[timed]
        self._alike = _alike(prior)
        terms = self._scaled(rows, saved)
        known = [terms]
        if seen.group_ms is not None and not prior.exact:
            known += self._refined(terms, Profiles(prior.boundaries, seen.plans, seen.group_ms), rows, saved)
        told = [saved + each.neighbours_ms(halves, crossed) for each in known]
        odd, believed_ms = np.zeros(len(rows), dtype=bool), noise_ms
        for _ in range(_ROUNDS):
            self._evidence = -math.inf
            for each, values in zip(known, told, strict=True):
                self._fit(each, rows, values, believed_ms)
            if prior.exact or not len(rows):
                break
            miss_ms, known_ms = self._model.leave_one_out(self._values)
            sd_ms = np.sqrt(known_ms**2 + noise_ms**2 + max(self.noise_ms, _LAW_NOISES[1] * self.base_ms) ** 2)
            before, odd = odd, np.abs(miss_ms) > _ODD * sd_ms
            if (odd == before).all():
                break
            # Engines are not always what their plans say, and machines not always what they were: odd ones say little.
            believed_ms = np.where(odd, np.maximum(noise_ms, np.abs(miss_ms)), noise_ms)

    def _fit(self, terms: _Terms, rows: Floats, saved: Floats, noise_ms: Floats) -> None:
        """Condition these terms on what the plans saved; kept where that is more probable than what was kept before."""
        spread = self._alike * terms.unit[:, None]
        rows = np.hstack([rows, rows @ spread])
        mean = np.append(terms.mean, np.zeros(spread.shape[1]))
        tried = product(_GAIN_WIDTHS, _SHARED if spread.any() else _SHARED[:1], _LAW_NOISES)
        for width, shared, law in [(1e-4, 0.0, 1e-6)] if self._prior.exact else tried:
            own, common = width * math.sqrt(1.0 - shared), width * math.sqrt(shared) + 1e-9
            sd = np.append(own * terms.unit, np.full(spread.shape[1], common))
            # All savings are told against one timing of the baseline, and share its miss.
            sd[len(terms.unit) - 1] = math.hypot(width * terms.unit[-1], self._base_sd_ms)
            model = LinearGaussian(mean, sd)
            # Widths and noises are a little apart in probability before anything is seen.
            evidence = -0.5 * math.log(width / 0.5) ** 2
            if len(rows):
                evidence += model.update(rows, saved, np.hypot(noise_ms, law * self.base_ms))
            if evidence > self._evidence:
                self._evidence, self._model, self._values = evidence, model, saved
                self._known, self._spread = terms, spread
                self.noise_ms = float(law * self.base_ms)

    def _refined(self, terms: _Terms, profiles: Profiles, rows: Floats, saved: Floats) -> list[_Terms]:
        """The gains weighed against profiled ones, by what each may miss; none where the two contradict each other."""
        known = np.isfinite(profiles.gains_ms)
        gains, sd = (np.where(known, figures, 0.0) for figures in (profiles.gains_ms, profiles.sd_ms))
        others = terms.mean.copy()
        others[: self._groups][known] = 0.0
        expected = rows[:, : self._groups] @ gains
        largest = int(np.argmax(expected)) if len(expected) else -1
        left = saved[largest] - rows[largest] @ others if largest >= 0 else 0.0
        if left <= 0 or expected[largest] <= 0:
            return []
        # A profiler has costs of its own: what the plan of the largest gain saved says what its milliseconds are worth.
        scale = float(left / expected[largest])
        own = (_ROOFLINE_WIDTH * terms.unit[: self._groups]) ** 2
        trust = np.where(known, own / (own + (scale * sd) ** 2), 0.0)
        mean, unit = terms.mean.copy(), terms.unit.copy()
        mean[: self._groups] += trust * (scale * gains - mean[: self._groups])
        refined = np.sqrt(own * (1.0 - trust)) / _PROFILE_WIDTH
        unit[: self._groups] = np.where(known, np.maximum(refined, 1e-9 * self.base_ms), unit[: self._groups])
        return [_Terms(mean, unit, profiles, scale)]

    def _sides(self, plans: Bools) -> tuple[Bools, Bools]:
        """Groups x plans, True is FP16, and which boundaries are crossed, boundaries x plans."""
        halves = np.ascontiguousarray(plans.T)
        return halves, self._crossings.of(halves)

    def _columns(self, halves: Bools, crossed: Bools) -> NDArray[np.float32]:
        """What each parameter counts in each plan, parameters x plans; exact: 0, 1 and -1."""
        columns = np.empty((self._groups + len(self._prior.boundaries) + 1, halves.shape[1]), dtype=np.float32)
        columns[: self._groups] = halves
        np.negative(crossed, out=columns[self._groups : -1], dtype=np.float32)
        columns[-1] = 1.0
        return columns

    def _scaled(self, rows: Floats, saved: Floats) -> _Terms:
        """The prior's terms in milliseconds of this machine: scaled by what all evaluated plans saved."""
        prior = self._prior
        known = prior.gains_ms is not None
        gains = np.array(prior.gains_ms if prior.gains_ms is not None else np.full(self._groups, 1.0))
        costs = np.maximum(np.array(prior.boundary_costs_ms, dtype=float), 0.0)
        if not known and not prior.exact:
            # Half of the base is what FP16 saves at best, when nothing else is known.
            gains = gains * 0.4 * self.base_ms / max(1, self._groups)
            costs = np.full(len(costs), 0.1 * _mean(gains))
        mean = np.concatenate([gains, costs, [prior.fixed_gain_ms]])
        if not prior.exact:
            expected = rows @ mean
            largest = int(np.argmax(np.abs(expected))) if len(expected) else -1
            if largest >= 0 and expected[largest] > 0 and saved[largest] > 0:
                mean *= float(saved[largest] / expected[largest])
            elif len(saved) and np.abs(gains).sum() > 0.9 * self.base_ms:
                mean *= float(0.5 * self.base_ms / np.abs(gains).sum())
        gains, costs = mean[: self._groups], mean[self._groups : -1]
        # A group that seems to gain nothing may still gain something.
        typical = np.concatenate([np.full(len(gains), _mean(np.abs(gains))), np.full(len(costs), _mean(costs)), [0.0]])
        return _Terms(mean, np.maximum(np.abs(mean) + 0.25 * typical, 1e-9 * self.base_ms))

    def mean(self) -> Floats:
        """Gains, costs (>= 0) and the fixed gain."""
        mean: Floats = self._terms(self._model.posterior_mean[None])[0]
        return mean

    def base(self, parameters: Floats) -> Floats:
        """What all-FP32 truly takes under each draw, in ms: its one timing missed that by part of the fixed gain."""
        last = len(self._spread) - 1
        share = (self._base_sd_ms / self._model.sd[last]) ** 2
        base: Floats = self.base_ms - share * (parameters[:, -1] - self._model.mean[last])
        return base

    def sample(self, generator: np.random.Generator, count: int) -> Floats:
        """Draws of the same, count x parameters."""
        drawn: Floats = self._terms(self._model.sample(generator, count))
        return drawn

    def _terms(self, parameters: Floats) -> Floats:
        """The terms with what groups of one kind miss alike; costs are clipped at 0."""
        terms: Floats = parameters[:, : len(self._spread)] + parameters[:, len(self._spread) :] @ self._spread.T
        terms[:, self._groups : -1] = np.maximum(terms[:, self._groups : -1], 0.0)
        return terms

    def predict(self, plans: Bools, parameters: Floats) -> Floats:
        """Latency in ms, draws x plans."""
        halves, crossed = self._sides(plans)
        saved = parameters.astype(np.float32) @ self._columns(halves, crossed)
        latency: Floats = self.base_ms + self._known.neighbours_ms(halves, crossed) - saved.astype(float)
        return latency


def _alike(prior: Prior) -> Floats:
    """How much of what is missed alike each term has of each kind, terms x kinds: squares of a row add up to 1 or 0."""
    known = prior.kinds and not prior.exact  # what is exact misses nothing
    terms = [*prior.kinds, *(_kinds_of(boundary, prior.kinds) for boundary in prior.boundaries), ()] if known else []
    columns = {kind: k for k, kind in enumerate(k for k, n in Counter(k for t in terms for k in t).items() if n > 1)}
    found = np.zeros((len(prior.groups) + len(prior.boundaries) + 1, len(columns)))
    for row, kinds in zip(found, terms, strict=False):
        row[[columns[kind] for kind in kinds if kind in columns]] = 1.0
    found /= np.sqrt(np.maximum(found.sum(axis=1, keepdims=True), 1.0))
    return found


def _kinds_of(boundary: Boundary, kinds: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What a boundary is: one of all, and one between groups of such kinds."""
    ends = " ".join("/".join(kinds[member]) for member in boundary.members)
    return "boundary", f"boundary {ends} {boundary.fp32} {boundary.fp16}"


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
