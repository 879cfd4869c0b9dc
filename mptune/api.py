"""What the command line and a notebook call: from search to export, one function each. Wires the layers below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mptune.applying import CheckedData, apply_plan
from mptune.arguments import (
    ModelLike,
    check_batch,
    choice_argument,
    data_argument,
    loaded_model,
)
from mptune.deploying import confirm, export
from mptune.files import full_disk_as_error
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.inspection.model import inspect_model
from mptune.inspection.record import Inspection
from mptune.reading import one_or_several, report
from mptune.reporting.run_files import write_run_files
from mptune.rundir import open_run, read_run
from mptune.searching import search
from mptune.settings import Tolerances
from mptune.tuning.front import Front
from mptune.tuning.runs.confirm_run import known_confirmation
from mptune.tuning.runs.model_copy import load_either
from mptune.tuning.runs.result import front_of, read_record
from mptune.tuning.space import load_space

__all__ = ["apply", "confirm", "export", "inspect", "pick", "report", "search"]


def pick(
    run: str | Path,
    *,
    max_error: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    limits: str | Sequence[str] | None = None,
    tolerance: Tolerances | None = None,
    ignore: Sequence[str] | None = None,
    knee: bool = False,
    plan: str | None = None,
    storage: str | None = None,
) -> Front:
    """Choose another plan of a finished search and write ``chosen/`` and ``front.json`` anew.

    Args:
        run: the run directory.
        max_error: take the fastest plan whose error is at most this.
        max_latency_ms: take the most exact plan that is at most this slow.
        max_memory_bytes: take one whose engine and its context take at most so much memory.
        limits: on the metrics' own values, as in ``search``; None keeps the run's.
        tolerance: as in ``search``: take the fastest plan within these.
        ignore: outputs whose errors do not count; None leaves out those that the run leaves out.
        knee: take the knee of the front.
        plan: take this one, by its fingerprint or the beginning of it.
        storage: as in ``report``.

    Raises:
        SettingsError: ways to choose that exclude each other, or a limit that is not above 0.
        PlanError: no such plan, or it is not feasible.
        RunError: it is no run directory, another process uses it, or the model has changed, or is gone without a copy.
    """
    given = None if limits is None else one_or_several(limits)
    choice = choice_argument(max_error, max_latency_ms, max_memory_bytes, knee, plan, tolerance, given)
    directory, _ = read_run(run)
    with full_disk_as_error(directory.path), open_run(directory.path), contextlib.ExitStack() as stack:
        directory, file = read_run(run)  # again, now that nobody else can write it
        record = stack.enter_context(contextlib.closing(read_record(directory, file, storage)))
        ignored = file.choice.ignore if ignore is None else one_or_several(ignore)
        limited = file.choice.limits if given is None else choice.limits
        kept = {"ignore": ignored, "limits": limited, "knee": knee and bool(limited)}
        file = file.model_copy(update={"choice": choice.model_copy(update=kept)})
        front = front_of(directory, file, record, keep=True)
        confirmation = None if file.confirms is None else known_confirmation(directory, file, record, storage)
        loaded = load_either(directory, file)
        grouped = GroupedModel(loaded, find_groups(loaded, file.fixed_settings.granularity))
        write_run_files(directory, front, record, grouped, file.environment, confirmation)
        directory.save(file)
        return front


def inspect(
    model: ModelLike, *, data: Any = None, space: str = "default", batch: int = 1, budget: int = 50
) -> Inspection:
    """Take a model apart as a search would: groups, operators, FLOPs, bytes, hazards and what they pin.

    Args:
        model: path of an ONNX model, or an ``onnx.ModelProto``.
        data: calibration samples, as in ``search``; the model is run once over each, and its values are judged, too.
        space: name or path of the search space whose granularity and pins count.
        batch: rows per sample where the batch is dynamic.
        budget: evaluations of the search to come, where the space's granularity is ``auto``.

    Raises:
        ModelError: the model cannot be read, typed or tuned.
        SpaceError: the search space is unknown or invalid.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    named = load_space(space)
    with loaded_model(model) as loaded:
        check_batch(batch, loaded.inputs)
        return inspect_model(loaded, named, data_argument(data), batch, budget)


def apply(
    model: str | Path,
    plan: PrecisionPlan | str | Path | None,
    out: str | Path,
    *,
    keep_fp32: Sequence[str] = (),
    force: bool = False,
    warn: Callable[[str], object] | None = None,
    data: Any = None,
    batch: int = 1,
    reduced: Literal["fp16", "bf16"] = "fp16",
    keep_bf16: Sequence[str] = (),
    opset: int | None = None,
) -> Path:
    """Write the mixed-precision model of a plan, self-contained; past 2 GiB its weights lie beside it.

    Args:
        model: path of the ONNX model that the plan was made for, or of one with the same nodes and other weights, such
            as one that was trained again: what FP16 cannot hold of its weights, and of its values on ``data``, is
            warned of.
        plan: a plan, the path of a plan.json (a search's, or one by hand that names nodes), or None for FP16 wherever
            FP16 can be right.
        out: where to write.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.
        force: overwrite ``out``.
        warn: receives what differs from the request, one line each.
        data: samples, as in ``search``: the plan is checked on the values that they give; without a plan, groups whose
            values FP16 cannot hold stay in FP32.
        batch: rows per sample where the batch is dynamic.
        reduced: what groups have where ``plan`` is None: ``bf16`` takes BF16 wherever BF16 can be right.
        keep_bf16: as ``keep_fp32``, of groups that are BF16; what both mean is FP32.
        opset: raises the model to this operator set first, by ONNX's own converter: most operators have BF16 from 22
            on.

    Returns:
        The path written.

    Raises:
        RunError: ``out`` exists already or cannot be written.
        ModelError: the model cannot be read, typed or tuned.
        PlanError: the plan cannot be read, or belongs to a model with other nodes, or a pattern means nothing.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    given, samples = Path(plan) if isinstance(plan, str) else plan, data_argument(data)
    checked = None if samples is None else CheckedData(samples, batch)
    written, warnings = apply_plan(
        Path(model),
        given,
        Path(out),
        keep_fp32,
        force=force,
        data=checked,
        reduced=Precision(reduced),
        keep_bf16=keep_bf16,
        opset=opset,
    )
    if warn is not None:
        for text in warnings:
            warn(text)
    return written
