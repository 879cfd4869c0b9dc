"""Load, group and rewrite a model of 3 GiB of weights, and say how much memory that took.

    python -m benchmarks.huge            # needs 13 GB of free disk in the temporary folder
    python -m benchmarks.huge --chain    # inspect and search a chain of 5,002 small nodes

Each step is a process of its own; its peak is VmHWM, the most resident memory it ever had, mapped pages included. For
the chain it is the memory (PSS) of the command and its workers together, and CPU seconds are those of all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import save
from benchmarks.memory import peak_mib
from benchmarks.trained.variants import run_step
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank

WIDTH, LAYERS, TOKENS = 8192, 8, 1 << 15
"""A table of 1 GiB, and eight products with 256 MiB of weights each."""
REWRITES = 20
LIMIT_MIB = 600
CHAIN_LIMIT_S = 900.0
DISK_BYTES = 13 << 30


def write_model(folder: Path) -> Path:
    """The model, its weights in external data; they are written in blocks of 16 MiB."""
    block = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * WIDTH**-0.5).tobytes()
    shapes = {"table": (TOKENS, WIDTH), **{f"w{i}": (WIDTH, WIDTH) for i in range(LAYERS)}}
    constants, offset = [], 0
    with (folder / "huge.bin").open("wb") as file:
        for name, shape in shapes.items():
            size = 4 * shape[0] * shape[1]
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "huge.bin"), ("offset", offset), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            for _ in range(size // len(block)):
                file.write(block)
            constants.append(tensor)
            offset += size
    nodes = [helper.make_node("Gather", ["table", "tokens"], ["x0"], name="embed/Gather")]
    for i in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"m{i}"], name=f"layer{i}/MatMul"))
        nodes.append(helper.make_node("Tanh", [f"m{i}"], [f"x{i + 1}"], name=f"layer{i}/Tanh"))
    graph = helper.make_graph(
        nodes,
        "huge",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info(f"x{LAYERS}", TensorProto.FLOAT, ["n", WIDTH])],
        constants,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(proto, folder / "huge.onnx")
    return folder / "huge.onnx"


def plans(model: Model, ids: list[str]) -> list[PrecisionPlan]:
    """The last group alone in FP16, which leaves more than 2 GiB, then random plans."""
    rng = random.Random(0)
    fp32 = PrecisionPlan.uniform(model.sha256, ids, Precision.FP32)
    drawn = [PrecisionPlan(model.sha256, {i: rng.choice(DEFAULT_PRECISIONS) for i in ids}) for _ in range(REWRITES - 1)]
    return [fp32.replace({ids[-1]: Precision.FP16}), *drawn]


def rewriting(folder: Path) -> dict[str, float]:
    """Load, group, write the bank, rewrite; seconds of each, milliseconds for one rewrite."""
    seconds: dict[str, float] = {}

    def timed(name: str, step: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = step()
        seconds[name] = time.perf_counter() - start
        return result

    model = timed("load_s", lambda: load_model(folder / "huge.onnx"))
    assert isinstance(model, Model)
    groups = find_groups(model)
    bank = timed("bank_s", lambda: WeightBank.write(model, folder / "bank"))
    assert isinstance(bank, WeightBank)
    rewriter = Rewriter(GroupedModel(model, groups), bank)
    made = plans(model, [g.id for g in groups])
    timed("rewrites", lambda: [rewriter.write(p, bank.directory / f"{i}.onnx") for i, p in enumerate(made)])
    seconds["rewrite_ms"] = 1e3 * seconds.pop("rewrites") / len(made)
    return {"nodes": len(model.nodes), "groups": len(groups), **seconds}


def exporting(folder: Path) -> dict[str, float]:
    """Write one plan self-contained: past 2 GiB, in two files."""
    model = load_model(folder / "huge.onnx")
    groups = find_groups(model)
    plan = plans(model, [g.id for g in groups])[0]
    start = time.perf_counter()
    path = Rewriter(GroupedModel(model, groups)).export(plan, folder / "exported" / "out.onnx")
    took = time.perf_counter() - start
    written = sum(p.stat().st_size for p in path.parent.iterdir())
    return {"export_s": took, "files": len([*path.parent.iterdir()]), "gib": written / 2**30}


def running(folder: Path) -> dict[str, float]:
    """Run rewritten and exported models in ONNX Runtime against the original."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False
    tokens = {"tokens": np.array([3, 1, 4, 1, 5])}
    outputs = []
    for path in (folder / "huge.onnx", folder / "bank" / "0.onnx", folder / "exported" / "out.onnx"):
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, tokens)[0].astype(np.float64))
        del session
    reference = np.linalg.norm(outputs[0])
    same = bool(np.array_equal(outputs[1], outputs[2]))
    return {"relative_l2": float(np.linalg.norm(outputs[1] - outputs[0]) / reference), "export_is_same": same}


def write_chain(folder: Path, layers: int = 1667) -> Path:
    """A chain of products with bias and activation, three nodes a layer, and one more bias; 8 samples beside it."""
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(rng.normal(0, 0.18, (64, 64)).astype(np.float32), f"w{k}") for k in range(4)]
    constants += [numpy_helper.from_array(rng.normal(0, 0.01, 64).astype(np.float32), f"b{k}") for k in range(4)]
    nodes, x = [], "x"
    for layer in range(layers):
        for op, constant in (("MatMul", f"w{layer % 4}"), ("Add", f"b{layer % 4}"), ("Relu", "")):
            name = f"/{layer}/{op}"
            nodes.append(helper.make_node(op, [x, constant] if constant else [x], [name], name=name))
            x = name
    nodes.append(helper.make_node("Add", [x, "b0"], ["y"], name="y"))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in ("x", "y"))
    proto = helper.make_model(
        helper.make_graph(nodes, "chain", [x], [y], constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(proto, folder / "chain.onnx")
    np.savez(folder / "chain.npz", x=rng.standard_normal((8, 64)).astype(np.float32))
    return folder / "chain.onnx"


def chain(folder: Path) -> dict[str, Any]:
    """Inspect and search the chain as a user does; seconds, CPU seconds and memory of each."""
    model, found = write_chain(folder), dict[str, Any]()
    for command in (["inspect"], ["search", "--budget", "3", "--out", str(folder / "run.mptune")]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        data = ["--data", str(model.with_suffix(".npz"))]
        row = run_step([sys.executable, "-m", "mptune", command[0], str(model), *data, *command[1:]], CHAIN_LIMIT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found[command[0]] = {**row, "cpu_s": round(cpu_s, 1)}
        print(f"{command[0]:<10} {found[command[0]]}", flush=True)
    return found


STEPS = {"rewriting": rewriting, "exporting": exporting, "running": running}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work, in place of the temporary folder")
    parser.add_argument("--step", choices=sorted(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--chain", action="store_true", help="a chain of small nodes in place of large weights")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.step:
        print(json.dumps({**STEPS[options.step](options.folder), "peak_mib": peak_mib()}))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.chain:
            save(options.json, chain(folder))
            return
        if shutil.disk_usage(folder).free < DISK_BYTES:
            raise SystemExit(f"{folder} has less than {DISK_BYTES >> 30} GiB free: give another --folder")
        print(f"{write_model(folder)}: {(folder / 'huge.bin').stat().st_size / 2**30:.2f} GiB of weights")
        found = {}
        for step in STEPS:
            command = [sys.executable, "-m", "benchmarks.huge", "--step", step, "--folder", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[step] = json.loads(done.stdout)
            figures = ", ".join(f"{k} {v:.4g}" for k, v in found[step].items() if k != "peak_mib")
            print(f"{step:<10} peak {found[step]['peak_mib']:7.0f} MiB   {figures}", flush=True)
    save(options.json, found)
    if max(found[step]["peak_mib"] for step in ("rewriting", "exporting")) > LIMIT_MIB:
        raise SystemExit(f"more than {LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
