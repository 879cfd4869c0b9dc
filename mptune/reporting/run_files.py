"""What a finished run shows, written only when it changes: ``chosen/``, ``front.json`` and ``report.html``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mptune.data.run_outputs import Source, collect_check, collect_outputs, write_outputs
from mptune.data.samples import Rollout
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.tensorrt.layers import EngineLayers
from mptune.errors import PlanError
from mptune.files import read_json, read_text, write_json, writing
from mptune.graph.facts import facts_of
from mptune.graph.groups import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.weights import WeightBank
from mptune.processes.parent import Worker
from mptune.reporting.chosen import write_chosen
from mptune.reporting.page import PageContent, write_report
from mptune.reporting.recipe import BuildRecipe, is_on_cpu
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory, tolerated
from mptune.tuning import copies, dominance, output_findings, remeasure, result
from mptune.tuning.confirmation import Confirmation
from mptune.tuning.front import Front
from mptune.tuning.record.record import StudyRecord


def write_run_files(
    run: RunDirectory,
    front: Front,
    record: StudyRecord,
    grouped: GroupedModel,
    environment: Environment | None,
    confirmation: Confirmation | None = None,
    worker: Worker | None = None,
) -> Front:
    """Write ``chosen/``, the choice in run.json and ``front.json``; last, as the mark of a whole run, ``report.html``.

    Where all are there already and say the same, nothing is written. A search's own run (no ``confirmation``) keeps a
    copy of its model, and frees the engines of plans that are not on the front. ``environment`` is where the figures
    were taken; None describes this machine. ``worker`` opens the chosen model; None starts one.

    Returns:
        The front, with a warning for each file beside ``chosen/model.onnx`` and ``front.json`` that could not be made.
    """
    document = front.to_json() if confirmation is None else confirmation.to_json()
    if confirmation is None:
        copies.keep_model(run, grouped)
    file = run.load()
    assert file is not None, "whoever evaluates plans has written it"
    fixed, is_written = file.fixed_settings, False
    with contextlib.suppress(OSError, ValueError, PlanError):  # else it is written anew
        plan = PrecisionPlan.from_json(read_text(run.chosen / "plan.json"))
        is_chosen = plan.fingerprint == document["chosen"]
        is_written = is_chosen and bool(read_json(run.front_json) == document) and run.report_html.exists()
    warnings: list[str] = []
    environment = environment or describe_environment()
    if front.chosen is not None and not is_written:
        chosen, model, check, rollout = front.chosen, grouped.model, None, None
        # The first held-out samples with the error there, or search samples where the plan has no held-out error.
        with tolerated("chosen/check.npz", run.logs, warnings):
            if fixed.feedback and file.data is not None:
                inputs, results = ([value.name for value in values] for values in (model.inputs, model.outputs))
                rollout = Rollout.parse(fixed.feedback, fixed.steps, inputs, results, file.data.samples)
            check = collect_check(
                run.data,
                chosen.held_out or chosen.error,
                "search" if chosen.held_out is None else "held_out",
                {
                    "plan": chosen.plan.fingerprint,
                    "metric": front.metric,
                    "source": chosen.error_source,
                    "engine": front.engine,
                    "provider": ("cpu" if is_on_cpu(front) else "cuda") if front.engine == "onnxruntime" else None,
                },
                chosen.ignored,
                rollout,
                [output for output in facts_of(model).row_outputs if output.is_selection],
            )
        bank = WeightBank.write(model, run.weights)
        recipe = BuildRecipe.for_run(file, run.data, model.inputs, facts_of(model).shape_inputs)
        warnings += write_chosen(
            front, chosen, grouped, run.chosen, environment, bank, recipe, check, fixed.opset, worker
        )
    if file.choice != front.choice:
        run.save(file.model_copy(update={"choice": front.choice}))
    if is_written:
        return front
    with writing(run.report_html):  # of the front before: a run without a page is written again
        run.report_html.unlink(missing_ok=True)
    write_json(run.front_json, document)
    with tolerated("report.html", run.logs, warnings):
        outputs = run_outputs(run, file, front)
        write_outputs(run.outputs_json, outputs)
        dropped = remeasure.dropped_plans(record, front.fp32.ignored)
        evaluations = [
            replace(e.with_baseline(front.fp32.latency.median_ms), held_out=dropped.get(e.plan.fingerprint))
            for e in record.evaluations()
        ]
        progress = result.progress_of(record, front.fp32, dominance.reference_error_of(front.metric, evaluations))
        content = PageContent(front, evaluations, grouped.groups, environment, progress, confirmation, outputs)
        write_report(content, run.report_html)
    # Engines off the front free their space; only files that lie in the run's own directory.
    needed = {e.engine_path for e in (*front.points, front.fp32, front.fp16, front.chosen) if e is not None}
    for path in (evaluation.engine_path for evaluation in record.evaluations()):
        if path is not None and path not in needed and Path(path).parent.resolve() == run.engines.resolve():
            with contextlib.suppress(OSError):
                Path(path).unlink()
                EngineLayers.path(Path(path)).unlink()
    return replace(front, warnings=(*front.warnings, *warnings))


def run_outputs(run: RunDirectory, file: RunFile, front: Front) -> dict[str, Any]:
    """What the outputs of the chosen plan, the front's other points, both baselines and unpinned FP16 look like.

    Only of plans that were run on the held-out samples; the points nearest to the chosen one come first.
    """
    chosen, points = front.chosen, list(front.points)
    if chosen is not None:
        points.sort(key=lambda point: abs(point.latency.median_ms - chosen.latency.median_ms))
    wanted = [e for e in (chosen, front.fp16, *points, front.fp32) if e is not None and e.held_out is not None]
    plans: list[tuple[str, Source]] = [(e.plan.fingerprint, e.error_source) for e in wanted]
    if front.unpinned is not None:
        plans.insert(1, (front.unpinned[0], "emulated"))
    unit: Literal["sample", "sequence"] = "sequence" if file.fixed_settings.feedback else "sample"
    return collect_outputs(plans, run.sketches, front.metric, output_findings.sample_indices(file).held_out, unit)
