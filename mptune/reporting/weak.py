"""``weak/``: a plan for a TensorRT without strong typing, as a folder that needs only what is on the device."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from mptune._version import __version__
from mptune.data.check_set import CheckSet
from mptune.engines.loading import check_written
from mptune.errors import PlanError, RunError
from mptune.files import write_text, writing
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.weak import WEAK_BRANCHES, WeakModel, write_weak
from mptune.printable import printable
from mptune.reporting.chosen import infer_script
from mptune.reporting.readme import plan_counts
from mptune.reporting.recipe import TRTEXEC_OF_PACKAGE, BuildRecipe
from mptune.resources import read_template
from mptune.settings import TensorRtSettings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.limits import format_error
from mptune.tuning.fronts.table import latency_text

REFERENCE_FILE = "reference.npz"
_SCRIPTS = ("constraints.py", "build.py", "time.py")
_OWN_FILES = ("model.onnx", "model.onnx.data", "precisions.json", "build.sh", "README.txt", REFERENCE_FILE, *_SCRIPTS)

_SHARED = ("plain", "run_samples", "statistic", "read_check", "errors_of", "worst")
"""Functions of infer.py that time.py has, too."""

_LONGEST_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument of a command on Linux (MAX_ARG_STRLEN in include/uapi/linux/binfmts.h)."""


def write_weak_folder(
    front: Front,
    evaluation: Evaluation,
    grouped: GroupedModel,
    directory: Path,
    target: str,
    recipe: BuildRecipe,
    check: CheckSet | None,
    *,
    force: bool = False,
) -> tuple[str, ...]:
    """Write the folder; files in it that are not mptune's own stay. Returns warnings.

    Args:
        target: a key of ``WEAK_BRANCHES``.
        check: samples with reference outputs for time.py; None where there are none.
        force: replace mptune's own files of an earlier export.

    Raises:
        RunError: there is such a folder already, or it cannot be written.
        ModelError: the model has something that this TensorRT lacks.
        PlanError: the plan has a precision that it lacks.
    """
    branch, plan = WEAK_BRANCHES[target], evaluation.plan
    recipe, plugins = replace(recipe, timing_cache=False, plugins=(), weak=""), recipe.plugins
    there = [name for name in _OWN_FILES if (directory / name).exists()]
    if directory.exists() and (not directory.is_dir() or (there and not force)):
        what = f"holds {there[0]}" if there else "is a file"
        raise RunError(f"{directory} {what} already", "give --force to replace it, or another folder with --out")
    warnings = [f"the files load no plugins: {', '.join(plugins)}"] if plugins else []
    weak = write_weak(grouped, plan, branch, directory / "model.onnx")
    with writing(directory):
        for name in {*there} - {"model.onnx", "model.onnx.data"}:
            (directory / name).unlink()
    check_written(directory / "model.onnx", f"the model of plan {plan.fingerprint}", grouped.model.path)
    document = plan_document(plan, grouped, weak, recipe)
    write_text(directory / "precisions.json", json.dumps(document, indent=1) + "\n")
    script = trtexec_script(plan, weak, recipe)
    write_text(directory / "build.sh", script, mode=0o755)
    if branch.has_tensor_api:
        functions = {"functions": _functions_of_infer(grouped)}
        for name in _SCRIPTS:
            text = read_template(f"weak/{name}.in")
            write_text(directory / name, Template(text).safe_substitute(functions) if name == "time.py" else text)
        if check is not None:
            check.save(directory / REFERENCE_FILE)
        else:
            warnings.append("there are no samples with reference outputs that fit: time.py cannot take the error")
    write_text(directory / "README.txt", _readme(front, evaluation, grouped, weak, has_reference=check is not None))
    return tuple(warnings)


def plan_document(plan: PrecisionPlan, grouped: GroupedModel, weak: WeakModel, recipe: BuildRecipe) -> dict[str, Any]:
    """The content of precisions.json."""
    branch, settings = weak.branch, recipe.settings
    level = settings.optimization_level if branch.has_optimization_level else None
    return {
        "format": 1,
        "for": branch.label,
        "versions": {"least": branch.least, "below": branch.below},
        "model_sha256": grouped.model.sha256,
        "plan": plan.fingerprint,
        "tf32": recipe.uses_tf32(plan),
        "workspace_mib": settings.workspace_mb,
        "optimization_level": None if level == TensorRtSettings().optimization_level else level,
        "shapes": {name: list(sizes) for name, sizes in recipe.ranges.items()},
        **weak.document(),
    }


def trtexec_script(plan: PrecisionPlan, weak: WeakModel, recipe: BuildRecipe) -> str:
    """``build.sh``: exact names of layers only. Options as of TensorRT 8.4 to 10 (samples/common/sampleOptions.cpp)."""
    kinds = {node.name: str(node.precision) for node in weak.nodes if node.is_named}
    whole = {node.name for node in weak.nodes if node.is_whole}
    told = {
        "layerPrecisions": ",".join(f"{name}:{kind}" for name, kind in kinds.items()),
        "layerOutputTypes": ",".join(f"{name}:{kind}" for name, kind in kinds.items() if name in whole),
    }
    longest = max(len(f"--{option}={value}") for option, value in told.items())
    if longest > _LONGEST_ARGUMENT:
        if not weak.branch.has_tensor_api:
            raise PlanError(
                f"the precisions of {len(kinds)} layers are {longest} bytes of one argument, Linux takes"
                f" {_LONGEST_ARGUMENT}",
                "TensorRT 8.5 and later needs no such argument: --for tensorrt-8",
            )
        text = f"the precisions of {len(kinds)} layers are too long for one argument: run build.py"
        return f"#!/bin/sh\necho {shlex.quote(f'error: {text}')} >&2\nexit 1\n"
    left_out = ("--stronglyTyped", *(() if weak.branch.has_optimization_level else ("--builderOptimizationLevel",)))
    options = [option for option in recipe.options(plan) if not option.startswith(left_out)]
    if "fp16" in kinds.values():
        options.append("--fp16")
    options += ["--precisionConstraints=obey", *(f"--{option}={value}" for option, value in told.items() if value)]
    options += ["--profilingVerbosity=detailed", "--exportLayerInfo=layers.json", "--saveEngine=model.engine"]
    lines = [
        "#!/bin/sh",
        f"# Builds the engine of plan {plan.fingerprint} with trtexec of {weak.branch.label}. By mptune.",
        f"# {len(kinds)} of {len(weak.nodes)} nodes are told their precision by name; no other layer is.",
        "# Nothing checks the engine: layers.json has the types that it has. More options may follow this command.",
        *(f"# {line}" for line in recipe.warnings),
        "set -eu",
        'cd "$(dirname "$0")"',
        f"trtexec=$(command -v trtexec || echo {TRTEXEC_OF_PACKAGE})",
        " \\\n    ".join(('exec "$trtexec"', *map(shlex.quote, options), '"$@"')),
    ]
    return "\n".join(lines) + "\n"


def _functions_of_infer(grouped: GroupedModel) -> str:
    """The source of the functions that both scripts have."""
    source = infer_script(grouped.model)
    segments = {
        f.name: ast.get_source_segment(source, f) for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)
    }
    return "\n\n\n".join(str(segments[name]) for name in _SHARED)


def _readme(
    front: Front, evaluation: Evaluation, grouped: GroupedModel, weak: WeakModel, *, has_reference: bool
) -> str:
    branch = weak.branch
    marks = {"[scripts]": branch.has_tensor_api, "[trtexec]": not branch.has_tensor_api}
    lines = read_template("weak/README.txt.in").splitlines(keepends=True)
    kept = "".join(
        line[len(mark) :] if (mark := line[:9]) in marks else line for line in lines if marks.get(line[:9], True)
    )
    named = sum(node.is_named for node in weak.nodes)
    ops = sorted({node.op for node in weak.nodes if node.op in branch.unnamed})
    facts = {
        "plan": evaluation.plan.fingerprint,
        "model": front.model_path.name,
        "label": branch.label,
        "version": __version__,
        "named": named,
        "nodes": len(weak.nodes),
        "unnamed": f" {', '.join(ops)} cannot be named at all." if ops else "",
        "opset": weak.proto.opset_import[0].version,
        "prefix": weak.prefix,
        "no_reference": "" if has_reference else ": not here, the samples were gone or too large",
        "latency": latency_text(evaluation),
        "latency_source": evaluation.latency.source,
        "error": format_error(evaluation.error_value),
        "metric": front.metric,
        "error_source": evaluation.error_source,
        "device": front.device,
        "counts": plan_counts(evaluation.plan),
    }
    return Template(kept).substitute({name: printable(fact) for name, fact in facts.items()})
