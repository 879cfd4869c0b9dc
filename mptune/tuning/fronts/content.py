"""The content of a front: the points, the choice among them, and what the search says about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mptune.choice import Choice
from mptune.finding import Finding
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import encode
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation
from mptune.tuning.fronts.dominance import Neighbour, neighbours
from mptune.tuning.fronts.limits import metric_values, shown_metrics

FRONT_FORMAT = 1


@dataclass(frozen=True)
class FrontContent:
    """The fields of ``mptune.Front``, which describes them, and their JSON: what its table shows."""

    run_dir: Path
    model_path: Path
    model_sha256: str
    target: str
    engine: str
    device: str
    metric: str
    fp32: Evaluation
    fp16: Evaluation | None
    points: tuple[Evaluation, ...]
    chosen: Evaluation | None
    choice: Choice
    evaluations: int
    failures: int
    hypervolume: float
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    explanation: Explanation = field(default_factory=Explanation)
    reported_metrics: tuple[str, ...] = ()
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """The content of front.json: every key always there, null where unknown."""
        choice = self.choice
        content: dict[str, Any] = encode(
            {
                "format": FRONT_FORMAT,
                "model": {"path": self.model_path, "sha256": self.model_sha256},
                "target": {"name": self.target, "engine": self.engine, "device": self.device},
                "metric": self.metric,
                "baseline": {"fp32": self._point(self.fp32), "fp16": self.fp16 and self._point(self.fp16)},
                "points": [self._point(point) for point in self.points],
                "chosen": self.chosen and self.chosen.plan.fingerprint,
                "choice": {
                    "reason": choice.kind,
                    "limits_met": self.limits_met,
                    "nearest": choice.nearest,
                    "replaced": choice.replaced,
                    "neighbours": self.neighbours,
                },
                "evaluations": self.evaluations,
                "failures": self.failures,
                "hypervolume": self.hypervolume,
                "findings": self.findings,
                "warnings": self.warnings,
            }
        )
        return content

    @property
    def chosen_reason(self) -> str:
        """Why the chosen plan was chosen, one line."""
        return self.choice.text + self.hint

    @property
    def limits_met(self) -> bool:
        """False where limits were asked for, and no plan meets them."""
        return not self.choice.unmet

    @property
    def fp16_name(self) -> str:
        """What the all-FP16 baseline is called: groups that are pinned stay FP32 in it."""
        return "all-FP16" if self.fp16 is None else fp16_name(self.fp16.plan)

    @cached_property
    def metrics(self) -> Mapping[str, str]:
        """Short name -> metric of those whose own values are shown beside the error."""
        every = (*self.points, self.fp32, self.fp16, self.chosen)
        return shown_metrics(filter(None, every), self.reported_metrics)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The plans that every view names beside the chosen one."""
        return () if self.chosen is None else neighbours(self.points, self.chosen)

    def _point(self, evaluation: Evaluation) -> dict[str, Any]:
        """The POINT of an evaluation, its metrics' own values, and why its FP32 groups are FP32."""
        metrics = {
            name: dict(zip(("search", "held_out"), metric_values(evaluation, metric), strict=True))
            for name, metric in self.metrics.items()
        }
        kept = self.explanation.of(evaluation.plan.fingerprint)
        return {**evaluation.to_point(), "metrics": encode(metrics), "fp32": encode(kept)}


def fp16_name(plan: PrecisionPlan) -> str:
    """What a plan is called that has every group in FP16 but for those that are BF16, or pinned to FP32."""
    first, *others = plan.reduced_counts or (Precision.FP16,)
    pinned = len(plan.fp32_groups)
    but = [f"{plan.reduced_counts[precision]} in {precision.name}" for precision in others]
    but += [f"{pinned} pinned"] * bool(pinned)
    return f"all-{first.name} but {' and '.join(but)}" if but else f"all-{first.name}"
