"""How long the page of a large search takes to be written and drawn, and how large it is.

``python -m benchmarks.page [--evaluations 2000] [--groups 500] [--keep page.html]`` makes a search's results over a
synthetic network by the error law (root of summed squares) and a latency law with boundaries, writes report.html and
opens it in Chromium (Debian: chromium, chromium-driver; extra ``test-browser``). Prints JSON: seconds to write, bytes,
seconds from the navigation to the first drawn page, seconds for one selection and for opening the table of all plans.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.browser import open_browser, show
from mptune.choice import Choice
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import Latency
from mptune.graph.groups import LayerGroup
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.reporting.page import PageContent, write_report
from mptune.tuning.choosing import choose
from mptune.tuning.dominance import hypervolume, hypervolumes, pareto
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.explanation import Explanation, GroupWorth, Kept
from mptune.tuning.front import Front
from mptune.tuning.result import Progress

SAMPLES = 48
REFERENCE_ERROR = 3e-2


def synthetic(evaluations: int, count: int, seed: int = 0) -> PageContent:
    """Results as a search of ``evaluations`` plans over ``count`` groups leaves them."""
    random = np.random.default_rng(seed)
    errors = 10.0 ** random.uniform(-5.5, -2.5, count)
    gains = random.gamma(1.0, 4.0 / count, count)
    kinds = ("matmul", "norm", "softmax", "elementwise")
    groups = tuple(
        LayerGroup(
            f"g{k:03d}",
            f"encoder/layers.{k // 10}/block/{kinds[k % 4]}_{k}",
            kinds[k % 4],
            (f"/encoder/layers.{k // 10}/block/{kinds[k % 4]}_{k}/MatMul",),
            {"MatMul": 1, "Add": 2},
            "no FP16 kernel" if k % 50 == 7 else None,
        )
        for k in range(count)
    )
    free = np.array([group.pinned is None for group in groups])
    order = np.argsort(errors / gains)
    made = []
    for number in range(evaluations):
        half = np.zeros(count, dtype=bool)
        if number == 1:
            half[:] = True
        elif number > 1:
            half[order[: random.integers(1, count)]] = True
            half ^= random.random(count) < random.choice([0.005, 0.02, 0.05])
        made.append(_evaluation(number, half & free, errors, gains, groups, random))
    points = pareto(made)
    choice = choose(made, Choice(), ("relative_l2",))
    explanation = _explanation(points, groups, errors, gains)
    front = Front(
        run_dir=Path("large.mptune"),
        model_path=Path("large.onnx"),
        model_sha256="0" * 64,
        target="synthetic",
        engine="none",
        device="none",
        metric="relative_l2",
        fp32=made[0],
        fp16=made[1],
        points=points,
        chosen=next(evaluation for evaluation in made if evaluation.plan.fingerprint == choice.chosen),
        choice=choice,
        evaluations=evaluations,
        failures=0,
        hypervolume=hypervolume(points, made[0]),
        explanation=explanation,
    )
    volume = hypervolumes(made, made[0], REFERENCE_ERROR)
    progress = Progress(volume, REFERENCE_ERROR, evaluations, *(s * evaluations for s in (20.0, 15.0, 23.0)))
    return PageContent(front, made, groups, None, progress)


def _evaluation(
    number: int, half: Any, errors: Any, gains: Any, groups: tuple[LayerGroup, ...], random: np.random.Generator
) -> Evaluation:
    precision = {g.id: Precision.FP16 if h else Precision.FP32 for g, h in zip(groups, half, strict=True)}
    error = float(np.sqrt((errors[half] ** 2).sum()))
    ms = 10.0 - float(gains[half].sum()) + 0.002 * int(np.diff(half).sum()) + float(random.normal(0, 0.003))
    samples = tuple(float(v) for v in error * np.exp(random.normal(0, 0.1, SAMPLES)))
    names = ("relative_l2", "max_abs", "mean_abs", "non_finite")
    per_output = {"y": {name: samples if name != "non_finite" else (0.0,) * SAMPLES for name in names}}
    origin = {0: Origin("seed", "all-fp32"), 1: Origin("seed", "all-fp16")}.get(number, Origin("sampler"))
    return Evaluation(
        plan=PrecisionPlan("0" * 64, precision),
        number=number,
        origin=origin,
        latency=Latency(ms, ms * 1.01, ms * 1.02, (ms * 0.999, ms * 1.001), 0.002, "measured", (ms,)),
        error=OutputError(per_output),
        metric="relative_l2",
        error_source="measured",
        speedup=10.0 / ms,
        build_s=15.0,
    )


def _explanation(
    points: tuple[Evaluation, ...], groups: tuple[LayerGroup, ...], errors: Any, gains: Any
) -> Explanation:
    worths = tuple(
        GroupWorth(g.id, g.name, g.kind, float(e), float(m), 0.002, 1, g.pinned)
        for g, e, m in zip(groups, errors, gains, strict=True)
    )
    kept = {
        point.plan.fingerprint: tuple(
            Kept(worths[k], "error", worths[k].gain_ms)
            for k, group in enumerate(groups)
            if point.plan.precision[group.id] is Precision.FP32
        )
        for point in points
    }
    return Explanation(kept, worths, "synthetic")


DRAWN = """
const done = arguments[0];
const start = performance.now();
const wait = (then) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(then)));
const key = new KeyboardEvent('keydown', {key: 'Home', bubbles: true});
document.querySelector('.chart').dispatchEvent(key);
wait(() => {
  const selected = performance.now() - start;
  const again = performance.now();
  document.querySelector('#points').open = true;
  setTimeout(() => {
    document.querySelector('#every-plan').click();
    wait(() => done({select_s: selected / 1000, table_s: (performance.now() - again) / 1000,
                     rows: document.querySelectorAll('#points tbody tr').length,
                     faint: document.querySelectorAll('.chart .faint').length}));
  }, 30);
});
"""


def drawn(page: Path) -> dict[str, Any]:
    """Open the page in Chromium and time it."""
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as driver:
        start = time.perf_counter()
        show(driver, page)
        draw_s = time.perf_counter() - start
        return {"draw_s": draw_s, **driver.execute_async_script(DRAWN)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    content = synthetic(arguments.evaluations, arguments.groups)
    with tempfile.TemporaryDirectory() as folder:
        page = arguments.keep or Path(folder) / "report.html"
        start = time.perf_counter()
        write_report(content, page)
        write_s = time.perf_counter() - start
        found = {"points": len(content.front.points), "write_s": write_s, "bytes": page.stat().st_size, **drawn(page)}
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
