"""run.json: what a run was made with, in typed sections.

A run of another format is refused: whatever changes the files of a run directory raises ``RUN_FORMAT``.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pydantic

from mptune._version import __version__
from mptune.choice import Choice
from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.finding import Finding
from mptune.settings import (
    DataSettings,
    EngineChoice,
    Granularity,
    LatencySettings,
    SearchSettings,
    ShapeRange,
    TensorRtSettings,
)

RUN_FORMAT = 5


class _Section(pydantic.BaseModel):
    # Built when it is needed: most are needed as a part of RunFile alone, and building takes time at every start.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ModelSection(_Section):
    """Which model the run is about."""

    path: str
    sha256: str


class TargetSection(_Section):
    """What the figures were taken on; the hash is of the profile's figures, where latencies are predicted from them."""

    name: str
    engine: str
    device: str
    latency_source: str
    error_source: str
    profile_sha256: str | None = None


class DataSection(_Section):
    """The calibration data; the hash is of all samples' names, types, shapes and values."""

    source: str
    sha256: str
    samples: int
    is_random: bool


class FixedSettings(_Section):
    """The settings that change what is measured: they cannot change within a run.

    ``space_sha256`` is of the search-space file's bytes, ``groups_sha256`` of which nodes are in which layer group.
    """

    target: str
    engine: EngineChoice
    space: str
    space_sha256: str
    granularity: Granularity
    groups_sha256: str
    precisions: tuple[str, ...]
    opset: int | None
    batch: int
    random_samples: int
    held_out_fraction: float = pydantic.Field(ge=0.0, lt=1.0)
    max_search_samples: int | None
    seed: int
    tf32: bool
    latency: LatencySettings
    shapes: tuple[ShapeRange, ...]
    tensorrt: TensorRtSettings
    feedback: tuple[str, ...]
    steps: int | None
    labels_sha256: str | None
    plugins_sha256: tuple[str, ...]

    @classmethod
    def of(cls, settings: SearchSettings, **resolved: Any) -> FixedSettings:
        """Those of a search, with what its search space, its model and its labels came to."""
        given = vars(settings.data_settings) | vars(settings) | resolved
        return cls(**{name: given[name] for name in cls.model_fields})


class SearchSection(_Section):
    """The settings of the last search that may differ from one to the next."""

    budget: int
    metric: str
    reported_metrics: tuple[str, ...]
    sampler: str
    confirm_rounds: int
    confirm_points: int
    timeout_s: float | None
    max_disk_bytes: int | None
    data: str | None
    max_error: float | None
    max_latency_ms: float | None
    max_memory_bytes: int | None
    tolerance: tuple[str, ...]
    ignore: tuple[str, ...]
    plugins: tuple[str, ...]
    skip_checks: bool

    @classmethod
    def of(cls, settings: SearchSettings) -> SearchSection:
        """Those of a search."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        data = None if settings.data is None else str(settings.data)
        texts = {name: tuple(map(str, values[name])) for name in ("tolerance", "plugins")}
        return cls(**{**values, **texts, "data": data})


class RunFile(_Section):
    """The content of run.json.

    ``confirms`` is the way from a confirmation, which is a run directory of its own, to the run that it confirms; null
    in the run of a search. ``nodes_apart`` are the nodes that are FP32 under any plan although their groups are not
    (``mptune.graph.grouping.groups``).
    """

    format: int = RUN_FORMAT
    mptune: str = __version__
    model: ModelSection
    fixed_settings: FixedSettings
    search: SearchSection
    storage: str | None = None
    study: str
    data: DataSection | None = None
    target: TargetSection | None = None
    environment: Environment | None = None
    nodes_apart: tuple[str, ...] = ()
    choice: Choice = Choice()
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    confirms: str | None = None

    @classmethod
    def of(
        cls, settings: SearchSettings, model: ModelSection, fixed: FixedSettings, storage: str | None, study: str
    ) -> RunFile:
        """That of a search that begins."""
        return cls(
            model=model,
            fixed_settings=fixed,
            search=SearchSection.of(settings),
            storage=storage,
            study=study,
            choice=Choice.of(settings),
        )

    @property
    def measured_settings(self) -> dict[str, Any]:
        """The settings that change figures, by their names in ``SearchSettings``; not where they are measured."""
        fixed, search = self.fixed_settings, self.search
        elsewhere = {"target", "engine", "space"}
        names = {each.name for each in dataclasses.fields(SearchSettings)} & vars(fixed).keys() - elsewhere
        return {
            **{name: getattr(fixed, name) for name in names},
            "data_settings": DataSettings(batch=fixed.batch),
            "reported_metrics": search.reported_metrics,
            "confirm_rounds": search.confirm_rounds,
        }


def damaged_hint(run: Path) -> str:
    """What to do about a run directory whose run.json is none."""
    again = f"`mptune search MODEL --out {shlex.quote(str(run))} --fresh`"
    return f"restore it from a copy, or start over: {again} moves the directory aside (nothing is deleted)"


def parse_run_file(document: Any, path: Path) -> RunFile:
    """Read the content of ``path``, a run.json."""
    if not isinstance(document, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object", damaged_hint(path.parent))
    written = document.get("format")
    if isinstance(written, int) and written != RUN_FORMAT:
        raise RunError(
            f"{path.parent} was written by another version of mptune (run format {written}, this one reads "
            f"{RUN_FORMAT})",
            "search again in another directory with --out DIR, or start over with --fresh (nothing is deleted)",
        )
    try:
        return RunFile.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        wrong = f"{where!r} is missing" if first["type"] == "missing" else f"{where}: {first['msg']}"
        raise RunError(f"{path} is not a run of mptune: {wrong}", damaged_hint(path.parent)) from None
