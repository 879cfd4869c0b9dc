"""One plan on several devices: as the search saw it, as ``mptune confirm`` measured it, and as ``time.py`` did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from mptune.errors import RunError
from mptune.files import READ_ERRORS, read_json
from mptune.json_form import JsonForm, decode_float
from mptune.rundir import RunDirectory
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front

_HINT = "give the time.json that weak/time.py wrote on the device"


@dataclass(frozen=True)
class DeviceFigures(JsonForm):
    """Latency and error of one plan on one device.

    Attributes:
        origin: ``search``, ``confirmed``, or the file that the figures come from.
        samples: that the error was taken on; None for all of a set.
        is_plan: whether the engine was held against the plan; None where nothing says so.
    """

    plan: str
    origin: str
    device: str
    engine: str
    latency_ms: float
    latency_source: str
    error: float
    metric: str
    error_source: str
    samples: int | None = None
    is_plan: bool | None = None


class _Latency(BaseModel):
    median_ms: float = Field(gt=0, allow_inf_nan=False)


class _Error(BaseModel):
    metric: str
    value: float | Literal["nan", "inf", "-inf"]


class _TimeFile(BaseModel):
    """``time.json``."""

    format: Literal[1]
    plan: str
    model_sha256: str
    device: str
    engine: str
    latency: _Latency
    error: _Error
    samples: int
    is_plan: bool | None


def device_figures(
    run: RunDirectory, front: Front, evaluations: Iterable[Evaluation], files: Sequence[Path]
) -> tuple[DeviceFigures, ...]:
    """The figures in ``files``, each after those of its plan in the search and on confirmed devices.

    Raises:
        RunError: a file is not what ``time.py`` writes, or is of another run.
    """
    evaluated = {evaluation.plan.fingerprint: evaluation for evaluation in evaluations}
    read = [_read(path, front, evaluated.keys()) for path in files]
    rows: list[DeviceFigures] = []
    for plan in dict.fromkeys(figures.plan for figures in read):
        seen = evaluated[plan]
        rows.append(_of_point(plan, "search", {"device": front.device, "engine": front.engine}, seen.to_point()))
        rows += [*_confirmed(run, plan), *(figures for figures in read if figures.plan == plan)]
    return tuple(rows)


def _read(path: Path, front: Front, plans: Iterable[str]) -> DeviceFigures:
    try:
        file = _TimeFile.model_validate(read_json(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", _HINT) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(f"{path} is no file of time.py: {place}: {first['msg']}", _HINT) from None
    except ValueError as error:
        raise RunError(f"{path} is no file of time.py: {error}", _HINT) from None
    if file.model_sha256 != front.model_sha256 or file.plan not in plans:
        raise RunError(f"{path} is of plan {file.plan}, which is none of this run", "name the run that was exported")
    return DeviceFigures(
        file.plan,
        path.name,
        file.device,
        file.engine,
        file.latency.median_ms,
        "measured",
        decode_float(file.error.value),
        file.error.metric,
        "measured",
        file.samples,
        file.is_plan,
    )


def _confirmed(run: RunDirectory, plan: str) -> Iterator[DeviceFigures]:
    """The plan on each device that ``mptune confirm`` has finished."""
    for path in sorted(run.confirmed.glob("*/front.json")):
        try:
            document: dict[str, Any] = read_json(path)
            measured = next((p["measured"] for p in document["plans"] if p["plan"] == plan), None)
            if measured is not None:
                yield _of_point(plan, "confirmed", document["target"], measured)
        except READ_ERRORS:
            continue  # A confirmation that is being written, or is damaged, is `mptune report`'s to tell.


def _of_point(plan: str, origin: str, target: Mapping[str, Any], point: Mapping[str, Any]) -> DeviceFigures:
    """The figures of a point as front.json has it."""
    latency, error = point["latency"], point["error"]
    return DeviceFigures(
        plan,
        origin,
        target["device"],
        target["engine"],
        float(latency["median_ms"]),
        latency["source"],
        decode_float(error["value"]),
        error["metric"],
        error["source"],
    )
