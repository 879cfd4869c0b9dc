"""Where a search of a simulated model loses what its front lacks; ``search_quality`` says how much it lacks.

Each model is searched, and asked after 25 and 50 builds which 48 plans it would build if it could begin anew: the best
ones of the front that its law has, by the mean of the posterior. What these lack of the front is what is not known;
what they find and the search did not is the price of learning while building. Columns:

- *found*: share of the near-exact front's hypervolume after 50 builds,
- *25, then 25 at once*: the share where the second half of the builds is chosen by the mean of what is known after the
  first one, and nothing more is learnt,
- *anew, knowing 25* and *50*: the share of the 48 best plans by what is known after so many builds, built anew,
- *reachable*: the share of the best 48 plans of the near-exact front itself,
- *not finite*, *beaten*: builds that overflowed, and builds that other builds beat,
- *came of 3 to 10*, *to 25*, *to 50*: what these builds added to the true hypervolume, over what was expected of them
  when they were proposed; 1 where the posterior is right about what it does not know.

Means over the models, with the standard errors of the shares::

    python -m benchmarks.search_loss --groups 40 --seeds 12 --jobs 8
"""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # before numpy is imported, here and in the workers

import argparse  # noqa: E402
import copy  # noqa: E402
import json  # noqa: E402
from concurrent.futures import ProcessPoolExecutor  # noqa: E402
from itertools import pairwise  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import optuna  # noqa: E402

from benchmarks.search_quality import describe  # noqa: E402
from benchmarks.simulator import HARDER, Hard, Truth, search  # noqa: E402
from mptune.tuning.sampler.acquisition import taught_by  # noqa: E402
from mptune.tuning.sampler.error_model import ErrorModel  # noqa: E402
from mptune.tuning.sampler.group_tests.overflow_model import OverflowModel  # noqa: E402
from mptune.tuning.sampler.latency_model import LatencyModel  # noqa: E402
from mptune.tuning.sampler.plan_rows import Bools  # noqa: E402
from mptune.tuning.sampler.posterior import BuiltPlans, Prior  # noqa: E402
from mptune.tuning.sampler.precision import PrecisionSampler  # noqa: E402

_BUDGET, _ASKED_AFTER = 50, (25, 50)
_ANEW = _BUDGET - 2
"""Plans that are built anew: beside all-FP32 and all-FP16."""

_STAGES = (2, 10, 25, 50)
_MODELS = {"default": None, "hard": Hard(), "harder": HARDER}


class _Recorded(PrecisionSampler):
    """Keeps what it knew at each proposal, and what it expected of the plan."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth.prior("precision"), seed=truth.seed, emulate=truth.emulate)
        self.known: dict[int, BuiltPlans] = {}
        self.expected: dict[int, float] = {}

    def propose(
        self, prior: Prior, built: BuiltPlans, generator: np.random.Generator
    ) -> tuple[Bools | None, float, dict[str, float | str]]:
        """As ``PrecisionSampler`` does."""
        proposed = super().propose(prior, built, generator)
        self.known[len(built.plans)], self.expected[len(built.plans)] = built, proposed[1]
        return proposed


def believed(truth: Truth, prior: Prior, built: BuiltPlans) -> Truth:
    """The model that the sampler takes the true one for: the means of its posteriors."""
    own, groups = copy.copy(truth), truth.groups
    terms = LatencyModel(prior, taught_by(prior, built)).mean()
    own.times = np.stack([truth.times[:, 0], truth.times[:, 0] - terms[:groups]], axis=1)
    own.costs = terms[groups:-1]
    own.tactics = np.ones_like(truth.tactics)
    own.errors = np.exp(0.5 * ErrorModel(prior, taught_by(prior, built)).mode)
    own.correlations = np.zeros_like(truth.correlations)
    own.overflows = OverflowModel(prior, built).probabilities > 0.5
    return own


def best_of(model: Truth, count: int, beside: Bools | None = None) -> Bools:
    """So many plans of a model's front, taken greedily by the hypervolume that they add, to plans beside them."""
    front = model.near_exact()
    return front[model.chosen(front, count, beside)]


def run_one(task: tuple[int, int, str]) -> dict[str, Any]:
    """One search, and what it knew."""
    groups, seed, kind = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    truth = Truth(groups, seed, hard=_MODELS[kind])
    front = truth.near_exact()
    whole = truth.hypervolume(front)
    sampler = _Recorded(truth)
    plans = search(truth, sampler, _BUDGET + 1)[0][:_BUDGET]  # one more is asked for: what is known after the last
    shares = [truth.hypervolume(plans[:count]) / whole for count in range(1, _BUDGET + 1)]
    prior = truth.prior("precision")
    models = [believed(truth, prior, sampler.known[count]) for count in _ASKED_AFTER]
    anew = [best_of(model, _ANEW) for model in models]
    first = plans[: _ASKED_AFTER[0]]
    at_once = best_of(models[0], _BUDGET - len(first), first)
    finite = truth.finite(plans)
    return {
        "groups": groups,
        "seed": seed,
        "found": shares[-1],
        "25, then 25 at once": truth.hypervolume(np.vstack([first, at_once])) / whole,
        **{f"anew, knowing {n}": truth.hypervolume(p) / whole for n, p in zip(_ASKED_AFTER, anew, strict=True)},
        "reachable": truth.reachable(front, _ANEW) / whole,
        "not finite": int((~finite).sum()),
        "beaten": int(finite.sum()) - len(truth.front(plans)),
        **{
            f"came of {since + 1} to {until}": (shares[until - 1] - shares[since - 1])
            * whole
            / sum(sampler.expected[count] for count in range(since, until))
            for since, until in pairwise(_STAGES)
        },
    }


def main() -> None:
    """Print a table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[40, 120])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--models", choices=tuple(_MODELS), default="hard")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tasks = [(groups, seed, arguments.models) for groups in arguments.groups for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(run_one, tasks))
    names = list(runs[0])[2:]
    print("| groups | " + " | ".join(names) + " |")
    print("| --- " * (1 + len(names)) + "|")
    for groups in arguments.groups:
        cells = []
        for name in names:
            values = np.array([run[name] for run in runs if run["groups"] == groups], dtype=float)
            error = f" ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
            is_count = name in ("not finite", "beaten")
            cells.append(f"{values.mean():.1f}" if is_count else f"{values.mean():.3f}{error}")
        print(f"| {groups} | " + " | ".join(cells) + " |", flush=True)
    if arguments.out is not None:
        rounded = [{k: round(v, 4) for k, v in run.items()} for run in runs]
        document = {**describe(_BUDGET), "models": arguments.models, "runs": rounded}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
