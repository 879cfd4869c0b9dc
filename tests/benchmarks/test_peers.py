"""The comparison with peers: laws, replays on them, bisection, converters, and the tables."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.peers import pages, table
from benchmarks.peers.__main__ import main
from benchmarks.peers.law import AdditiveLaw, Residual, cross_validated
from benchmarks.peers.models import MODELS
from benchmarks.peers.replay import LIMITS, MOST_POINTS, Task, bisect, few_points, run
from benchmarks.peers.world import open_world
from mptune.tuning.sampler.plans import Boundary
from mptune.tuning.sampler.trials import Prior

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GROUPS = 9


Plans = tuple[Prior, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture
def plans() -> Plans:
    """A prior with wrong terms, plans, and their latencies and errors by a true law."""
    rng = np.random.default_rng(0)
    boundaries = tuple(Boundary(k, (k + 1,)) for k in range(GROUPS - 1))
    gains, costs, errors = (rng.uniform(0.1, 0.5, GROUPS), rng.uniform(0.0, 0.1, GROUPS - 1), rng.uniform(1, 9, GROUPS))
    prior = Prior(
        tuple(f"g{k}" for k in range(GROUPS)),
        log_square_errors=tuple(np.log((1e-3 * errors * rng.lognormal(0.0, 0.2, GROUPS)) ** 2)),
        gains_ms=tuple(3.0 * gains * rng.lognormal(0.0, 0.3, GROUPS)),
        boundaries=boundaries,
        boundary_costs_ms=tuple(3.0 * costs),
    )
    rows = rng.random((160, GROUPS)) < 0.5
    rows[0] = True
    crossed = rows[:, 1:] ^ rows[:, :-1]
    latency = 10.0 - rows @ gains + crossed @ costs
    return prior, rows, latency, 1e-3 * np.sqrt(rows @ errors**2)


def test_a_law_that_holds_is_found(plans: Plans) -> None:
    prior, rows, latency, error = plans
    residual, _ = cross_validated(prior, rows, latency, error, 10.0, np.arange(len(rows)) > 0)
    assert residual.latency < 1e-3
    assert residual.log_error < 0.04, "the one-group errors that it begins with are 20 % off"
    assert residual.plans == len(rows) - 1


def test_a_residual_is_what_the_law_misses(plans: Plans) -> None:
    prior, rows, latency, error = plans
    law = AdditiveLaw.fit(prior, rows, latency, error, 10.0)
    assert (law.costs_ms >= 0.0).all()
    noise = np.random.default_rng(1)
    slower = latency / noise.normal(1.0, 0.03, len(latency))
    slower[:3] *= 2.0
    off = Residual.of(*law.predict(rows), slower, error * noise.lognormal(0.0, 0.2, len(error)))
    assert off.latency == pytest.approx(0.03, rel=0.25)
    assert off.odd == 3
    assert off.log_error == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("needed", [0, 1, 3, 7, 8])
def test_bisection_finds_the_fewest_groups(forward: bool, needed: int) -> None:
    groups = (0, 1, 2, 4, 5, 6, 8, 9)  # 3 and 7 are pinned to FP32
    is_good = Mock(side_effect=lambda bits: sum(bits[group] == "0" for group in groups) >= needed)
    plan, builds = bisect(groups, 10, is_good, forward=forward)
    fp32 = groups[:needed] if forward else groups[len(groups) - needed :]
    assert {k for k in range(10) if plan[k] == "0"} == {3, 7, *fp32}
    assert builds == len({call.args for call in is_good.call_args_list}) == is_good.call_count <= 4


def test_a_replay_builds_its_budget_and_names_its_front() -> None:
    found = run(Task(RESULTS, "digits_vit", "random", 0, 12))
    assert (found["built"], len(found["curve"])) == (12, 12)
    assert found["curve"] == sorted(found["curve"])
    world = open_world(RESULTS, "digits_vit")
    plans = np.random.default_rng(0).random((60, world.groups)) < 0.5
    few = few_points(world, plans, LIMITS)
    assert 1 <= len(few) <= MOST_POINTS
    assert world.hypervolume(few) == pytest.approx(world.hypervolume(plans), rel=0.1)


def test_the_pages_have_what_the_files_of_results_say() -> None:
    comparison = table.compare(RESULTS, list(MODELS))
    assert pages.published(comparison) in (ROOT / "benchmarks/README.md").read_text()
    assert pages.headline(comparison) in (ROOT / "README.md").read_text()


def test_a_share_of_an_infinite_error_is_no_limit() -> None:
    document = json.loads((RESULTS / "h200_peers_digits_vit.json").read_text())
    document["measured"][document["all_fp16"]]["error"] = "inf"
    assert table.measured(document)["peers"]["mptune, 50 builds"]["at_error"] is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_step_runs_on_a_cpu_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    work, results = tmp_path / "work", tmp_path / "results"
    results.mkdir()
    place = ["digits_vit", "--results", str(results)]
    device = ["--work", str(work), "--provider", "cpu", "--target", "h200"]
    collect = ["collect", *place, *device, "--random", "6", "--front", "3", "--alone", "20"]
    assert main([*collect, "--limit", "0.1"]) == 1
    assert main(collect) == 0
    measured = json.loads((results / "h200_plans_digits_vit.json").read_text())
    assert {plan["kind"] for plan in measured["plans"]} == {"uniform", "one-group", "random", "front"}
    options = ["--samplers", "precision", "random", "--seeds", "1", "--budget", "50", "--stock-budget", "50"]
    assert main(["replay", *place, *options]) == 0
    packed = ["--packed", str(tmp_path / "packed")]
    assert main(["convert", "digits_vit", "--work", str(work), *packed, "--converters", "ONNX Runtime float16"]) == 0
    final = ["final", *place, *device, *packed, "--rounds", "2"]
    assert main([*final, "--limit", "5"]) in (0, 1)
    assert main(final) == 0
    lines = (work / "digits_vit.final" / "sessions.jsonl").read_text().splitlines()
    baselines: dict[str, list[str]] = {}
    for entry in map(json.loads, lines):
        if "timing" in entry:
            baselines.setdefault(entry["key"], []).append(entry["timing"]["baseline"])
    assert all(len(names) == len(set(names)) == 2 for names in baselines.values()), "a process for each session"
    assert main(["table", *place, "--json", str(tmp_path / "peers.json")]) == 0
    peers = json.loads((tmp_path / "peers.json").read_text())["models"]["digits_vit"]["measured"]["peers"]
    rules = {"all-FP16", "norm and softmax in FP32", "bisection"}
    assert rules | {"mptune, 50 builds", "ONNX Runtime float16"} <= set(peers)
