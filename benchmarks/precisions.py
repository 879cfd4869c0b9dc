"""Time a model's uniform precisions on this machine's GPU in one run: FP32, TF32, all-FP16, and a mixed model if given.

    python -m benchmarks.precisions vit_s.onnx vit_s.npz --mixed vit_s.mptune/chosen/model.onnx

ONNX Runtime's CUDA provider with CUDA graphs. The engines alternate, and ratios are to FP32 of the same round. TF32 is
timed in the same process, so the provider's own option switches it off for the others, which makes convolutions slower
than in a search (``mptune.engines.ort.cuda_session``).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import save, workspace
from mptune.data.archive import read_samples
from mptune.data.metrics.accuracy import compare_outputs
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions
from mptune.engines.timing.latency import calibrate, monotonic_ms, time_in_turn
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.settings import LatencySettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--mixed", type=Path, action="append", default=[], help="another ONNX file; may be repeated")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.model)
    groups = find_groups(model)
    with tempfile.TemporaryDirectory() as folder:
        space = workspace(options.model.resolve(), options.data, Path(folder), options.samples, options.batch)
        fp16 = space.weights_dir / "fp16.onnx"
        Rewriter(GroupedModel(model, groups)).export(
            PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16), fp16
        )
        cases = {"FP32": (options.model, False), "TF32": (options.model, True), "all-FP16": (fp16, False)}
        cases |= {path.parent.parent.name or path.name: (path, False) for path in options.mixed}
        sessions = {n: open_session(p, SessionOptions(options.provider, tf32=t)) for n, (p, t) in cases.items()}
        samples = read_samples(space.samples("search"))
        reference = [sessions["FP32"].run(s) for s in samples]
        watches = {n: s.stopwatch(samples[0]) for n, s in sessions.items()}
        repetitions = calibrate(watches["FP32"].run_once, monotonic_ms, LatencySettings())
        timed = [time_in_turn(list(watches.values()), repetitions) for _ in range(options.rounds)]
        rounds = [{n: latency.median_ms for n, latency in zip(watches, taken, strict=True)} for taken in timed]
        rows = {}
        for name, session in sessions.items():
            error = compare_outputs([session.run(s) for s in samples], reference).value("relative_l2")
            ms = float(np.median([r[name] for r in rounds]))
            speedup = float(np.median([r["FP32"] / r[name] for r in rounds]))
            rows[name] = {"median_ms": ms, "speedup": speedup, "relative_l2": error}
            print(f"{name:<24} {ms:8.4f} ms  {speedup:5.2f}x  relative L2 {error:.2e}")
        save(options.json, {"model": options.model.name, "batch": options.batch, "rows": rows, "rounds": rounds})
        for session in sessions.values():
            session.close()


if __name__ == "__main__":
    main()
