"""Random plans of every model of the corpus: valid, run by ONNX Runtime, with no Cast in vain; built by TensorRT-RTX.

python -m benchmarks.corpus [--plans 100] [--tensorrt-rtx 8] [--model NAME ...] [--json OUT]

TensorRT-RTX's parser and builder need no GPU: each plan becomes one engine for SM 8.6, 8.9 and 12.0. What it does not
support even in FP32 is listed with its own message.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import save
from mptune.engines.loading import load_typed_model
from mptune.engines.tensorrt.library import Library, load_library
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph import rtx
from tests.graph.helpers import feeds, plans, run
from tests.graph.verify import verify

CORPUS = sorted((Path(__file__).resolve().parent.parent / "tests" / "graph" / "corpus").glob("*.onnx"))
GRANULARITIES = ("fusion", "op")


@dataclass
class Row:
    """What became of one model's plans.

    Attributes:
        distinct: how many of the random plans differ: a model of few groups has few.
        valid: plans whose typed model passes the checks, keeps the interface and realises the plan with ideal Casts.
        ran: plans whose typed model and emulation both ran in ONNX Runtime.
        casts: Casts added, the mean over the plans.
        built: plans that TensorRT-RTX built, of those it was given; None where it was not asked.
        refused: what TensorRT-RTX said of the model itself, in FP32.
    """

    model: str
    nodes: int
    groups: int
    plans: int = 0
    distinct: int = 0
    valid: int = 0
    ran: int = 0
    casts: float = 0.0
    built: int | None = None
    asked: int = 0
    refused: str | None = None
    failures: tuple[str, ...] = ()


def measure(path: Path, count: int, trt: Library | None, built: int) -> Row:
    """Half of the plans at each granularity."""
    model = load_typed_model(path)
    row = Row(path.stem, len(model.nodes), len(find_groups(model)))
    with tempfile.TemporaryDirectory() as folder:
        bank = WeightBank.write(model, Path(folder))
        for granularity in GRANULARITIES:
            groups = find_groups(model, granularity)
            grouped = GroupedModel(model, groups)
            rewriter, emulator = Rewriter(grouped, bank), Emulator(grouped, bank)
            some = plans(model, groups, count // len(GRANULARITIES) - 2, seed=7)
            row.distinct += len({plan.fingerprint for plan in some})
            for plan in some:
                _measure_plan(row, rewriter, emulator, plan, Path(folder))
            if trt is not None:
                _build(row, rewriter, some[: built // len(GRANULARITIES)], trt, Path(folder))
        row.casts /= max(row.plans, 1)
    return row


def _measure_plan(row: Row, rewriter: Rewriter, emulator: Emulator, plan: PrecisionPlan, folder: Path) -> None:
    row.plans += 1
    try:
        typed = rewriter.write(plan, folder / "typed.onnx")
        verify(rewriter, plan, typed)
        row.valid += 1
        row.casts += rewriter.types.resolve(plan).added_casts
        feed = feeds(rewriter.types.model)
        run(typed, feed)
        run(emulator.write(plan, folder / "emulated.onnx"), feed)
        row.ran += 1
    except Exception as error:
        row.failures += (f"{plan.fingerprint}: {type(error).__name__}: {error}",)


def _build(row: Row, rewriter: Rewriter, some: Sequence[PrecisionPlan], trt: Library, folder: Path) -> None:
    fp32 = PrecisionPlan.uniform(some[0].model_sha256, some[0].precision, Precision.FP32)
    row.refused = row.refused or rtx.refusal(trt, rewriter.write(fp32, folder / "typed.onnx"))
    if row.refused:
        return
    row.built = row.built or 0
    for plan in some:
        row.asked += 1
        said = rtx.refusal(trt, rewriter.write(plan, folder / "typed.onnx"))
        row.built += said is None
        if said is not None:
            row.failures += (f"{plan.fingerprint}: TensorRT-RTX: {said}",)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100, help="random plans of each model, half at each granularity")
    parser.add_argument("--tensorrt-rtx", type=int, default=0, metavar="N", help="build N of them with TensorRT-RTX")
    parser.add_argument("--model", nargs="*", default=None, help="only these models of the corpus")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    trt = load_library("tensorrt-rtx") if options.tensorrt_rtx else None
    chosen = [path for path in CORPUS if options.model is None or path.stem in options.model]
    columns = (("nodes", 6), ("groups", 7), ("plans", 6), ("distinct", 9), ("valid", 6), ("run", 5), ("casts", 7))
    print(f"{'model':<18}{''.join(f'{name:>{width}}' for name, width in columns)}  TensorRT-RTX")
    rows, start = [], time.perf_counter()
    for path in chosen:
        row = measure(path, options.plans, trt, options.tensorrt_rtx)
        rows.append(row)
        engines = "" if trt is None else "not in FP32 either" if row.refused else f"{row.built} of {row.asked}"
        print(
            f"{row.model:<18}{row.nodes:>6}{row.groups:>7}{row.plans:>6}{row.distinct:>9}{row.valid:>6}{row.ran:>5}{row.casts:>7.1f}"
            f"  {engines}",
            flush=True,
        )
    print(f"{time.perf_counter() - start:.0f} s")
    for row in rows:
        for text in (*((f"in FP32: {row.refused}",) if row.refused else ()), *row.failures[:5]):
            print(f"{row.model}: {text}")
    save(options.json, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
