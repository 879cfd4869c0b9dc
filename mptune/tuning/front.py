"""Front: the non-dominated evaluations, the choice, and what the search says about them; as JSON, table and records."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.choice import Choice
from mptune.data.metrics.accuracy import LEAST_ERROR
from mptune.data.metrics.table import undirected
from mptune.errors import PlanError
from mptune.finding import Finding
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import encode
from mptune.printable import WIDEST, cut, printable
from mptune.settings import check_limits
from mptune.tuning import choosing, dominance, texts
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation, reason_counts

FRONT_FORMAT = 1

MOST_ROWS = 12
"""A longer front is shown by this many of its rows: the ends, the baselines, the choice, and an even spread."""

_WIDTH = 100  # of the table where it is no terminal that shows it


@dataclass(frozen=True, repr=False)
class Front:
    """What a search found: the trade-off of latency against error, and the plan taken from it.

    Attributes:
        fp32: all-FP32; beside it all-FP16 after pins and all-FP32 with TF32, None where these were not evaluated.
        points: sorted by latency, non-dominated beyond noise; judged by held-out error where it is known.
        chosen: the plan in ``chosen/``; None where nothing is feasible, or nothing was chosen yet.
        choice: how it was chosen, and which limits no plan meets.
        nearest: the plan nearest to limits that no plan meets; None where they are met.
        proposed: the choice that would be made: of a search that is not over, or under limits that were asked about.
        evaluations: plans evaluated, seeds and failures counted in.
        failures: those of them that did not build or run, or whose outputs were not finite.
        hypervolume: share of latency and error that the points gain, 0 to 1; for comparing searches.
        warnings: that have no code, one line each.
        findings: the most severe first; a warning about groups that the chosen plan keeps in FP32 is ``info``.
        explanation: why groups stay FP32, plan by plan, and what each group costs and gains.
        reported_metrics: that were taken beside the objective, ``metric``.
        unpinned: id and emulated error of all-FP16 without the pins of findings; None where there are none.
    """

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
    nearest: Evaluation | None = None
    proposed: Choice | None = None
    tf32: Evaluation | None = None
    unpinned: tuple[str, float] | None = None

    def best(
        self,
        *,
        max_error: float | None = None,
        max_latency_ms: float | None = None,
        max_memory_bytes: int | None = None,
    ) -> Evaluation:
        """Take one point of the front, as ``mptune.pick`` chooses among all plans; nothing is written.

        Args:
            max_error: take the fastest point whose error is at most this; None stands for the metric's default limit.
            max_latency_ms: take the most exact point that is at most this slow; with both, the fastest of these.
            max_memory_bytes: of the engine and its context.

        Raises:
            PlanError: no point meets the limits.
        """
        check_limits(max_error, max_latency_ms, max_memory_bytes)
        asked = Choice(max_error=max_error, max_latency_ms=max_latency_ms, max_memory_bytes=max_memory_bytes)
        choice = choosing.choose(self.points, asked, (self.metric,), self.tf32)
        point = next((each for each in self.points if each.plan.fingerprint == choice.chosen), None)
        if point is None:
            raise PlanError("no plan is feasible", "`mptune report` on the run directory shows what failed")
        if choice.unmet is not None:
            limits, _, nearest = texts.unmet_text(choice, self.metric, point).partition("; ")
            raise PlanError(limits, nearest.partition(";")[0])
        return point

    def __repr__(self) -> str:
        """What was searched, the table, the choice; under 2,000 characters."""
        stream = io.StringIO()
        table, notes = front_table(self, _WIDTH)
        console = Console(file=stream, width=_WIDTH, no_color=True, highlight=False, force_terminal=False)
        console.print(table, crop=False)
        model, target, engine, device, metric = (
            cut(str(name)) for name in (self.model_path.name, self.target, self.engine, self.device, self.metric)
        )
        counts = f"{len(self.points)} points from {self.evaluations} plans"
        samples = " on held-out samples" if is_held_out(self) else ""
        plan = "none" if self.chosen is None else self.chosen.plan.fingerprint
        lines = (
            f"Front of {model} on {target}: {counts}{f', {self.failures} failed' if self.failures else ''}",
            f"latency {self.fp32.latency.source} ({engine}, {device}), error: {metric}{samples}",
            *map(str.rstrip, stream.getvalue().splitlines()),
            notes,
            f"chosen: {plan}, {cut(self.chosen_reason, 2 * WIDEST)}",
        )
        return "\n".join(printable(line) for line in lines if line)

    def to_json(self) -> dict[str, Any]:
        """The content of front.json: every key always there, null where unknown."""

        def point(evaluation: Evaluation | None) -> dict[str, Any] | None:
            if evaluation is None:
                return None
            sets = ("search", "held_out")
            metrics = {n: dict(zip(sets, evaluation.values_of(m), strict=True)) for n, m in self.metrics.items()}
            fp32 = () if evaluation is self.tf32 else self.explanation.fp32_groups(evaluation.plan.fingerprint)
            return {**evaluation.to_point(), "metrics": metrics, "fp32": fp32}

        choice, beside = self.choice, []
        for _, other in self.neighbours:
            assert self.chosen is not None
            before, after = (max(error, LEAST_ERROR) for error in dominance.shared_errors(self.chosen, other))
            delta_ms = other.latency.median_ms - self.chosen.latency.median_ms
            beside.append({"plan": other.plan.fingerprint, "latency_ms_delta": delta_ms, "error_ratio": after / before})
        document = {
            "format": FRONT_FORMAT,
            "model": {"path": self.model_path, "sha256": self.model_sha256},
            "target": {"name": self.target, "engine": self.engine, "device": self.device},
            "metric": self.metric,
            "baseline": {"fp32": point(self.fp32), "fp16": point(self.fp16), "tf32": point(self.tf32)},
            "points": list(map(point, self.points)),
            "chosen": self.chosen and self.chosen.plan.fingerprint,
            "chosen_point": point(self.chosen),
            "choice": {
                "reason": choice.kind,
                "limits": choice.limit_values,
                "limits_met": self.limits_met,
                "nearest": choice.nearest,
                "replaced": choice.replaced,
                "neighbours": beside,
            },
        }
        same = ("evaluations", "failures", "hypervolume", "findings", "warnings")
        content: dict[str, Any] = encode(document | {name: getattr(self, name) for name in same})
        return content

    @property
    def chosen_reason(self) -> str:
        """Why the chosen plan was chosen, and what would be chosen now, one line."""
        proposed, fp32 = self.proposed, self.fp32.plan
        text, who = "nothing is in chosen/ yet", "as the search stands it would be"
        if self.chosen is not None:
            text = texts.choice_text(self.choice, self.metric, fp32)
            who = "`mptune pick` with the same options would choose"
        if proposed is None:
            return "no plan is feasible" if self.chosen is None else text
        return f"{text}; {who} {proposed.chosen}, {texts.choice_text(proposed, self.metric, fp32)}"

    @property
    def unmet(self) -> str:
        """Which limits no plan meets, and the nearest plan, one line; empty where they are met."""
        return texts.unmet_text(self.choice, self.metric, self.nearest)

    @property
    def limits_met(self) -> bool:
        """False where limits were asked for, and no plan meets them."""
        return self.choice.unmet is None

    @property
    def fp16_name(self) -> str:
        """What the all-FP16 baseline is called: groups that are pinned stay FP32 in it."""
        return "all-FP16" if self.fp16 is None else fp16_name(self.fp16.plan)

    @cached_property
    def metrics(self) -> Mapping[str, str]:
        """Short name -> metric of those whose own values are shown beside the error."""
        every = [e for e in (*self.points, self.fp32, self.fp16, self.chosen) if e is not None]
        # The objective is among them where its own value is not its error, as of an accuracy.
        own = (e.metric for e in every if e.has_own_value and e.values_of(e.metric)[0] != e.error_value)
        metrics = dict.fromkeys((*own, *self.reported_metrics))
        shown = [m for m in metrics if any(e.values_of(m) != (None, None) for e in every)]
        names = [undirected(metric).rpartition(":")[2] for metric in shown]
        return {name if names.count(name) == 1 else metric: metric for name, metric in zip(names, shown, strict=True)}

    @property
    def neighbours(self) -> tuple[dominance.Neighbour, ...]:
        """The plans that every view names beside the chosen one."""
        return () if self.chosen is None else dominance.neighbours(self.points, self.chosen)


def fp16_name(plan: PrecisionPlan) -> str:
    """What a plan is called that has every group in FP16 but for those that are BF16, or pinned to FP32."""
    (first, _), *others = plan.reduced_counts.items() or [(Precision.FP16, 0)]
    but = [f"{count} in {precision.name}" for precision, count in others]
    but += [f"{len(plan.fp32_groups)} pinned"] * bool(plan.fp32_groups)
    return f"all-{first.name}{' but ' if but else ''}{' and '.join(but)}"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``name`` is which baseline the plan is, or who proposed it."""

    evaluation: Evaluation
    name: str
    is_chosen: bool
    is_baseline: bool
    on_front: bool


def front_rows(front: Front) -> tuple[Row, ...]:
    """The points of the front, the baselines and the chosen plan, sorted by latency."""
    on_front = {point.plan for point in front.points}
    by_plan = {e.plan: e for e in (front.fp16, front.fp32, front.chosen, *front.points) if e is not None}
    baselines = {} if front.fp16 is None else {front.fp16.plan: front.fp16_name}
    baselines[front.fp32.plan] = "all-FP32"
    rows = [] if front.tf32 is None else [Row(front.tf32, "all-FP32 in TF32", False, True, False)]
    for plan, e in by_plan.items():
        is_chosen = front.chosen is not None and plan == front.chosen.plan
        rows.append(Row(e, baselines.get(plan, e.origin.label), is_chosen, plan in baselines, plan in on_front))
    return tuple(sorted(rows, key=lambda row: row.evaluation.latency.median_ms))


def front_records(front: Front) -> list[dict[str, Any]]:
    """List the points of a front and both baselines as dictionaries, which CSV files and ``pandas.DataFrame`` take.

    Sorted by latency. Each metric's own value stands under its name, and that on the held-out samples under
    ``held_out_NAME``.
    """
    roles = {beside.evaluation.plan: beside.role for beside in front.neighbours}
    records = []
    for row in front_rows(front):
        evaluation = row.evaluation
        if evaluation is front.tf32:  # no plan: that of all-FP32 has a record
            continue
        plan, memory = evaluation.plan, evaluation.memory
        record: dict[str, Any] = {
            "plan": plan.fingerprint,
            "latency_ms": evaluation.latency.median_ms,
            "p99_ms": evaluation.latency.p99_ms,
            "speedup": evaluation.speedup,
            "error": evaluation.error_value,
            "part": texts.part_text(evaluation, WIDEST) or None,
            "held_out_error": evaluation.held_out_value,
            "fp16_groups": len(plan.fp16_groups),
            "bf16_groups": len(plan.bf16_groups),
            "fp32_groups": len(plan.fp32_groups),
            "memory_bytes": memory and memory.total_bytes,
            "origin": str(evaluation.origin),
            "latency_source": evaluation.latency.source,
            "error_source": evaluation.error_source,
            "remeasured": evaluation.remeasured,
            "confirmed": evaluation.confirmed,
            "fp32_because": because(front, evaluation),
            "neighbour": roles.get(plan, ""),
            "on_front": row.on_front,
            "chosen": row.is_chosen,
        }
        for name, metric in front.metrics.items():
            column = metric if name in record or f"held_out_{name}" in record else name
            record[column], record[f"held_out_{column}"] = evaluation.values_of(metric)
        records.append(record)
    return records


def because(front: Front, evaluation: Evaluation, most: int | None = None) -> str:
    """Why a plan's FP32 groups are FP32, as ``reason_counts``; all-FP32 is the baseline, and needs no reason."""
    is_baseline = evaluation.plan == front.fp32.plan
    return "" if is_baseline else reason_counts(front.explanation.fp32_groups(evaluation.plan.fingerprint), most)


def is_held_out(front: Front) -> bool:
    """Whether errors are those of the held-out samples, but for rows that were not measured again."""
    return any(row.evaluation.held_out is not None for row in front_rows(front))


def front_table(front: Front, width: int, *, every: bool = False, more: str = "") -> tuple[Table, str]:
    """The table of a dozen rows or of all, with the columns that the width holds, and what its marks mean.

    ``more`` stands behind the count of the rows that are left out.
    """
    all_rows = rows = front_rows(front)
    if not every and is_held_out(front):  # errors of one set of samples; TF32 was never run on the held-out ones
        rows = tuple(r for r in rows if r.is_chosen or r.is_baseline or r.evaluation.held_out is not None)
    if not every and len(rows) > MOST_ROWS:
        points = [k for k, row in enumerate(rows) if row.on_front]
        shown = {*points[:1], *points[-1:], *(k for k, row in enumerate(rows) if row.is_chosen or row.is_baseline)}
        while len(shown) < MOST_ROWS:  # the middle of the widest gap
            low, high = max(pairwise(sorted(shown)), key=lambda pair: pair[1] - pair[0])
            shown.add((low + high) // 2)
        rows = tuple(rows[k] for k in sorted(shown))
    plans = [row.evaluation for row in rows]
    is_predicted = any(plan.latency.source == "predicted" for plan in plans)
    has_bf16 = any(plan.plan.bf16_groups for plan in plans)
    parts = list(map(texts.part_text, plans))
    names_parts = len(set(parts)) > 1 or any("[" in part for part in parts)  # of a single output it says nothing
    starred = [is_held_out(front) and plan.held_out is None and plan.is_finite for plan in plans]
    errors = ["*" * star + texts.error_cell(plan) for star, plan in zip(starred, plans, strict=True)]
    metrics = {m: [texts.metric_cell(plan, m) for plan in plans] for m in front.metrics.values()}
    columns: list[tuple[str, Literal["left", "right"], list[str]]] = [
        ("", "left", [">" if row.is_chosen else "" if row.on_front else "-" for row in rows]),
        ("plan", "left", ["-" if plan is front.tf32 else plan.plan.fingerprint for plan in plans]),
        ("pred. ms" if is_predicted else "ms", "right", list(map(texts.latency_text, plans))),
        ("95 %", "right", list(map(texts.format_interval, plans))),
        ("speedup", "right", [texts.format_speedup(plan.speedup) for plan in plans]),
        ("error", "right", errors),
        *((cut(name, WIDEST // 3), "right", metrics[metric]) for name, metric in front.metrics.items()),
        ("worst part", "left", parts if names_parts else []),
        ("FP16+BF16/32" if has_bf16 else "FP16/32", "right", [texts.group_counts(plan.plan) for plan in plans]),
        ("memory", "right", list(map(texts.memory_text, plans))),
        ("FP32 because", "left", [because(front, plan, 2) for plan in plans]),
    ]
    columns = [column for column in columns if not column[0] or {*column[2]} - {"", "-"}]

    # Columns are left out where the width does not hold all, then the origin is cut. A table that is wider than the
    # terminal even so is not cut: each line says something different.
    def room() -> int:
        return width - sum(max(map(len, (head, *cells))) + len("  ") for head, _, cells in columns)

    longest = max(len(name) for name in ("origin", *(row.name for row in rows)))
    for dropped in ("memory", "95 %", "FP32 because", "worst part"):
        if room() < longest:
            columns = [column for column in columns if column[0] != dropped]
    widest = max(room(), len("origin"))
    columns.append(("origin", "left", [textwrap.shorten(row.name, widest, placeholder="...") for row in rows]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", width=width - room() - len("  "))
    for head, justify, _ in columns:
        table.add_column(Text(printable(head)), justify=justify, no_wrap=True)
    for row, *line in zip(rows, *(cells for *_, cells in columns), strict=True):
        style = "bold green" if row.is_chosen else "" if row.on_front else "dim"
        table.add_row(*(Text(printable(cell)) for cell in line), style=style)

    left = len(all_rows) - len(rows)
    has_brackets = any("(" in cell for cells in (errors, *metrics.values()) for cell in cells)
    notes = {
        "> chosen": any(row.is_chosen for row in rows),
        "- not on the front": any(not row.on_front and not row.is_chosen for row in rows),
        "* of the search samples": any(starred),
        "in brackets: on the search samples": has_brackets,
        f"{left} more row{'s' * (left > 1)}{more}": left > 0,
    }
    shown_notes = [text for text, holds in notes.items() if holds]
    return table, "" if shown_notes == ["> chosen"] else "; ".join(shown_notes)
