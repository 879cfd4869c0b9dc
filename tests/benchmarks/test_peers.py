"""The comparison with peers: laws, replays on them, bisection, converters, and the tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import pages, table
from benchmarks.peers.__main__ import main
from benchmarks.peers.law import AdditiveLaw, Residual, cross_validated
from benchmarks.peers.replay import MOST_POINTS, Task, bisect, few_points, run
from benchmarks.peers.world import open_world
from mptune.tuning.sampler.plans import Boundary
from mptune.tuning.sampler.trials import Prior

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GROUPS = 9


@pytest.fixture
def plans() -> tuple[Prior, np.ndarray, np.ndarray, np.ndarray]:
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


def test_a_law_that_holds_is_found(plans: tuple[Prior, np.ndarray, np.ndarray, np.ndarray]) -> None:
    prior, rows, latency, error = plans
    residual, _ = cross_validated(prior, rows, latency, error, 10.0, np.arange(len(rows)) > 0)
    assert residual.latency < 1e-3
    assert residual.log_error < 0.04, "the one-group errors that it begins with are 20 % off"
    assert residual.plans == len(rows) - 1


def test_a_residual_is_what_the_law_misses(plans: tuple[Prior, np.ndarray, np.ndarray, np.ndarray]) -> None:
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
    seen: list[str] = []

    def is_good(bits: str) -> bool:
        seen.append(bits)
        return sum(bits[group] == "0" for group in groups) >= needed

    plan, builds = bisect(groups, 10, is_good, forward=forward)
    kept = groups[:needed] if forward else groups[len(groups) - needed :]
    assert [k for k in groups if plan[k] == "0"] == list(kept)
    assert (plan[3], plan[7]) == ("0", "0")
    assert builds == len(seen) <= 4
    assert len(set(seen)) == builds


def test_a_replay_builds_its_budget_and_names_its_front() -> None:
    found = run(Task(RESULTS, "digits_vit", "random", 0, 12))
    assert (found["built"], len(found["curve"])) == (12, 12)
    assert found["curve"] == sorted(found["curve"])
    world = open_world(RESULTS, "digits_vit")
    plans = np.random.default_rng(0).random((60, world.groups)) < 0.5
    few = few_points(world, plans)
    assert 1 <= len(few) <= MOST_POINTS
    assert world.hypervolume(few) == pytest.approx(world.hypervolume(plans), rel=0.1)


def figure(latency: float, error: float | str) -> dict[str, object]:
    return {"latency_ms": latency, "error": error, "ci95_ms": [latency - 0.01, latency + 0.01], "sessions": 3}


def test_the_table_holds_what_was_measured_and_says_where_mptune_loses() -> None:
    no_search = {"builds": 0, "budget": None}
    document = {
        "baseline_ms": 4.0,
        "device": "none",
        "rounds": 3,
        "all_fp16": "11",
        "made": [
            {**no_search, "peer": "all-FP16", "plan": "11"},
            *({"peer": "mptune", "plan": bits, "builds": 50, "budget": 50} for bits in ("10", "01")),
            {**no_search, "peer": "AutoCast", "plan": "file: AutoCast"},
            {"peer": "Optuna TPE", "plan": "rival", "builds": 50, "budget": 50},
        ],
        "measured": {
            "00": figure(4.0, 1e-7), "11": figure(2.0, 1e-2), "10": figure(2.2, 2e-3), "01": figure(3.0, 5e-4),
        },
    }  # fmt: skip
    entry = table.measured(document)
    assert [plan["latency_ms"] for plan in entry["peers"]["mptune, 50 builds"]["at_error"]] == [3.0, 2.2, 2.2]
    assert entry["peers"].keys() == {"all-FP16", "mptune, 50 builds"}, "the others were not measured"
    text = pages.published({"m": {"what": "a model", "measured": entry}, "n": {"what": "another"}})
    assert "Not built and timed in turn yet: another." in text
    infinite = table.measured({**document, "measured": {**document["measured"], "11": figure(2.0, "inf")}})  # type: ignore[dict-item]
    assert infinite["peers"]["mptune, 50 builds"]["at_error"] is None, "a share of an infinite error is no limit"
    document["measured"]["rival"] = figure(2.0, 2e-3)  # type: ignore[index]
    text = pages.published({"m": {"what": "a model", "measured": table.measured(document)}})
    lost = [line for line in text.splitlines() if line.startswith("- a model")]
    assert [line.split(":")[1].split(" of")[0] for line in lost] == [" ms at 0.3", " ms at 0.5"]
    assert "Optuna TPE, 50 builds 2 (1.99 to 2.01), mptune 2.2 (2.19 to 2.21)" in lost[0]


def test_a_verdict_falls_back_to_fp32_and_names_who_is_faster_or_has_more_volume() -> None:
    def peer(*latencies: float | None) -> dict[str, object]:
        return {"at_error": [None if ms is None else figure(ms, 0.0) for ms in latencies]}

    timed = {
        "fp32": {"latency_ms": 4.0, "ci95_ms": [4.0, 4.0]},
        "peers": {
            "mptune, 50 builds": peer(None, 2.0, 1.5),
            "bisection": peer(3.0, 1.985, 1.5),
            "Optuna GP, 50 builds": peer(None, None, 1.4),
        },
    }
    assert [pages.beaten_by(timed, at) for at in range(3)] == [["bisection"], [], ["Optuna GP, 50 builds"]]
    volumes = {"mptune": 0.5, "Optuna TPE": 0.4, "Optuna GP": 0.505, "bisection": 0.52}
    replayed = {
        "law": {"residual": {"latency": 0.01}},
        "own_front": 0.5,
        "samplers": {name: {"hypervolume": volume} for name, volume in volumes.items()},
    }
    assert pages.more_volume(replayed) == ["bisection"], "what GP has more is within the residual"
    text = pages.verdict({"a": {"what": "net a", "measured": timed, "replayed": replayed}, "b": {"what": "net b"}})
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert (
        "1.000, 1.040 bisection **(bisection)** | 1.25 | 4 ± 0; 3 ± 0.01 bisection | 2 ± 0.01; 1.985" in rows["| net a"]
    )
    assert "**bisection at 0.1**; **Optuna GP, 50 builds at 0.5**" in rows["| net a"]
    assert set(rows["| net b"].removeprefix("| net b")) == set("| -")


def test_replays_are_tabled_with_a_star_and_what_a_peer_is_better_at_is_named() -> None:
    def runs(sampler: str, volume: float, budget: int, latency: float | None) -> list[dict[str, object]]:
        at = {"50": {"latency_ms": [latency, 2.0, 2.0], "error": [3e-3, 2e-3, 1e-3]}}
        one = {"sampler": sampler, "budget": budget, "built": budget, "curve": [volume] * budget, "at": at}
        return [{**one, "seed": seed, "cpu_s": 1, "emulated": 9, "peak_mib": 9} for seed in range(3)]

    bisected = [{"name": "b", "plan": "1", "builds": 3, "latency_ms": 1.9, "error": 2e-3}]
    document = {
        "law": {"plans": 70, "residual": {"latency": 0.01, "log_error": 0.1}},
        "own_front": 0.2,
        "baseline_and_fp16": [[4.0, 0.0], [1.8, 1e-2]],
        "bisected": bisected,
        "runs": [*runs("precision", 0.1, 50, 2.5), *runs("tpe", 0.05, 200, None), *runs("gp", 0.12, 50, 2.6)],
    }
    entries = {"m": {"what": "a model", "replayed": table.replayed(document)}}
    text = pages.published(entries)
    assert "| a model | 0.500, 0.600 Optuna GP **(Optuna GP, bisection)** | 2.00 | - |" in text
    lost = [line for line in text.splitlines() if line.startswith("- a model")]
    assert lost[0] == "- a model: hypervolume*, Optuna GP 0.600, mptune 0.500"
    assert "- a model: ms at error limit 0.3*, bisection 1.9, mptune 2" in lost
    assert not any("TPE" in line for line in lost)


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
    table_json = tmp_path / "peers.json"
    assert main(["table", *place, "--json", str(table_json)]) == 0
    peers = json.loads(table_json.read_text())["models"]["digits_vit"]["measured"]["peers"]
    assert {"all-FP16", "norm and softmax in FP32", "bisection", "mptune, 50 builds", "ONNX Runtime float16"} <= set(
        peers
    )
    shutil.rmtree(work)
