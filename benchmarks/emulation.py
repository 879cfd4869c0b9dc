"""Hold emulated FP16 errors against those of real FP16 engines on the GPU here: one layer group at a time.

    python -m benchmarks.emulation benchmarks/models/digits_vit.onnx benchmarks/models/digits_calib.npz

Both are relative L2 against true FP32 on the same samples. Without a GPU there is nothing to hold it against.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import one_group_plans, require, save, workspace
from mptune.engines.environment import read_gpus
from mptune.engines.ort_toolchains import OnnxRuntimeToolchain, PredictedToolchain
from mptune.graph.groups import find_groups
from mptune.graph.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import LatencySettings, SearchSettings
from mptune.targets.target import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpus = read_gpus()
    if not gpus:
        raise SystemExit("no GPU here: emulated errors have nothing to be held against")
    model = load_model(options.model)
    groups = find_groups(model)
    plans = one_group_plans(model, groups)
    plans["all"] = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    settings = SearchSettings(latency=LatencySettings(warmup_ms=1, duration_ms=1))
    target = load_target("h200")
    errors: dict[str, list[float]] = {"measured": [], "emulated": []}
    with tempfile.TemporaryDirectory() as folder:
        space = workspace(options.model.resolve(), options.data, Path(folder), options.samples, options.batch)
        measured = OnnxRuntimeToolchain(target, space, model, groups, settings, "cuda", device=gpus[0].name)
        emulated = PredictedToolchain(target, space, model, groups, settings, "cpu")
        with measured, emulated:
            require(measured.reference("search"))
            for plan in plans.values():
                errors["measured"].append(require(measured.evaluate(plan)).error.value("relative_l2"))
            require(emulated.reference("search"))
            for plan in plans.values():
                errors["emulated"].append(require(emulated.evaluate(plan)).error.value("relative_l2"))
    taken, rounded = np.array(errors["measured"]), np.array(errors["emulated"])
    ratio = rounded / taken
    names = [g.name for g in groups] + ["all-FP16"]
    print(f"{'group':<34} {'measured':>10} {'emulated':>10} {'ratio':>6}")
    for name, m, e, r in zip(names, taken, rounded, ratio, strict=True):
        print(f"{name[:34]:<34} {m:>10.3e} {e:>10.3e} {r:>6.3f}")
    one = slice(0, len(groups))
    correlation = float(np.corrcoef(np.log(taken[one]), np.log(rounded[one]))[0, 1])
    print(f"{len(groups)} groups on {gpus[0].name}: log-correlation {correlation:.5f}, median ratio "
          f"{np.median(ratio[one]):.3f}, extremes {ratio[one].min():.3f} to {ratio[one].max():.3f}")  # fmt: skip
    save(options.json, {"groups": names, **errors, "log_correlation": correlation})


if __name__ == "__main__":
    main()
