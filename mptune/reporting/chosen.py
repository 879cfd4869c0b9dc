"""The ``chosen/`` directory: the mixed model, its plan, a script that runs it, and a page of text about it."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mptune import _version, files, rundir
from mptune.data import archive, images
from mptune.data.metrics import row_sets
from mptune.engines.environment import Environment
from mptune.engines.loading import check_written
from mptune.engines.tensorrt.backend import TIMING_CACHE
from mptune.graph import facts, groups, interface
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.graph.writing import emulate, rewrite, weights
from mptune.processes.parent import Worker
from mptune.reporting import text
from mptune.reporting.recipe import ENGINE_FILE, NO_TRTEXEC, BuildRecipe, is_on_cpu
from mptune.targets.costs import is_convolutional
from mptune.tuning import texts
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front

CHECK_FILE, EMULATION_FILE = "check.npz", "check.onnx"
"""What ``infer.py --check`` reads: samples, and where the error is emulated the model that emulates it."""

_MOST_KEPT = 12
"""FP32 groups that README.txt names."""

OWN_FILES = frozenset(
    {
        *("model.onnx", "model.onnx.data", ENGINE_FILE, "plan.json", "infer.py", "build.sh", "README.txt"),
        *(CHECK_FILE, EMULATION_FILE, f"{EMULATION_FILE}.data", TIMING_CACHE),
    }
)
"""What mptune writes into ``chosen/`` and may replace. Everything else there belongs to the user."""


def write_chosen(
    front: Front,
    evaluation: Evaluation,
    grouped: groups.GroupedModel,
    directory: Path,
    environment: Environment | None,
    bank: weights.WeightBank | None = None,
    recipe: BuildRecipe | None = None,
    check: Mapping[str, np.ndarray] | None = None,
    opset: int | None = None,
    worker: Worker | None = None,
) -> list[str]:
    """Write the directory anew, as one step: a reader sees the old one or the new one, never half of each.

    Files in it that are not mptune's own are carried over. Model, plan and engine are the result; another file that
    cannot be made is left out, with a warning that is returned.

    Args:
        environment: where the figures were taken.
        bank: the run's weight bank; None converts the weights again.
        recipe: how the run builds engines; None for the default settings.
        check: what ``check.npz`` holds of this plan; None writes none.
        opset: that the model was raised to; None where it is as the user's file has it.
        worker: opens the model to see that it loads; None starts one.

    Raises:
        RunError: the directory cannot be written, or the disk is full.
        PlanError: the plan does not fit the model.
        ModelError: what was made does not load in ONNX Runtime.
    """
    plan = evaluation.plan
    fresh = directory.with_name(f".{directory.name}.new")
    old = directory.with_name(f".{directory.name}.old")
    warnings: list[str] = []
    beside = partial(rundir.tolerated, logs=directory.parent / "logs", warnings=warnings)
    try:
        with files.writing(directory):
            # An interrupted writer leaves either directory; between its renames the user's files lie in the old one.
            if old.exists() and not directory.exists():
                old.rename(directory)
            for leftover in (fresh, old):
                if leftover.exists():
                    shutil.rmtree(leftover)
            fresh.mkdir()
            rewriter = rewrite.Rewriter(grouped, bank)
            numbers = {"error": evaluation.error_value, "held_out_error": evaluation.held_out_value}
            numbers |= {"latency_ms": evaluation.latency.median_ms, "speedup": evaluation.speedup}
            figures = {
                "version": _version.__version__,
                "source_sha256": front.model_sha256,
                "plan": plan.fingerprint,
                "origin": str(evaluation.origin),
                **{name: getattr(front, name) for name in ("target", "engine", "device", "metric")},
                **{name: text.short_number(value) for name, value in numbers.items()},
                "error_source": evaluation.error_source,
                "latency_source": evaluation.latency.source,
                **{n: "yes" if getattr(evaluation, n) else "no" for n in ("remeasured", "confirmed")},
                "precision": json.dumps({k: str(v) for k, v in plan.precision.items()}, separators=(",", ":")),
            }
            metadata = {name: str(figure) for name, figure in figures.items() if figure not in (None, "")}
            model_file = rewriter.export(plan, fresh / "model.onnx", metadata)
            check_written(model_file, f"the model of plan {plan.fingerprint}", grouped.model.path, worker)
            document = plan.to_json(rewriter.types.node_precisions(plan), opset)
            document |= {} if grouped.io == Precision.FP32 else {"io": grouped.io}
            (fresh / "plan.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            engine = evaluation.engine_in(directory.parent / "engines")
            if engine is not None:
                files.link_or_copy(str(engine), str(fresh / ENGINE_FILE))
            recipe = recipe or BuildRecipe()
            with beside("chosen/infer.py"):
                script_text = infer_script(grouped.model, images.load_preprocessing(directory.parent / "data"), recipe)
                (fresh / "infer.py").write_text(script_text, encoding="utf-8")
            if not is_on_cpu(front):
                with beside("chosen/build.sh"):
                    script = fresh / "build.sh"
                    script.write_text(recipe.script(plan), encoding="utf-8")
                    script.chmod(script.stat().st_mode | 0o111)
                    if recipe.timing_cache:  # a copy: trtexec writes to it
                        shutil.copyfile(directory.parent / "engines" / TIMING_CACHE, fresh / TIMING_CACHE)
            if check is not None:
                with beside("chosen/check.npz"):
                    if evaluation.error_source == "emulated":
                        emulate.Emulator(interface.with_reduced_interface(grouped)).export(plan, fresh / EMULATION_FILE)
                    archive.write_arrays(fresh / CHECK_FILE, check)
            with beside("chosen/README.txt"):
                has_check = (fresh / CHECK_FILE).exists()
                in_fp16 = bool(plan.reduced_groups and interface.reduced_interface(grouped))
                readme = readme_text(
                    front, evaluation, environment, engine, recipe, has_check=has_check, in_fp16=in_fp16
                )
                (fresh / "README.txt").write_text(readme, encoding="utf-8")
            # The user's own files come along, without a copy of their bytes where links work.
            for entry in directory.iterdir() if directory.is_dir() else ():
                target = fresh / entry.name
                if entry.name in OWN_FILES:
                    continue
                if entry.is_symlink():
                    target.symlink_to(entry.readlink())
                elif entry.is_dir():
                    shutil.copytree(entry, target, symlinks=True, copy_function=files.link_or_copy)
                else:
                    files.link_or_copy(str(entry), str(target))
            if directory.exists():
                directory.rename(old)
            fresh.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return warnings


def infer_script(
    model: Model, preprocessing: Mapping[str, object] | None = None, recipe: BuildRecipe | None = None
) -> str:
    """The text of infer.py, which times the usual shapes of ``recipe``, those of the calibration data.

    ``preprocessing`` is how images become inputs, None where the data are no images.
    """
    # The search uses observed shapes, which are not available here; the declared ones give nearly the same answer.
    use_tf32 = "1" if is_convolutional(model, {}) else "0"
    reader = "" if preprocessing is None else images.image_reader(preprocessing)
    ranges = {} if recipe is None else recipe.ranges
    usual = {name: usual for name, (_, usual, _) in ranges.items() if name not in facts.facts_of(model).shape_inputs}
    functions = row_sets.nearest_pairs, row_sets.paired_rows, row_sets.pair_selection
    pairing = "\n\n".join(inspect.getsource(each) for each in functions)
    names = {"use_tf32": use_tf32, "images": reader, "usual_shapes": ascii(usual), "pairing": pairing}
    return text.fill_template("infer.py.jinja", **names)


def readme_text(
    front: Front,
    evaluation: Evaluation,
    environment: Environment | None,
    engine: Path | None,
    recipe: BuildRecipe,
    *,
    has_check: bool,
    in_fp16: bool = False,
) -> str:
    """The text of README.txt.

    ``has_check``: samples with reference outputs lie beside it; ``in_fp16``: inputs and outputs have become FP16.
    """
    plan = evaluation.plan
    counts = [f"{count} in {precision.name}" for precision, count in plan.reduced_counts.items()] or ["none in FP16"]
    reasons = [text.explain_kept(group) for group in front.explanation.fp32_groups(plan.fingerprint)]
    if len(reasons) > _MOST_KEPT:
        reasons[_MOST_KEPT:] = [f"and {len(reasons) - _MOST_KEPT} more: mptune report RUN --explain"]
    return text.fill_template(
        "README.txt.jinja",
        version=_version.__version__,
        text=text,
        texts=texts,
        front=front,
        evaluation=evaluation,
        plan=plan,
        recipe=recipe,
        engine=engine,
        has_check=has_check,
        in_fp16=in_fp16,
        is_cpu=is_on_cpu(front),
        counts=", ".join(counts),
        reduced=text.reduced_names([plan]),
        kept=reasons,
        findings=list(text.finding_lines(front.findings, lambda f: f"{f.severity}: {f.code}: {f.message}")),
        environment=[] if environment is None else text.environment_facts(environment),
        warnings=text.unique((*front.warnings, *evaluation.warnings)),
        no_trtexec=NO_TRTEXEC,
    )
