"""Random plans of every model of the corpus, built by TensorRT-RTX ahead of time: its builder needs no GPU.

Beside the corpus: a network with arithmetic on shapes, and a detector with RoiAlign, which TensorRT has as a plugin.

    python -m benchmarks.rtx_corpus [--plans 20] [--model NAME ...] [--json OUT]
    python -m benchmarks.rtx_corpus --networks --three --opset 22 --plans 10

Each plan becomes one engine for SM 8.6, 8.9 and 12.0, half of the plans at each granularity. A model that TensorRT-RTX
refuses in FP32 too is listed with its message. ``--networks`` takes whole networks, as exporters wrote them, in place
of the corpus; ``--three`` plans of FP32, FP16 and BF16, without what mptune keeps out of BF16 for TensorRT-RTX.
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
from mptune.engines.tensorrt.operators import refused_in_bf16
from mptune.errors import ModelError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import plans
from tests.networks.networks import FILES, filled

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


def measure(path: Path, count: int, library: Library, *, three: bool = False, opset: int | None = None) -> Row:
    row = Row(path.stem)
    try:
        model = load_model(path, opset=opset)
    except ModelError as error:  # ONNX's converter knows not every operator
        row.refused = error.message
        return row
    precisions = (*REDUCED, Precision.FP32) if three else (Precision.FP16, Precision.FP32)
    refused = refused_in_bf16(model, "tensorrt-rtx") if three else ()
    with tempfile.TemporaryDirectory() as folder:
        typed = Path(folder) / "typed.onnx"
        bank = WeightBank.write(model, Path(folder), precisions=REDUCED if three else REDUCED[:1])
        for granularity in GRANULARITIES:
            groups = find_groups(model, granularity)
            grouped = GroupedModel(model, groups)
            rewriter = Rewriter(grouped, bank)
            lacking = {grouped.owners[node.node] for node in refused if node.node in grouped.owners}
            some = [
                plan.replace(dict.fromkeys(lacking.intersection(plan.bf16_groups), Precision.FP32))
                for plan in plans(model, groups, count // len(GRANULARITIES) - len(precisions), 11, precisions)
            ]
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
    parser.add_argument("--networks", action="store_true", help="whole networks in place of the corpus")
    parser.add_argument("--three", action="store_true", help="plans of FP32, FP16 and BF16")
    parser.add_argument("--opset", type=int, help="raise the models to this operator set")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    library = load_library("tensorrt-rtx")
    print(f"TensorRT-RTX {library.version}")
    print(f"{'model':<32}{'plans':>6}{'distinct':>9}{'built':>6}{'s each':>8}{'kB each':>9}")
    settings = {"version": library.version, "plans": options.plans, "three": options.three, "opset": options.opset}
    rows: list[Row] = []
    started = time.perf_counter()
    for name in FILES if options.networks else (*(path.stem for path in CORPUS), *NETWORKS):
        if options.model is not None and name not in options.model:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = filled(name, Path(folder)) if name in FILES else CORPUS[0].with_stem(name)
            row = measure(path, options.plans, library, three=options.three, opset=options.opset)
        rows.append(row)
        figures = f"{row.plans:>6}{row.distinct:>9}{row.built:>6}{row.build_s:>8.2f}{row.kilobytes:>9.0f}"
        print(f"{row.model:<32}" + ("  not in FP32 either" if row.refused else figures), flush=True)
        save(options.json, {**settings, "rows": [asdict(row) for row in rows]})
    print(f"{time.perf_counter() - started:.0f} s")
    for row in rows:
        for text in (*((f"in FP32: {row.refused}",) if row.refused else ()), *row.failures):
            print(f"{row.model}: {text}")


if __name__ == "__main__":
    main()
