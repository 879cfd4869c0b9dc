"""Trained networks from packages, as mptune and as common converters make them FP16.

python -m benchmarks.trained make /tmp/trained --python ../torch/bin/python
python -m benchmarks.trained run /tmp/trained --converters ../modelopt/bin/python
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common import save
from benchmarks.trained.recipes import BY_NAME, make_model, make_samples
from benchmarks.trained.table import better_elsewhere, lines_of, measured_table, pages, summary
from benchmarks.trained.variants import run_model
from mptune.files import write_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trained", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    steps = parser.add_subparsers(dest="step", required=True)

    def add(name: str, words: str) -> argparse.ArgumentParser:
        step = steps.add_parser(name, help=words)
        step.add_argument("folder", metavar="DIR", type=Path)
        step.add_argument("--models", type=lambda text: text.split(","), default=list(BY_NAME), help="a,b,...")
        return step

    making = add("make", "the networks' files and their samples")
    making.add_argument(
        "--python", default=sys.executable, help="has torch and onnx, for the networks that are exported"
    )
    making.add_argument("--wheels", type=Path, help="where packages are downloaded to; default: DIR/wheels")
    run = add("run", "every variant of each network: load, judge, predict, time")
    run.add_argument("--budget", type=int, default=30, help="plans of a search")
    run.add_argument(
        "--converters", default=sys.executable, help="python with onnxconverter-common and nvidia-modelopt"
    )
    run.add_argument("--limit", type=float, default=900.0, help="seconds of one step")
    run.add_argument("--fresh", action="store_true", help="convert again what was converted")
    show = add("table", "print the table of what was run")
    show.add_argument("--measured", type=Path, help="what `device` wrote")
    show.add_argument("--out", type=Path, help="a JSON file of all figures")
    device = add("device", "time and judge all variants on the GPU here")
    device.add_argument("--out", type=Path, required=True)
    device.add_argument("--limit", type=float, default=420.0, help="seconds")
    options = parser.parse_args()
    if options.step == "make":
        wheels = options.wheels or options.folder / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        for name in options.models:
            path = make_model(BY_NAME[name], options.folder / name, wheels, options.python)
            make_samples(BY_NAME[name], options.folder / name, wheels)
            print(f"{name}: {path.stat().st_size / 1e6:.1f} MB")
    elif options.step == "run":
        for name in options.models:
            path = options.folder / name / "results.json"
            kept = json.loads(path.read_text()) if path.exists() and not options.fresh else {}
            rows = run_model(options.folder / name, options.budget, options.converters, options.limit, kept)
            write_text(path, json.dumps(rows, indent=1).replace(f"{options.folder}/", ""))
            print(lines_of(name, rows), flush=True)
    elif options.step == "device":
        from benchmarks.trained.device import run_on_device

        found = run_on_device(options.folder, options.models, options.limit)
        save(options.out, found)
        print(measured_table(found["networks"]))
        for name, rows in found["networks"].items():
            for variant, row in rows.items():
                if "failure" in row:
                    print(f"{name}, {variant}: {row['failure']}")
    elif options.step == "table":
        paths = {name: options.folder / name / "results.json" for name in options.models}
        results = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
        measured = json.loads(options.measured.read_text())["networks"] if options.measured else {}
        save(options.out, {"networks": results})
        print(pages(results, measured), "", summary(results), "", *better_elsewhere(results), sep="\n")


if __name__ == "__main__":
    main()
