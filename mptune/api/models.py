"""``inspect`` and ``apply``: what is done with a model without a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mptune.api.arguments import ModelLike, check_batch, data_argument, loaded_model
from mptune.applying import check_out, load_for_plan, resolve_plan, write_model
from mptune.files import PathLike
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.inspection import Inspection, inspect_model
from mptune.observing import load_samples
from mptune.settings import DataSettings, documented
from mptune.tuning.space import load_space


def inspect(
    model: ModelLike,
    *,
    data: Any = None,
    space: str = "default",
    batch: int = 1,
    budget: int = 50,
    all_samples: bool = False,
    stage: Callable[[str], object] | None = None,
) -> Inspection:
    """Take a model apart as a search would: groups, operators, FLOPs, bytes, hazards and what they pin.

    Args:
        model: path of an ONNX model, or an ``onnx.ModelProto``.
        data: calibration samples, as in ``search``; the model is run once over each, and its values are judged, too. A
            large model is run over the first ones only: at least 4, and as many as 150 GFLOP are enough for.
        all_samples: run it over as many as a search would, however large it is.
        space: name or path of the search space whose granularity and pins count.
        batch: rows per sample where the batch is dynamic.
        budget: evaluations of the search to come, where the space's granularity is ``auto``.
        stage: receives what is done, one line each, while a large model is run on the data.

    Raises:
        ModelError: the model cannot be read, typed or tuned.
        SpaceError: the search space is unknown or invalid.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    DataSettings(batch=batch)  # refuses what cannot be meant
    named = load_space(space)
    with loaded_model(model) as loaded:
        check_batch(batch, loaded.inputs)
        return inspect_model(loaded, named, data_argument(data), batch, budget, stage, all_samples=all_samples)


@documented
def apply(
    model: PathLike,
    plan: PrecisionPlan | PathLike | None,
    out: PathLike,
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
            as one that was trained again: what FP16 cannot hold of it is warned of.
        plan: a plan, the path of a plan.json (a search's, or one by hand that names nodes), or None for FP16 wherever
            FP16 can be right.
        out: where to write; ``force`` overwrites it.
        keep_fp32: patterns as in search-space files; what they mean is FP32 whatever the plan says.
        warn: receives what differs from the request, one line each.
        data: samples, as in ``search``: the plan is checked on the values that they give; without a plan, groups whose
            values FP16 cannot hold stay in FP32.
        reduced: what groups have where ``plan`` is None: ``bf16`` takes BF16 wherever BF16 can be right.
        keep_bf16: as ``keep_fp32``, of groups that are BF16; what both mean is FP32.
        {settings}

    Returns:
        The path written.

    Raises:
        RunError: ``out`` exists already or cannot be written.
        ModelError: the model cannot be read, typed or tuned.
        PlanError: the plan cannot be read, or belongs to a model with other nodes, or a pattern means nothing.
        DataError: the data do not fit the model.
        BaselineError: the model does not run on them in FP32.
    """
    given = plan if plan is None or isinstance(plan, PrecisionPlan) else Path(plan)
    written, source = Path(out), data_argument(data)
    check_out(given, written, force=force)
    loaded = load_for_plan(Path(model), given, opset)
    samples = None if source is None else load_samples(loaded, source, batch)
    resolved = resolve_plan(loaded, given, keep_fp32, samples, reduced=Precision.named(reduced), keep_bf16=keep_bf16)
    doubts = write_model(loaded, resolved, written, force=force)
    if warn is not None:
        for text in (*resolved.warnings, *doubts):
            warn(text)
    return written
