"""run.json: what a run was made with, in typed sections.

A run of another format is refused: whatever changes the files of a run directory raises ``RUN_FORMAT``.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pydantic

from mptune._version import __version__
from mptune.choice import Choice
from mptune.engines.environment import Environment
from mptune.errors import RunError
from mptune.finding import Finding
from mptune.settings import DataSettings, Granularity, Resume, SearchSettings, declarations

RUN_FORMAT = 5

_TYPES = {**get_type_hints(DataSettings), **get_type_hints(SearchSettings)}
_AS_TEXT: dict[str, Any] = {"data": str | None, "tolerance": tuple[str, ...], "plugins": tuple[str, ...]}
"""Settings that are recorded as texts."""


class _Section(pydantic.BaseModel):
    # Built when it is needed: most are needed as a part of RunFile alone, and building takes time at every start.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _settings(resume: Resume) -> Any:
    """A section with the settings that are declared ``fixed`` within a run, or ``free`` to change."""
    names = [name for name, each in declarations(SearchSettings).items() if each.resume == resume]
    fields: dict[str, Any] = {name: (_AS_TEXT.get(name, _TYPES[name]), ...) for name in names}
    return pydantic.create_model("_Settings", __base__=_Section, **fields)


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


class FixedSettings(_settings("fixed")):  # type: ignore[misc]
    """The settings that change what is measured: they cannot change within a run; and what some of them came to.

    ``space_sha256`` is of the search-space file's bytes, ``groups_sha256`` of which nodes are in which layer group.
    """

    space_sha256: str
    granularity: Granularity
    groups_sha256: str
    labels_sha256: str | None
    plugins_sha256: tuple[str, ...]

    @classmethod
    def of(cls, settings: SearchSettings, **resolved: Any) -> FixedSettings:
        """Those of a search, with what its search space, its model and its labels came to."""
        given = vars(settings.data_settings) | vars(settings) | resolved
        return cls(**{name: given[name] for name in cls.model_fields})


class SearchSection(_settings("free")):  # type: ignore[misc]
    """The settings of the last search that may differ from one to the next."""

    @classmethod
    def of(cls, settings: SearchSettings) -> SearchSection:
        """Those of a search."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        values |= {name: tuple(map(str, values[name])) for name in ("tolerance", "plugins")}
        return cls(**{**values, "data": None if settings.data is None else str(settings.data)})


class RunFile(_Section):
    """The content of run.json.

    ``confirms`` is the way from a confirmation, which is a run directory of its own, to the run that it confirms; null
    in the run of a search. ``nodes_apart`` are the nodes that are FP32 under any plan although their groups are not
    (``mptune.graph.groups``).
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
        search, choice = SearchSection.of(settings), Choice.of(settings)
        return cls(model=model, fixed_settings=fixed, search=search, storage=storage, study=study, choice=choice)

    @property
    def measured_settings(self) -> dict[str, Any]:
        """The settings that change figures, by their names in ``SearchSettings``; not where they are measured."""
        fixed = vars(self.fixed_settings)
        names = (SearchSettings.__dataclass_fields__.keys() & fixed.keys()) - {"target", "engine", "space"}
        more = {name: getattr(self.search, name) for name in ("reported_metrics", "confirm_rounds")}
        return {**{name: fixed[name] for name in names}, **more, "data_settings": DataSettings(fixed["batch"])}


def damaged_hint(run: Path) -> str:
    """What to do about a run directory whose run.json is none."""
    again = f"`mptune search MODEL --out {shlex.quote(str(run))} --fresh`"
    return f"restore it from a copy, or start over: {again} moves the directory aside (nothing is deleted)"


def parse_run_file(document: Any, path: Path) -> RunFile:
    """Read the content of ``path``, a run.json."""
    written = document.get("format") if isinstance(document, dict) else RUN_FORMAT
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
        where = ".".join(map(str, first["loc"])) or "the file"
        wrong = f"{where!r} is missing" if first["type"] == "missing" else f"{where}: {first['msg']}"
        raise RunError(f"{path} is not a run of mptune: {wrong}", damaged_hint(path.parent)) from None
