"""mptune against its peers, step by step; every step goes on where an earlier call stopped.

    python -m benchmarks.peers collect vit_s swin_t --work W --limit 540    # on the GPU: about 150 plans of each
    python -m benchmarks.peers replay vit_s swin_t                          # anywhere: searches on the fitted law
    python -m benchmarks.peers convert vit_s --packed P --pythons A/bin/python B/bin/python    # where converters are
    python -m benchmarks.peers final vit_s swin_t --work W --packed P --limit 540    # on the GPU: every peer's plans
    python -m benchmarks.peers table --publish     # the comparison, from the files of the others

``collect`` makes a model, measures plans of it (both uniform ones, each group alone, random ones) and writes down what
a search would know of it; then plans along the front of the law that is fitted to these. ``replay`` writes
``peers_replay_MODEL.json`` (``benchmarks.peers.replay``), ``final`` ``h200_peers_MODEL.json``
(``benchmarks.peers.final``), which takes the models of ``convert``. ``table --publish`` replaces the
parts ``<!-- peers -->`` of README.md and benchmarks/README.md. With ``--provider cpu --target cpu`` the steps run
without a GPU; the names of the files say h200 all the same, so give another ``--results``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import save
from benchmarks.peers import collect, pages, table
from benchmarks.peers.converters import CONVERTERS
from benchmarks.peers.final import final
from benchmarks.peers.models import MODELS
from benchmarks.peers.own import convert_all
from benchmarks.peers.replay import FINAL, MOST_POINTS, NAMES, replay


def make_parser() -> argparse.ArgumentParser:
    """The options of all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    common, work, device = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    common.add_argument("models", nargs="*", choices=[[], *MODELS], default=[], metavar="MODEL", help="default: all")
    common.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    common.add_argument("--limit", type=float, default=1e9, help="seconds: what is left then is left to the next call")
    work.add_argument("--work", type=Path, default=Path("peers.work"), help="models and records, kept between calls")
    packed = {"type": Path, "default": Path("peers.packed"), "help": "folder that the step convert writes"}
    device.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    device.add_argument("--target", default="h200", help="whose roofline is taken")
    step = steps.add_parser("collect", parents=[common, work, device], help="measure plans of each model")
    step.add_argument("--random", type=int, default=80, help="random plans")
    step.add_argument("--front", type=int, default=30, help="plans along the front of the law")
    step.add_argument("--alone", type=int, default=1000, help="groups that are built alone; all of them are emulated")
    step = steps.add_parser("replay", parents=[common], help="replay searches on the fitted laws")
    step.add_argument("--samplers", nargs="+", choices=NAMES, default=[name for name in NAMES if name != "gp"])
    step.add_argument("--seeds", type=int, default=3)
    step.add_argument("--budget", type=int, default=50, help="builds of mptune's sampler")
    step.add_argument("--stock-budget", type=int, default=200, help="builds of Optuna's samplers")
    step.add_argument("--jobs", type=int, default=1)
    step = steps.add_parser("final", parents=[common, work, device], help="build and time every peer's plans")
    step.add_argument("--rounds", type=int, default=3, help="sessions of each plan, each in a process of its own")
    step.add_argument("--packed", **packed)
    step.add_argument("--searched", type=Path, default=Path("searched"), help="what benchmarks.networks --keep writes")
    step.add_argument("--budgets", nargs="+", type=int, default=list(FINAL), help="of replays that are built")
    step.add_argument("--points", type=int, default=MOST_POINTS, help="of each front, those for the limits first")
    step = steps.add_parser("convert", parents=[common, work], help="run the converters, and pack what they write")
    step.add_argument("--packed", **packed)
    step.add_argument("--converters", nargs="+", choices=CONVERTERS, default=list(CONVERTERS))
    step.add_argument("--pythons", nargs="+", default=[sys.executable], help="interpreters that have the converters")
    step.add_argument("--timeout", type=float, default=600.0, help="seconds of each converter")
    step = steps.add_parser("table", parents=[common], help="the comparison, from the files of the other steps")
    step.add_argument("--json", type=Path)
    publish = "write peers.json and the parts <!-- peers --> of the pages"
    step.add_argument("--publish", action="store_true", help=publish)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step on every model; 1 where something is left for another call."""
    options = make_parser().parse_args(arguments)
    deadline = time.monotonic() + options.limit
    models = [MODELS[name] for name in options.models or MODELS]
    if options.step == "table":
        comparison = table.compare(options.results, [model.name for model in models])
        print(pages.published(comparison))
        for path in {options.json, options.results / "peers.json" if options.publish else None} - {None}:
            save(path, {"models": comparison})
        if options.publish:
            pages.insert(Path("benchmarks/README.md"), pages.published(comparison))
            pages.insert(Path("README.md"), pages.headline(comparison))
        return 0
    if options.step == "replay":
        return max(not replay(model.name, options, deadline) for model in models)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.step == "convert":
        for model in models:
            convert_all(model, options)
        return 0
    step = collect.collect if options.step == "collect" else final
    is_done = True
    for model in models:
        if time.monotonic() >= deadline:
            print(f"{model.name}: no time left")
            is_done = False
        else:
            is_done &= step(model, options, deadline)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
