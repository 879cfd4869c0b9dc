"""The ``chosen/`` directory: the mixed model, its plan, a script that runs it, and a page of text about it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from string import Template
from typing import Any

from mptune._version import __version__
from mptune.data.check_set import CheckSet
from mptune.data.forms.image_script import READ_IMAGES, image_reader, load_preprocessing
from mptune.engines.environment import Environment
from mptune.files import link_or_copy, writing
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.stored import stored_in
from mptune.graph.writing.weights import WeightBank
from mptune.printable import printable, shortened
from mptune.reporting.provenance import provenance
from mptune.reporting.recipe import BuildRecipe
from mptune.reporting.text import (
    by_importance,
    environment_facts,
    explain_kept,
    format_error,
    format_ms,
    format_speedup,
    read_template,
    unique,
)
from mptune.targets.costs import is_convolutional
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Evaluation
from mptune.tuning.front import Front

ENGINE_FILE = "model.engine"
"""The very engine that was measured, where the toolchain builds files: another build may choose other kernels."""

CHECK_FILE, EMULATION_FILE = "check.npz", "check.onnx"
"""What ``infer.py --check`` reads: samples, and where the error is emulated the model that emulates it."""

OWN_FILES = frozenset(
    {
        *("model.onnx", "model.onnx.data", ENGINE_FILE, "plan.json", "infer.py", "build.sh", "README.txt"),
        *(CHECK_FILE, EMULATION_FILE),
    }
)
"""What mptune writes into ``chosen/`` and may replace. Everything else there belongs to the user."""

_LONGEST = 700
"""Characters of a line of README.txt, as of a sentence on the page."""

MOST_OF_A_CODE = 3
"""So many findings of one code are in README.txt."""

_EMULATION = """
check.onnx   the same plan in FP32 with roundings to FP16, which that error is of; it reads the weights of model.onnx"""

MOST_KEPT = 12
"""So many FP32 groups are named in README.txt."""


def write_chosen(
    front: Front,
    evaluation: Evaluation,
    grouped: GroupedModel,
    directory: Path,
    environment: Environment | None,
    bank: WeightBank | None = None,
    recipe: BuildRecipe | None = None,
    check: CheckSet | None = None,
    opset: int | None = None,
) -> None:
    """Write the directory anew, as one step: a reader sees the old one or the new one, never half of each.

    Files in it that are not mptune's own are carried over.

    Args:
        front: where the plan was chosen.
        evaluation: the plan to write, with its figures.
        grouped: the user's model and its layer groups.
        directory: ``RUN/chosen``; its parent must exist.
        environment: where the figures were taken; None where it is not known.
        bank: the run's weight bank; None converts the weights again.
        recipe: how the run builds engines; None for the default settings.
        check: samples with the error of this plan; None writes none.
        opset: that the model was raised to; None where it is as the user's file has it.

    Raises:
        RunError: the directory cannot be written, or the disk is full.
        PlanError: the plan does not fit the model.
    """
    fresh = directory.with_name(f".{directory.name}.new")
    old = directory.with_name(f".{directory.name}.old")
    try:
        with writing(directory):
            _recover(directory, fresh, old)
            fresh.mkdir()
            rewriter = Rewriter(grouped, bank)
            rewriter.export(evaluation.plan, fresh / "model.onnx", provenance(front, evaluation))
            plan = evaluation.plan.to_json(rewriter.node_precisions(evaluation.plan), opset)
            (fresh / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
            script_text = infer_script(grouped.model, load_preprocessing(directory.parent / "data"))
            (fresh / "infer.py").write_text(script_text, encoding="utf-8")
            recipe = recipe or BuildRecipe()
            if not is_on_cpu(front):
                script = fresh / "build.sh"
                script.write_text(recipe.script(evaluation.plan), encoding="utf-8")
                script.chmod(script.stat().st_mode | 0o111)
            if check is not None:
                check.save(fresh / CHECK_FILE)
                if evaluation.error_source == "emulated":
                    store = stored_in(fresh / "model.onnx")
                    Emulator(grouped, bank).write(evaluation.plan, fresh / EMULATION_FILE, store)
            engine = _engine(evaluation, directory)
            readme = _readme(front, evaluation, environment, engine, recipe, has_check=check is not None)
            (fresh / "README.txt").write_text(readme, encoding="utf-8")
            if engine is not None:
                link_or_copy(str(engine), str(fresh / ENGINE_FILE))
            _carry_over(directory, fresh)
            if directory.exists():
                directory.rename(old)
            fresh.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def is_on_cpu(front: Front) -> bool:
    """Whether the target is a CPU, which no engine is built for."""
    return front.target == "cpu"


def _engine(evaluation: Evaluation, directory: Path) -> Path | None:
    """The plan's engine, in the run directory only: the record may come from a stranger, and name any file."""
    if evaluation.engine_path is None:
        return None
    # By its name alone: the directory may have been moved, also from a machine with other separators.
    engine = directory.parent / "engines" / PureWindowsPath(evaluation.engine_path).name
    return engine if engine.is_file() and not engine.is_symlink() else None


def _recover(directory: Path, fresh: Path, old: Path) -> None:
    """Undo what an interrupted writer left: between its two renames the user's files lie in ``old`` alone."""
    if old.exists() and not directory.exists():
        old.rename(directory)
    for leftover in (fresh, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def _carry_over(directory: Path, fresh: Path) -> None:
    """Give the user's own files a place in the new directory, without copying their bytes where links work."""
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if entry.name in OWN_FILES:
            continue
        target = fresh / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            shutil.copytree(entry, target, symlinks=True, copy_function=link_or_copy)
        else:
            link_or_copy(str(entry), str(target))


def infer_script(model: Model, preprocessing: Mapping[str, Any] | None = None) -> str:
    """The text of infer.py; ``preprocessing`` is how images become inputs, None where the data are no images."""
    # The search uses observed shapes, which are not available here; the declared ones give nearly the same answer.
    use_tf32 = "1" if is_convolutional(model, {}) else "0"
    images = "" if preprocessing is None else image_reader(preprocessing)
    return Template(read_template("infer.py.in")).substitute(
        use_tf32=use_tf32, images=images, read_images=READ_IMAGES if images else ""
    )


def _readme(
    front: Front,
    evaluation: Evaluation,
    environment: Environment | None,
    engine: Path | None,
    recipe: BuildRecipe,
    *,
    has_check: bool,
) -> str:
    latency, held_out = evaluation.latency, evaluation.held_out_value
    low, high = latency.ci95_ms
    measured = latency.source == "measured"
    plan = evaluation.plan
    machine = [] if environment is None else environment_facts(environment)
    facts = {
        "version": __version__,
        "model": front.model_path,
        "sha256": front.model_sha256,
        "plan": plan.fingerprint,
        "origin": _origin(front, evaluation),
        "kept": _kept(front, evaluation),
        "engine_file": _engine_line(engine),
        "fp16_groups": len(plan.fp16_groups),
        "in_bf16": f"{len(plan.bf16_groups)} in BF16, " if plan.bf16_groups else "",
        "groups": len(plan.precision),
        "reason": front.chosen_reason,
        "latency": f"{format_ms(latency.median_ms)} ms (median), {latency.source.upper()}",
        "latency_detail": (
            f"95 % interval {format_ms(low)} to {format_ms(high)} ms, p99 {format_ms(latency.p99_ms)} ms"
            if measured
            else "from a roofline model of the device, not timed on it: measure on the device before you rely on it"
        ),
        "fp32_latency": f"{format_ms(front.fp32.latency.median_ms)} ms",
        "speedup": format_speedup(evaluation.speedup),
        "error": f"{format_error(evaluation.error_value)} {front.metric}, {evaluation.error_source.upper()}",
        "held_out": format_error(held_out) if held_out is not None else "not taken",
        "error_detail": (
            f"on the outputs of {'this model on that CPU' if is_on_cpu(front) else 'the engine of the target'}"
            if evaluation.error_source == "measured"
            else "by the FP32 model with explicit roundings to FP16"
        ),
        "trtexec": printable(recipe.command(plan)),
        "tf32": (
            "TF32 is TensorRT's default, and this plan was measured with it (--tf32)."
            if recipe.uses_tf32(plan)
            else "In code: config.clear_flag(trt.BuilderFlag.TF32). TF32 is TensorRT's default, and with it the\n"
            "                 groups in FP32 round to 10 bits: the error above would not apply."
        ),
        "confirmed": "yes, in fresh processes" if evaluation.confirmed else "no",
        "target": front.target,
        "engine": front.engine,
        "device": front.device,
        "environment": _block(f"{name:<16} {value}" for name, value in machine),
        "findings": _block(_findings(front)) or "  nothing",
        "warnings": _block(f"  - {text}" for text in unique((*front.warnings, *evaluation.warnings))) or "  none",
        "emulation": _EMULATION if has_check and evaluation.error_source == "emulated" else "",
    }
    # Of several lines, cleaned one by one.
    blocks = (
        "engine_file",
        "emulation",
        "kept",
        "findings",
        "environment",
        "warnings",
        "tf32",
        "trtexec",  # pasted into a shell: whole
    )
    facts = {name: fact if name in blocks else _line(fact) for name, fact in facts.items()}
    lines = read_template("README.txt.in").splitlines(keepends=True)
    marks = {"[gpu]": not is_on_cpu(front), "[cpu]": is_on_cpu(front), "[check]": has_check}
    kept = "".join(line for line in lines if marks.get(line.split(" ", 1)[0], True))
    for mark in marks:
        kept = kept.replace(f"{mark} ", "")
    return Template(kept).substitute(facts)


def _origin(front: Front, evaluation: Evaluation) -> str:
    """Who proposed the plan, by the names that the tables use."""
    if evaluation.origin == ORIGIN_FP16:
        return front.fp16_name
    return "all-FP32" if evaluation.origin == ORIGIN_FP32 else str(evaluation.origin)


def _findings(front: Front) -> Iterator[str]:
    """One line a finding, the most severe first; of each code the first few, then how many more there are."""
    counts = Counter(finding.code for finding in front.findings)
    shown: Counter[str] = Counter()
    for finding in front.findings:
        shown[finding.code] += 1
        if shown[finding.code] <= MOST_OF_A_CODE:
            yield f"  - {finding.severity}: {finding.code}: {finding.message}"
        elif shown[finding.code] == counts[finding.code]:
            yield f"  - {counts[finding.code] - MOST_OF_A_CODE} more {finding.code} are in front.json"


def _engine_line(engine: Path | None) -> str:
    if engine is None:
        return ""
    return (
        f"\n{ENGINE_FILE} the engine that was measured; it runs only on this GPU, with this version of its library"
        "\n             (set context.nvtx_verbosity = trt.ProfilingVerbosity.NONE, as was done to time it: it was built"
        "\n             for inspection)"
    )


def _kept(front: Front, evaluation: Evaluation) -> str:
    """The FP32 groups with their reasons, the most important first."""
    kept = by_importance(front.explanation.of(evaluation.plan.fingerprint))
    lines = [f"  - {explain_kept(group)}" for group in kept[:MOST_KEPT]]
    if len(kept) > MOST_KEPT:
        lines.append(f"  - and {len(kept) - MOST_KEPT} more: `mptune report RUN --explain` lists them")
    if not lines:
        lines.append("  none" if not evaluation.plan.fp32_groups else "  not known")
    return _block(lines)


def _block(lines: Iterable[str]) -> str:
    return "\n".join(map(_line, lines))


def _line(text: object) -> str:
    """A line of README.txt, printable; names in it may be of any length."""
    return shortened(printable(text), _LONGEST)
