"""How well the sampler predicts latencies from a few timed plans, on networks whose plans were timed once.

The plans of ``results/h200_plans_*.json`` are taken in random order, after all-FP32 and the one of the most FP16
groups; the sampler's model of latency learns from the first ones, with the prior that a search has
(``results/peers_known_*.json``), and predicts the others. The figure is the root mean square of what it is off by, as a
share of the latency of all-FP32: for each network after 5, 15 and 50 plans, and geometric means over the networks.

    python -m benchmarks.latency_prediction --noise 0.0033

``--terms own`` takes away the doubts that terms share (``mptune.tuning.sampler.common_terms``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.common import bools_of, read_measured_plans
from benchmarks.peers.known import read_known
from mptune.tuning.sampler import latency_model
from mptune.tuning.sampler.common_terms import mix
from mptune.tuning.sampler.plan_rows import Floats
from mptune.tuning.sampler.posterior import BuiltPlans, Prior

_RESULTS = Path(__file__).parent / "results"
_LEARNT_FROM = (5, 15, 50)
_LEAST_LEFT = 10
"""Plans to predict, at least."""

_LEAST_NOISE = 1e-3
"""Standard error of a timing that the model is told of, at least, relative: about what was measured."""


def own_terms(prior: Prior, mean: Floats, *, profiled: bool) -> tuple[Floats, Floats]:
    """What ``mix`` gives where terms share no doubts."""
    return mix(prior, mean, profiled=profiled)[0][:, : len(mean)], np.zeros(0)


def misses(network: str, noise: float, orders: int) -> list[float]:
    """What predictions are off by, in percent, for each of ``_LEARNT_FROM``; NaN where too few plans are left.

    Args:
        network: names its files.
        noise: standard deviation of what is added to each timing, relative.
        orders: random orders of the plans that are averaged over.
    """
    known = read_known(_RESULTS / f"peers_known_{network}.json")
    measured = read_measured_plans(_RESULTS / f"h200_plans_{network}.json")
    prior, base_ms = known.with_errors(measured), measured.baseline_ms
    timed = [plan for plan in measured.plans if np.isfinite(plan.latency_ms) and plan.kind != "one-group"]
    rows = bools_of([plan.precision for plan in timed])[:, known.is_free]
    latency_ms = np.array([plan.latency_ms for plan in timed])
    some = rows.any(axis=1)
    rows, latency_ms = rows[some], latency_ms[some]
    first = int(rows.sum(axis=1).argmax())
    relative_sd = max(noise, _LEAST_NOISE)
    found = np.zeros((orders, len(_LEARNT_FROM)))
    for order in range(orders):
        rng = np.random.default_rng(order)
        others = rng.permutation(np.delete(np.arange(len(rows)), first))
        for column, count in enumerate(_LEARNT_FROM):
            if len(others) < count + _LEAST_LEFT:
                found[order, column] = np.nan
                continue
            learnt, left = np.append(first, others[:count]), others[count:]
            seen_ms = np.append(base_ms, latency_ms[learnt]) * (1.0 + noise * rng.normal(size=len(learnt) + 1))
            plans = np.vstack([np.zeros_like(rows[:1]), rows[learnt]])
            ones = np.ones(len(plans))
            sd_ms = relative_sd * seen_ms
            built = BuiltPlans(plans, seen_ms, sd_ms, 1e-3 * ones, ones, float(seen_ms[0]), float(sd_ms[0]))
            model = latency_model.LatencyModel(prior, built)
            miss = model.predict(rows[left], model.mean()[None])[0] - latency_ms[left]
            found[order, column] = 100 * np.sqrt(np.mean(miss**2)) / base_ms
    mean: list[float] = found.mean(axis=0).tolist()
    return mean


def _shown(percent: float) -> str:
    return "-" if np.isnan(percent) else f"{percent:.2f} %"


def main() -> None:
    """Print a table."""
    networks = sorted(path.stem.removeprefix("peers_known_") for path in _RESULTS.glob("peers_known_*.json"))
    networks = [name for name in networks if (_RESULTS / f"h200_plans_{name}.json").exists()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=networks, metavar="NAME")
    parser.add_argument("--noise", type=float, default=0.0033, help="of a timing, relative; added to what was measured")
    parser.add_argument("--orders", type=int, default=3, help="random orders of the plans")
    parser.add_argument("--terms", choices=("common", "own"), default="common")
    arguments = parser.parse_args()
    if arguments.terms == "own":
        latency_model.mix = own_terms
    print("| network | " + " | ".join(f"after {count} plans" for count in _LEARNT_FROM) + " |")
    print("| --- " * (1 + len(_LEARNT_FROM)) + "|")
    every = []
    for network in arguments.networks:
        every.append(misses(network, arguments.noise, arguments.orders))
        print(f"| {network} | " + " | ".join(map(_shown, every[-1])) + " |", flush=True)
    means = np.exp(np.nanmean(np.log(every), axis=0))
    print("| geometric mean | " + " | ".join(map(_shown, means)) + " |")


if __name__ == "__main__":
    main()
