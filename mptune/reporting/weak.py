"""``weak/``: a plan for TensorRT 8, which has no strong typing, as a model in FP32 and a command of trtexec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from string import Template

from mptune._version import __version__
from mptune.engines.loading import check_written
from mptune.errors import PlanError, RunError
from mptune.files import write_text, writing
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.weak import WeakModel, weak_model
from mptune.printable import printable
from mptune.reporting.readme import plan_counts
from mptune.reporting.recipe import BuildRecipe, trtexec_script
from mptune.resources import read_template
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import format_error
from mptune.tuning.fronts.table import latency_text

_FILES = ("model.onnx", "model.onnx.data", "build.sh", "README.txt")

_LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument of a command on Linux (MAX_ARG_STRLEN in include/uapi/linux/binfmts.h)."""


def write_weak_folder(
    front: Front,
    evaluation: Evaluation,
    grouped: GroupedModel,
    directory: Path,
    recipe: BuildRecipe,
    *,
    force: bool = False,
) -> None:
    """Write the folder; files in it that are not mptune's own stay.

    Args:
        force: replace mptune's own files of an earlier export.

    Raises:
        RunError: there is such a folder already, or it cannot be written.
        ModelError: the model has something that TensorRT 8 lacks.
        PlanError: the plan has a precision that it lacks, or more layers than a command takes.
    """
    plan, path = evaluation.plan, directory / "model.onnx"
    there = [name for name in _FILES if (directory / name).exists()]
    if directory.exists() and (not directory.is_dir() or (there and not force)):
        what = f"holds {there[0]}" if there else "is a file"
        raise RunError(f"{directory} {what} already", "give --force to replace it, or another folder with --out")
    weak = weak_model(grouped, plan)
    script = _script(plan, weak, recipe)
    with writing(directory):
        for name in there:
            (directory / name).unlink()
    weak.write(path)
    check_written(path, f"the model of plan {plan.fingerprint}", grouped.model.path)
    write_text(directory / "build.sh", script, mode=0o755)
    facts = {
        "plan": plan.fingerprint,
        "model": front.model_path.name,
        "version": __version__,
        "named": len(weak.precisions),
        "nodes": len(weak.proto.graph.node),
        "first": weak.proto.graph.node[0].name,
        "opset": weak.proto.opset_import[0].version,
        "latency": latency_text(evaluation),
        "latency_source": evaluation.latency.source,
        "error": format_error(evaluation.error_value),
        "metric": front.metric,
        "error_source": evaluation.error_source,
        "device": front.device,
        "counts": plan_counts(plan),
    }
    text = Template(read_template("weak.txt.in"))
    write_text(directory / "README.txt", text.substitute({name: printable(fact) for name, fact in facts.items()}))


def _script(plan: PrecisionPlan, weak: WeakModel, recipe: BuildRecipe) -> str:
    """``build.sh``. Options as of TensorRT 8.4 to 8.6 (samples/common/sampleOptions.cpp), which take exact names."""
    by_layer = [
        f"--{option}={','.join(f'{name}:{kind}' for name, kind in kinds.items())}"
        for option, kinds in (("layerPrecisions", weak.precisions), ("layerOutputTypes", weak.types))
        if kinds
    ]
    named, longest = len(weak.precisions), max(map(len, by_layer), default=0)
    if longest > _LONGEST_ARGUMENT:
        raise PlanError(
            f"the precisions of {named} layers are {longest} bytes of one argument, Linux takes {_LONGEST_ARGUMENT}",
            "simplify the model, so that it has fewer nodes, or update to JetPack 6.1 (TensorRT 10.3) or later",
        )
    kept = replace(recipe, timing_cache=False, plugins=()).options(plan)
    options = [option for option in kept if not option.startswith(("--stronglyTyped", "--builderOptimizationLevel"))]
    if Precision.FP16 in weak.precisions.values():
        options.append("--fp16")
    options += ["--precisionConstraints=obey", *by_layer]
    options += ["--profilingVerbosity=detailed", "--exportLayerInfo=layers.json", "--saveEngine=model.engine"]
    nodes = len(weak.proto.graph.node)
    lines = [
        f"# Builds the engine of plan {plan.fingerprint} with TensorRT 8, on the device that will run it. By mptune.",
        "# Options that are given to this script go to trtexec after these.",
        *(f"# {line}" for line in recipe.warnings),
        f"echo '{named} of {nodes} nodes have a precision, {nodes - named} cannot be named or take none'",
    ]
    return trtexec_script(lines, options)
