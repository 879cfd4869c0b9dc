"""Simulated networks of which 4, 10 or 30 % of the groups overflow in FP16, searched in two and in three precisions.

    python -m benchmarks.three_precisions --groups 40 --seeds 8 --jobs 4 --json three_precisions.json

As ``benchmarks.simulator``; BF16 takes the time of FP16, is 8 times less exact and never overflows. A search over three
precisions does as mptune: a group that emulation sees overflow is FP32 or BF16, every other one may be any; an overflow
that emulation misses is found by builds. Quality is the hypervolume after 50 builds over that of the near-exact front:
of two precisions, and of all three where any group may have any (cuts, then local search).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import optuna

from benchmarks.common import save
from benchmarks.simulator import EXACT, TIMING, WHOLE_PLAN, Truth, search
from mptune.graph.precision import Precision
from mptune.json_form import encode_float
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, dominated_area, exactness, gains
from mptune.tuning.sampler.cuts.boundaries import Boundary, End
from mptune.tuning.sampler.cuts.min_cut import CutSolver
from mptune.tuning.sampler.error_model import assumed_error
from mptune.tuning.sampler.plan_rows import Bools, Columns, Floats
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.sampler.precision import PrecisionSampler

_LESS_EXACT = 8.0
_FP16, _BF16 = 1, 2
_NAMES = ("fp32", "fp16", "bf16")
_SHARES = (0.3, 0.1, 0.04)
_COUNTS = (9, 12, 17, 24)
"""Builds after which both searches are compared, beside the whole budget."""


class ThreeTruth(Truth):
    """A simulated model whose groups may be BF16, too; rows of booleans say where a group is what it is if not FP32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduced = np.where(self.overflows & ~self.missed, _BF16, _FP16)
        self.both = np.flatnonzero(self.reduced == _FP16)

    def columns(self) -> Columns:
        """A column for what each group prefers, and behind them BF16 of those that may be both."""
        names = [*(_NAMES[label] for label in self.reduced), *("bf16" for _ in self.both)]
        return Columns((*self.ids, *(self.ids[group] for group in self.both)), tuple(names))

    def options(self) -> dict[str, tuple[str, ...]]:
        """FP16 and BF16 for every group but those that emulation sees overflow, which have BF16 alone."""
        three = ("fp32", "fp16", "bf16")
        return {g: ("fp32", "bf16") if of == _BF16 else three for g, of in zip(self.ids, self.reduced, strict=True)}

    def row(self, choices: Mapping[str, str]) -> Bools:
        """Whether each group is FP16, then whether each is BF16."""
        return np.array([choices[group] == name for name in ("fp16", "bf16") for group in self.ids])

    def labels(self, plans: Bools) -> np.ndarray:
        """Rows of 0, 1 and 2 of such rows; those of n groups say where a group has the precision that it prefers."""
        n = self.groups
        return np.where(plans, self.reduced, 0) if plans.shape[1] == n else plans[:, :n] * _FP16 + plans[:, n:] * _BF16

    def latency_of(self, labels: np.ndarray) -> Floats:
        """True latency of rows of 0 (FP32), 1 (FP16), 2 (BF16): a Cast for each precision that a tensor is read in."""
        latency: Floats = super()._times(labels > 0).sum(axis=1)
        for boundary, cost in zip(self.boundaries, self.costs, strict=True):
            made = labels[:, boundary.members[0]]
            readers = labels[:, list(boundary.members[1:])]
            for label in (0, _FP16, _BF16):
                wanted = (readers == label).any(axis=1)
                if boundary.fixed and label == 0:
                    wanted[:] = True
                latency = latency + cost * (wanted & (made != label))
        return latency

    def _times(self, plans: Bools) -> Floats:
        return super()._times(self.labels(plans) > 0) if hasattr(self, "reduced") else super()._times(plans)

    def error_of(self, labels: np.ndarray) -> Floats:
        squares = (labels == _FP16) @ self.errors**2 + (labels == _BF16) @ (_LESS_EXACT * self.errors) ** 2
        error: Floats = np.sqrt(squares + ERROR_FLOOR**2)
        return error

    def finite_of(self, labels: np.ndarray) -> Bools:
        finite: Bools = ~((labels == _FP16) & self.overflows).any(axis=1)
        return finite

    def latency(self, plans: Bools) -> Floats:
        return self.latency_of(self.labels(plans)) if hasattr(self, "reduced") else super().latency(plans)

    def error(self, plans: Bools) -> Floats:
        return self.error_of(self.labels(plans))

    def finite(self, plans: Bools) -> Bools:
        return self.finite_of(self.labels(plans))

    def emulate(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """What emulation finds; it misses the same overflows."""
        answers = []
        for choice in choices:
            plan = self.row(choice)[None]
            miss = np.random.default_rng([self.seed, *np.packbits(plan)]).normal(0.0, WHOLE_PLAN)
            seen = bool(((self.labels(plan) == _FP16) & self.overflows & ~self.missed).any())
            answers.append(math.inf if seen else float(self.error(plan)[0] * np.exp(miss)))
        return answers

    def prior(self, kind: str = "emulated") -> Prior:
        errors = self.emulated * np.where(self.reduced == _BF16, _LESS_EXACT, 1.0)
        squares, columns = np.log(errors**2), self.columns()
        assumed = [assumed_error(float(squares[group]), 0.0, Precision.FP16, Precision.BF16) for group in self.both]
        own = {group: [column] for column, group in enumerate(range(self.groups))}
        for index, group in enumerate(self.both.tolist()):
            own[group].append(self.groups + index)
        ends = [tuple(own[group]) for group in range(self.groups)]
        gains = self.roofline_gains
        return Prior(
            columns.groups,
            tuple(map(float, [*squares, *(mean for mean, _ in assumed)])),
            tuple(map(float, [*gains, *gains[self.both]])),
            tuple(self._between(boundary, ends) for boundary in self.boundaries),
            tuple(map(float, self.roofline_costs)),
            log_square_sds=(*(0.0 for _ in ends), *(sd for _, sd in assumed)),
            precisions=columns.precisions,
        )

    def _between(self, boundary: Boundary, ends: Sequence[End]) -> Boundary:
        producer, *readers = (ends[group] for group in boundary.members)
        return Boundary(producer, (*readers, *boundary.fixed))

    def best(self) -> float:
        """The hypervolume of a near-exact front of all three precisions."""
        n = self.groups
        weights = np.geomspace(1e-2, 1e10, 200) * self.times[:, 0].mean()
        squares = (self.errors * np.where(self.reduced == _BF16, _LESS_EXACT, 1.0)) ** 2
        unary = -(self.times[:, 0] - self.times[:, 1]) + weights[:, None] * squares
        unary[:, self.missed] = self.times.sum()
        preferred = Columns(self.ids, self.columns().precisions[:n])
        solver = CutSolver(preferred, self.boundaries)
        front = self._front(self.labels(solver.solve(unary, np.tile(self.costs, (200, 1)))))
        value = self._area(front)
        for _ in range(30):
            chosen = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), 150)).astype(int))]
            around = [chosen]
            for start in range(n):
                for width in (1, 2, 3):
                    for label in (0, _FP16, _BF16):
                        changed = chosen.copy()
                        changed[:, start : start + width] = label
                        around.append(changed)
            front = self._front(np.unique(np.concatenate([front, *around]), axis=0))
            before, value = value, self._area(front)
            if value < before * (1 + 1e-5):
                break
        return value

    def _front(self, labels: np.ndarray) -> np.ndarray:
        labels = labels[self.finite_of(labels)]
        latency, error = self.latency_of(labels), self.error_of(labels)
        order = np.lexsort((error, latency))
        best = np.minimum.accumulate(error[order])
        return labels[order[np.append(True, best[1:] < best[:-1])]]

    def _area(self, labels: np.ndarray) -> float:
        labels = labels[self.finite_of(labels)]
        return dominated_area(gains(self.latency_of(labels), self.base), exactness(self.error_of(labels)))


def run_one(
    groups: int,
    seed: int,
    share: float,
    budget: int,
    overflow_gain: float,
    exact: tuple[str, ...],
    timing: float,
    profiled: bool,
) -> dict[str, float]:
    """Both searches of one simulated network: their quality, and the hypervolume of one over that of the other."""
    two = Truth(groups, seed, share, overflow_gain=overflow_gain, exact=exact, timing=timing)
    three = ThreeTruth(groups, seed, share, overflow_gain=overflow_gain, exact=exact, timing=timing)
    areas: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    counts = [*(n for n in _COUNTS if n < budget), budget]
    fp16 = ["fp32" if of == _BF16 else "fp16" for of in three.reduced]
    for what, truth, prior in (("two", two, two.prior("emulated")), ("three", three, three.prior())):
        # All-FP32, and all-FP16 but for what emulation sees overflow.
        first = [dict.fromkeys(truth.ids, "fp32"), dict(zip(truth.ids, fp16, strict=True))]
        sampler = PrecisionSampler(prior, seed, emulate=truth.emulate)
        built, thinking_s = search(truth, sampler, budget, first=first, profiled=profiled)
        areas[what], seconds[what] = [truth.hypervolume(built[:n]) for n in counts], float(np.mean(thinking_s))
    over = [b / a if a else math.inf for a, b in zip(areas["two"], areas["three"], strict=True)]
    return {
        "two": areas["two"][-1] / two.hypervolume(two.near_exact()),
        "three": areas["three"][-1] / three.best(),
        "three over two": over[-1],
        **{f"three over two after {n}": ratio for n, ratio in zip(counts[:-1], over, strict=False)},
        "thinking_s two": seconds["two"],
        "thinking_s three": seconds["three"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--shares", type=float, nargs="+", default=_SHARES, help="of the groups that overflow")
    parser.add_argument(
        "--overflow-gain", type=float, default=1.0, help="what these groups save, as a share of what others do"
    )
    parser.add_argument("--exact", nargs="+", default=[], choices=EXACT, metavar="WHAT", help=", ".join(EXACT))
    parser.add_argument("--timing", type=float, default=TIMING, help="standard deviation of a timing, relative")
    parser.add_argument(
        "--profiled", action="store_true", help="tell the samplers what each group took in each engine, 5 %% off"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = {
        name: getattr(options, name)
        for name in ("groups", "seeds", "budget", "overflow_gain", "exact", "timing", "profiled")
    }
    of_model = options.budget, options.overflow_gain, tuple(options.exact), options.timing, options.profiled
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        tasks = {
            share: [pool.submit(run_one, options.groups, s, share, *of_model) for s in range(options.seeds)]
            for share in options.shares
        }
        for share in options.shares:
            found = [task.result() for task in tasks[share]]
            medians = {what: round(float(np.median([one[what] for one in found])), 4) for what in found[0]}
            seeds = [{what: encode_float(round(value, 4)) for what, value in one.items()} for one in found]
            rows.append({"overflow": share, **medians, "seeds": seeds})
            least = min(one["three over two"] for one in found)
            print(f"{share:.0%} overflow: quality {medians['two']:.3f} in two precisions, {medians['three']:.3f} in "
                  f"three; hypervolume {medians['three over two']:.3f} times, at least {least:.3f}; "
                  f"{medians['thinking_s two']:.3f} and {medians['thinking_s three']:.3f} s per proposal",
                  flush=True)  # fmt: skip
            early = {n: medians[f"three over two after {n}"] for n in _COUNTS if n < options.budget}
            print(f"    hypervolume after {', '.join(f'{n} builds {ratio:.3f}' for n, ratio in early.items())} times",
                  flush=True)  # fmt: skip
            save(options.json, {**settings, "rows": rows})


if __name__ == "__main__":
    main()
