"""How long a search takes until it proposes its first plan, and until it has 20: of two checkouts, in turn.

    git worktree add --detach /tmp/before fb47b6b
    python -m benchmarks.models.unet --out unet --batch 1
    python -m benchmarks.models.flow_net --out flow_deep --batch 1 --depth 6 --opset 16
    python -m benchmarks.first_plan unet flow_deep --before /tmp/before --json first_plan.json

Each name stands for NAME.onnx and NAME.npz; ``model.onnx:data.npz`` names both files. A search runs in a process of its
own with no other, so that both checkouts have the same cores; CPU seconds are those of its processes, the worker
included, and hold where the machine has other work to do. The seeds (all-FP32, all-FP16 and the known recipes) come
before the first plan that the sampler proposes, and their evaluation is in its time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]

_CHILD = "--child"


def cpu_seconds() -> float:
    """Of this process and all its descendants, those that live and those that have ended; Linux."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(r.ru_utime + r.ru_stime for r in (own, ended))
    waiting = [os.getpid()]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):  # it has ended meanwhile, and is counted where it ended
                children = [int(pid) for pid in task.read_text().split()]
                waiting += children
                for pid in children:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return round(seconds, 1)


class Timeline:
    """A listener that notes when stages begin and plans are done, in seconds after it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.stages: dict[str, float] = {}
        self.plans: list[tuple[float, str]] = []

    def seconds(self) -> float:
        return round(time.monotonic() - self._start, 2)

    def stage(self, text: str) -> None:
        self.stages.setdefault(text.split(":")[0], self.seconds())

    def evaluated(self, evaluation: Any, done: int, budget: int) -> None:
        self.plans.append((self.seconds(), str(evaluation.origin)))

    def failed(self, plan: Any, origin: Any, failure: Any, done: int, budget: int) -> None:
        self.plans.append((self.seconds(), str(origin)))

    def building(self, progress: Any) -> None:
        pass

    def warning(self, text: str) -> None:
        pass


def search(model: Path, data: Path, budget: int, target: str, metric: str, seed: int) -> dict[str, Any]:
    """Search in this process, with the mptune that is imported here: in the checkout's own process."""
    import mptune
    from mptune.tuning.sampler import precision

    timeline, proposals, proposal_cpu_s, propose = Timeline(), [], [], precision.PrecisionSampler.propose

    def noted(self: Any, *args: Any) -> Any:
        result = propose(self, *args)
        proposals.append(timeline.seconds())
        proposal_cpu_s.append(cpu_seconds())
        return result

    precision.PrecisionSampler.propose = noted
    with tempfile.TemporaryDirectory(prefix="mptune-first-plan-") as folder:
        options = {"budget": budget, "target": target, "metric": metric, "seed": seed, "listener": timeline}
        front = mptune.search(str(model), data=str(data), out=f"{folder}/run", **options)
        took = timeline.seconds()
        json_path = Path(folder) / "run" / "data" / "sensitivity.json"
        errors = json.loads(json_path.read_text()) if json_path.exists() else {}
        document = json.loads((Path(folder) / "run" / "front.json").read_text())
    chosen = next((point for point in document["points"] if point["plan"] == document["chosen"]), None)
    return {
        "mptune": mptune.__file__,
        "first_proposal_s": proposals[0] if proposals else None,
        "first_proposal_cpu_s": proposal_cpu_s[0] if proposal_cpu_s else None,
        "seeds_s": max((s for s, origin in timeline.plans if origin != "sampler"), default=None),
        "plans_s": timeline.plans[-1][0] if timeline.plans else None,
        "total_s": took,
        "cpu_s": cpu_seconds(),
        "stages": timeline.stages,
        "hypervolume": front.hypervolume,
        "choice": None
        if chosen is None
        else {
            "plan": chosen["plan"],
            "latency_ms": chosen["latency"]["median_ms"],
            "error": chosen["error"]["value"],
            "held_out": chosen["error"]["held_out"],
            "fp16_groups": chosen["fp16_groups"],
        },
        "evaluations": document["evaluations"],
        "one_group_errors": errors,
    }


def run_child(
    checkout: Path, model: Path, data: Path, budget: int, target: str, metric: str, seed: int
) -> dict[str, Any]:
    """A search in a process whose ``mptune`` is the checkout's."""
    command = [sys.executable, str(Path(__file__).resolve()), str(model.resolve()), str(data.resolve()), _CHILD]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--budget", str(budget), "--target", target, "--metric", metric, "--seed", str(seed)]
        options += ["--json", str(result)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run([*command, *options], check=True, cwd=folder, env=environment)
        return dict(json.loads(result.read_text()))


def line(name: str, which: str, found: Mapping[str, Any]) -> str:
    choice = found["choice"] or {}
    return (
        f"{name:16s} {which:7s} first proposal {found['first_proposal_s'] or float('nan'):6.1f} s"
        f" (CPU {found['first_proposal_cpu_s'] or float('nan'):6.1f} s)"
        f"  all plans {found['plans_s']:6.1f} s (CPU {found['cpu_s']:6.1f} s)"
        f"  choice {choice.get('plan', '')[:8]} {choice.get('latency_ms', float('nan')):.4g} ms,"
        f" error {choice.get('error', float('nan')):.3g}, {choice.get('fp16_groups')} FP16;"
        f" hypervolume {found['hypervolume']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="NAME, or MODEL.onnx:DATA.npz")
    parser.add_argument("--before", type=Path, help="another checkout, which searches each model first")
    parser.add_argument("--budget", type=int, default=20)
    parser.add_argument("--target", default="jetson-orin-nano-8gb")
    parser.add_argument("--metric", default="relative_l2", help="of both checkouts: their defaults may differ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="written after each search")
    parser.add_argument(_CHILD, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, data = map(Path, options.models)
        searched = search(model, data, options.budget, options.target, options.metric, options.seed)
        options.json.write_text(json.dumps(searched))
        return
    checkouts = {**({"before": options.before} if options.before else {}), "after": CHECKOUT}
    found: dict[str, dict[str, Any]] = {}
    for name in options.models:
        model, _, data = name.partition(":")
        paths = (Path(model), Path(data)) if data else (Path(f"{name}.onnx"), Path(f"{name}.npz"))
        for which, checkout in checkouts.items():
            settings = options.budget, options.target, options.metric, options.seed
            result = run_child(checkout.resolve(), *paths, *settings)
            found.setdefault(paths[0].stem, {})[which] = result
            print(line(paths[0].stem, which, result), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
