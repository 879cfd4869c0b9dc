"""Random plans of every model of the corpus, built by TensorRT-RTX ahead of time: its builder needs no GPU.

Beside the corpus: a network with arithmetic on shapes, and a detector with RoiAlign, which TensorRT has as a plugin.

python -m benchmarks.rtx_corpus [--plans 20] [--model NAME ...] [--json OUT]

Each plan becomes one engine for SM 8.6, 8.9 and 12.0, half of the plans at each granularity. A model that TensorRT-RTX
refuses in FP32 too is listed with its message.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import save
from mptune.engines.base import EngineError
from mptune.engines.tensorrt.builder import BuildOptions, build_engine, engine_faults
from mptune.engines.tensorrt.library import Library, load_library
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import plans
from tests.networks.networks import filled

NETWORKS = ("shape_arithmetic_torchscript_12", "two_stage_torchscript_16")
CORPUS = sorted((Path(__file__).resolve().parent.parent / "tests" / "graph" / "corpus").glob("*.onnx"))
GRANULARITIES = ("fusion", "op")


@dataclass
class Row:
    """Results of one model's plans.

    Attributes:
        plans: how many were tried, all-FP16 and all-FP32 among them.
        distinct: how many of them differ: a model of few groups has few.
        built: how many gave an engine whose header TensorRT-RTX's own check accepts.
        build_s: seconds of one build, the mean.
        kilobytes: size of one engine, the mean.
        refused: TensorRT-RTX's message for the model in FP32; None if it accepts the model.
        failures: TensorRT-RTX's messages for failed plans.
    """

    model: str
    plans: int = 0
    distinct: int = 0
    built: int = 0
    build_s: float = 0.0
    kilobytes: float = 0.0
    refused: str | None = None
    failures: tuple[str, ...] = ()


def measure(path: Path, count: int, library: Library) -> Row:
    model = load_model(path)
    row = Row(path.stem)
    with tempfile.TemporaryDirectory() as folder:
        typed = Path(folder) / "typed.onnx"
        bank = WeightBank.write(model, Path(folder))
        for granularity in GRANULARITIES:
            groups = find_groups(model, granularity)
            rewriter = Rewriter(GroupedModel(model, groups), bank)
            some = plans(model, groups, count // len(GRANULARITIES) - 2, seed=11)
            row.distinct += len({plan.fingerprint for plan in some})
            fp32 = PrecisionPlan.uniform(model.sha256, [group.id for group in groups], Precision.FP32)
            row.refused = row.refused or rtx.refusal(library, rewriter.write(fp32, typed))
            if row.refused:
                break
            for plan in some:
                build(row, library, plan, rewriter.write(plan, typed))
    row.build_s /= max(row.built, 1)
    row.kilobytes /= max(row.built, 1)
    return row


def build(row: Row, library: Library, plan: PrecisionPlan, typed: Path) -> None:
    row.plans += 1
    started = time.perf_counter()
    try:
        options = BuildOptions("tensorrt-rtx", capabilities=rtx.COMPUTE_CAPABILITIES)
        built = build_engine(library, typed, options, rtx.outlines(typed))
    except EngineError as error:
        row.failures += (f"{plan.fingerprint}: {error.kind.value}: {error.message}",)
        return
    faults = engine_faults(library, built.memory)
    if faults:
        row.failures += (f"{plan.fingerprint}: header: {', '.join(faults)}",)
        return
    row.built += 1
    row.build_s += time.perf_counter() - started
    row.kilobytes += built.memory.nbytes / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20, help="random plans of each model, half at each granularity")
    parser.add_argument("--model", nargs="*", default=None, help="only these models of the corpus")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    library = load_library("tensorrt-rtx")
    print(f"TensorRT-RTX {library.version}")
    print(f"{'model':<32}{'plans':>6}{'distinct':>9}{'built':>6}{'s each':>8}{'kB each':>9}")
    rows, started = [], time.perf_counter()
    for name in (*(path.stem for path in CORPUS), *NETWORKS):
        if options.model is not None and name not in options.model:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = filled(name, Path(folder)) if name in NETWORKS else CORPUS[0].with_stem(name)
            row = measure(path, options.plans, library)
        rows.append(row)
        figures = f"{row.plans:>6}{row.distinct:>9}{row.built:>6}{row.build_s:>8.2f}{row.kilobytes:>9.0f}"
        print(f"{row.model:<32}" + ("  not in FP32 either" if row.refused else figures), flush=True)
    print(f"{time.perf_counter() - started:.0f} s")
    for row in rows:
        for text in (*((f"in FP32: {row.refused}",) if row.refused else ()), *row.failures):
            print(f"{row.model}: {text}")
    save(options.json, {"version": library.version, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
