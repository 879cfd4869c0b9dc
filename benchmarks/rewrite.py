"""Time one rewrite against ONNX Runtime's converters and ModelOpt AutoCast: seconds, Casts, validity, peak memory.

    python -m benchmarks.rewrite                        # transformers built here
    python -m benchmarks.rewrite --model vit_s.onnx     # and a model of yours; may be repeated

The same nodes are kept in FP32 by every method: a random half of the layer groups. Each method runs in a process of its
own. Its time is that of the conversion alone for the others (the model is in memory, nothing is written), and for
mptune of all that one plan costs: resolving it and writing the typed model beside the weight bank. mptune's time is the
median over plans, each of them new to it and each after the processor's caches were filled with something else, as they
are in a search, where an engine is built between two plans. On a busy machine that grows with what else runs there, and
more for what takes longer: so growth is also given in the process's own processor time. Its memory is the peak of
loading, grouping, writing the bank and one rewrite; that of the others, of loading and converting.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.common import save
from benchmarks.memory import peak_mib
from benchmarks.models.synthetic import transformer, with_nodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank

SHAPES: dict[str, Callable[[], onnx.ModelProto]] = {
    "transformer, 282 nodes": lambda: transformer(10),
    "decomposed LayerNorm, 418": lambda: transformer(9, decomposed=True),
    "transformer, 1682": lambda: transformer(60),
}
SIZES = (1_000, 10_000, 50_000)
PLANS = 15
CACHE_BYTES = 1 << 27
TIMEOUT_S = 600


def random_plan(model_sha256: str, ids: list[str], seed: int) -> PrecisionPlan:
    rng = random.Random(seed)
    return PrecisionPlan(model_sha256, {i: rng.choice(DEFAULT_PRECISIONS) for i in ids})


def kept_in_fp32(path: Path) -> list[str]:
    """Names of the nodes that the first plan leaves in FP32, those without a precision included."""
    model = load_model(path)
    groups = find_groups(model)
    plan = random_plan(model.sha256, [g.id for g in groups], 0)
    precision = Rewriter(GroupedModel(model, groups)).node_precisions(plan)
    return [node.name for node in model.nodes if precision.get(node.name) is not Precision.FP16]


def mptune_rewrite(path: Path, folder: Path) -> dict[str, Any]:
    start = time.perf_counter()
    model = load_model(path)
    loaded = time.perf_counter()
    groups = find_groups(model)
    grouped = time.perf_counter()
    bank = WeightBank.write(model, folder / "bank")
    rewriter = Rewriter(GroupedModel(model, groups), bank)
    prepared = time.perf_counter()
    plans = [random_plan(model.sha256, [group.id for group in groups], seed) for seed in range(PLANS + 1)]
    out = rewriter.write(plans[0], bank.directory / "0.onnx")
    first = time.perf_counter()
    peak = peak_mib()
    other_data = np.zeros(CACHE_BYTES, np.uint8)
    seconds, busy = [], []
    for number, plan in enumerate(plans[1:], start=1):
        other_data += 1
        begun, busy_before = time.perf_counter(), time.process_time()
        rewriter.write(plan, bank.directory / f"{number}.onnx")
        busy.append(time.process_time() - busy_before)
        seconds.append(time.perf_counter() - begun)
    return {
        "s": statistics.median(seconds),
        "cpu_s": statistics.median(busy),
        "first_s": first - prepared,
        "load_s": loaded - start,
        "group_s": grouped - loaded,
        "bank_s": prepared - grouped,
        "ideal": rewriter.types.resolve(plans[0]).added_casts,
        **judged(out, path),
        "peak_mib": peak,
    }


def ort_float16(path: Path, folder: Path) -> dict[str, Any]:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model, names = onnx.load(path), json.loads((folder / "fp32.json").read_text())
    start = time.perf_counter()
    converted = convert_float_to_float16(model, keep_io_types=True, node_block_list=names)
    return finished(start, converted, path, folder)


def ort_sorted(path: Path, folder: Path) -> dict[str, Any]:
    from onnxruntime.transformers.onnx_model import OnnxModel

    model, names = OnnxModel(onnx.load(path)), json.loads((folder / "fp32.json").read_text())
    start = time.perf_counter()
    model.convert_float_to_float16(use_symbolic_shape_infer=False, keep_io_types=True, node_block_list=names)
    model.topological_sort()
    return finished(start, model.model, path, folder)


def autocast(path: Path, folder: Path) -> dict[str, Any]:
    import re

    from modelopt.onnx.autocast import convert_to_mixed_precision

    names = json.loads((folder / "fp32.json").read_text())
    start = time.perf_counter()
    converted = convert_to_mixed_precision(
        str(path),
        low_precision_type="fp16",
        nodes_to_exclude=[f"^{re.escape(name)}$" for name in names],
        data_max=float("inf"),
        init_max=float("inf"),
        keep_io_types=True,
    )
    return finished(start, converted, path, folder)


METHODS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "mptune": mptune_rewrite,
    "ORT float16": ort_float16,
    "ORT OnnxModel + sort": ort_sorted,
    "AutoCast": autocast,
}


def finished(start: float, converted: onnx.ModelProto, path: Path, folder: Path) -> dict[str, Any]:
    took = time.perf_counter() - start
    onnx.save(converted, folder / "converted.onnx")
    return {"s": took, **judged(folder / "converted.onnx", path)}


def judged(out: Path, original: Path) -> dict[str, Any]:
    """Casts that were added, peak memory up to here, and whether checker and ONNX Runtime take the model."""
    import onnxruntime as ort

    peak = peak_mib()
    casts = [
        sum(node.op_type == "Cast" for node in onnx.load(path, load_external_data=False).graph.node)
        for path in (out, original)
    ]
    verdict = "valid"
    try:
        onnx.checker.check_model(str(out), full_check=True)
    except Exception:  # whatever the checker raises
        verdict = "invalid"
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        if verdict == "valid":
            disabled = ["MatmulTransposeFusion"]  # crashes on FP16 products on the CPU (1.31), whoever made them
            ort.InferenceSession(str(out), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
    except Exception:
        verdict = "does not load"
    return {"casts": casts[0] - casts[1], "verdict": verdict, "peak_mib": peak}


def measured(method: str, path: Path, folder: Path, python: str) -> dict[str, Any]:
    """The figures of one method, from a process of its own; the reason where there are none."""
    command = [python, "-m", "benchmarks.rewrite", "--method", method, "--model", str(path), "--folder", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {TIMEOUT_S} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        missing = any("ModuleNotFoundError" in line or "ImportError" in line for line in lines)
        return {"failed": "not installed" if missing else (lines or [f"exit status {done.returncode}"])[-1][:60]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    ours = rows["mptune"]
    print(f"\n{name}")
    if "failed" not in ours:
        print(
            f"  load {ours['load_s']:.2f} s, groups {ours['group_s']:.3f} s, bank and rewriter {ours['bank_s']:.2f} s"
        )
    for method, row in rows.items():
        if "failed" in row:
            print(f"  {method:<22} {row['failed']}")
            continue
        ratio = row["s"] / ours["s"]
        print(f"  {method:<22} {1e3 * row['s']:>10.1f} ms {ratio:>8.0f} x  {row['casts']:>6} casts (ideal "
              f"{ours['ideal']})  {row['verdict']:<14} {row['peak_mib']:>6.0f} MiB", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="another model; may be repeated")
    parser.add_argument("--largest-rival", type=int, default=2_000, help="rivals sit out graphs with more nodes")
    parser.add_argument("--modelopt", default=sys.executable, help="Python with ModelOpt, where it is another one")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.method:
        print(json.dumps(METHODS[options.method](options.model[0], options.folder)))
        return
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        paths = {path.name: path.resolve() for path in options.model}
        for title, build in (*SHAPES.items(), *((f"synthetic, {n}", lambda n=n: with_nodes(n)) for n in SIZES)):
            paths[title] = Path(name) / f"{len(paths)}.onnx"
            onnx.save(build(), paths[title])
        for title, path in paths.items():
            folder = Path(name) / path.stem
            folder.mkdir(exist_ok=True)
            (folder / "fp32.json").write_text(json.dumps(kept_in_fp32(path)))
            nodes = len(onnx.load(path, load_external_data=False).graph.node)
            rivals = [m for m in METHODS if m == "mptune" or nodes <= options.largest_rival]
            found[title] = {
                m: measured(m, path, folder, options.modelopt if m == "AutoCast" else sys.executable) for m in rivals
            }
            show(f"{title} ({nodes} nodes)", found[title])
    small, large = (found[f"synthetic, {n}"]["mptune"] for n in SIZES[1:])
    growth = {time: large[time] / small[time] for time in ("s", "cpu_s")}
    print(
        f"\nfrom {SIZES[1]} to {SIZES[2]} nodes: {growth['s']:.1f} times the time, {growth['cpu_s']:.1f} times the"
        " processor time"
    )
    save(options.json, {"models": found, "growth": growth})


if __name__ == "__main__":
    main()
