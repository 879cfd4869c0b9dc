"""``weak/``: a plan for TensorRT 8, which has no strong typing, as a model in FP32 and a command of trtexec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mptune.engines.loading import check_written
from mptune.errors import PlanError, RunError
from mptune.files import write_text
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.weak import WeakModel, weak_model
from mptune.reporting.recipe import BuildRecipe, trtexec_script
from mptune.reporting.text import fill_template

_LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument on Linux (MAX_ARG_STRLEN in include/uapi/linux/binfmts.h)."""


def write_weak_folder(
    plan: PrecisionPlan, grouped: GroupedModel, directory: Path, recipe: BuildRecipe, *, force: bool = False
) -> None:
    """Write the folder; with ``force`` into one that exists, where other files stay.

    Raises:
        RunError: there is such a folder already, or it cannot be written.
        ModelError: the model has something that TensorRT 8 lacks.
        PlanError: the plan has groups in BF16, or more layers than a command takes.
    """
    if directory.exists() and not force:
        raise RunError(f"{directory} exists already", "give --force to write into it, or another folder with --out")
    weak = weak_model(grouped, plan)
    script = _script(plan, weak, recipe)
    weak.write(directory / "model.onnx")
    check_written(directory / "model.onnx", f"the model of plan {plan.fingerprint}", grouped.model.path)
    write_text(directory / "build.sh", script, mode=0o755)
    readme = fill_template("weak.txt.jinja", plan=plan.fingerprint, model=grouped.model.path.name)
    write_text(directory / "README.txt", readme)


def _script(plan: PrecisionPlan, weak: WeakModel, recipe: BuildRecipe) -> str:
    """``build.sh``. Options as of TensorRT 8.4 to 8.6 (samples/common/sampleOptions.cpp), which take exact names."""
    kept = replace(recipe, timing_cache=False, plugins=()).options(plan)
    options = [option for option in kept if not option.startswith(("--stronglyTyped", "--builderOptimizationLevel"))]
    if Precision.FP16 in weak.precisions.values():
        options += ["--fp16", "--precisionConstraints=obey"]
    for option, kinds in (("--layerPrecisions", weak.precisions), ("--layerOutputTypes", weak.types)):
        options.append(f"{option}={','.join(f'{name}:{kind}' for name, kind in kinds.items())}")
    named, nodes = len(weak.precisions), len(weak.proto.graph.node)
    if max(map(len, options)) > _LONGEST_ARGUMENT:
        message = f"the precisions of {named} layers are more than one argument of a command may hold on Linux"
        raise PlanError(message, "simplify the model, or update to JetPack 6.1 (TensorRT 10.3) or later")
    options += ["--profilingVerbosity=detailed", "--exportLayerInfo=layers.json", "--saveEngine=model.engine"]
    lines = [
        f"# Builds the engine of plan {plan.fingerprint} with TensorRT 8, on the device that will run it. By mptune.",
        "# Options that are given to this script go to trtexec after these.",
        *(f"# {line}" for line in recipe.warnings),
        f"echo '{named} of {nodes} nodes have a precision, {nodes - named} cannot be named or take none'",
    ]
    return trtexec_script(lines, options)
