"""run.json: what a run is made with, in typed sections, and what of it must be equal for a search to go on.

A run of another format is refused: whatever changes the files of a run directory raises ``RUN_FORMAT``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

import pydantic

from mptune._version import __version__
from mptune.choice import Choice
from mptune.engines.environment import Environment
from mptune.errors import RunError, SettingsError, one_line
from mptune.files import files_sha256, read_json
from mptune.finding import Finding
from mptune.printable import cut
from mptune.settings import DataSettings, Granularity, Resume, SearchSettings, declarations, option_name

RUN_FORMAT = 7
DAMAGED_HINT = "restore it from a copy, or search with --fresh: that moves the directory aside (nothing is deleted)"
TARGET, _CONTENT = "target", "version of the "
SPACE, PLUGINS = f"{_CONTENT}space", f"{_CONTENT}plugins"
"""Parts of a run's identity, by the names that messages use."""

HOME: Literal["../.."] = "../.."
"""The way from ``RUN/confirmed/DEVICE`` to ``RUN``."""

_TYPES = {
    **get_type_hints(DataSettings),
    **get_type_hints(SearchSettings),
    "data": str | None,
    "tolerance": tuple[str, ...],
    "plugins": tuple[str, ...],  # recorded as texts
}


class _Section(pydantic.BaseModel):
    # Built when it is needed: most are needed as a part of RunFile alone, and building takes time at every start.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _settings(resume: Resume) -> Any:
    """A section with the settings that are declared ``fixed`` within a run, or ``free`` to change."""
    names = [name for name, each in declarations(SearchSettings).items() if each.resume == resume]
    fields: dict[str, Any] = {name: (_TYPES[name], ...) for name in names}
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

    def __str__(self) -> str:
        latency = "" if self.latency_source == "measured" else ", predicted"
        error = "" if self.error_source == "measured" else f", errors {self.error_source}"
        return f"{self.name}: {self.engine} on {self.device}{latency}{error}"


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
    def from_settings(cls, settings: SearchSettings, **resolved: Any) -> FixedSettings:
        """Those of a search, with what its search space, its model and its labels came to."""
        given = vars(settings.data_settings) | vars(settings) | resolved
        return cls(**{name: given[name] for name in cls.model_fields})


class SearchSection(_settings("free")):  # type: ignore[misc]
    """The settings of the last search that may differ from one to the next."""

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> SearchSection:
        """Those of a search."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        values |= {name: tuple(map(str, values[name])) for name in ("tolerance", "plugins")}
        return cls(**{**values, "data": None if settings.data is None else str(settings.data)})


class RunFile(_Section):
    """The content of run.json.

    ``confirms`` is null in the run of a search. ``nodes_apart`` are nodes with a group of their own
    (``mptune.graph.groups.set_apart``).
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
    confirms: Literal["../.."] | None = None

    @property
    def measured_settings(self) -> dict[str, Any]:
        """The settings that change figures, by their names in ``SearchSettings``; not where they are measured."""
        fixed = vars(self.fixed_settings)
        names = (SearchSettings.__dataclass_fields__.keys() & fixed.keys()) - {"target", "engine", "space"}
        more = {name: getattr(self.search, name) for name in ("reported_metrics", "confirm_rounds")}
        return {**{name: fixed[name] for name in names}, **more, "data_settings": DataSettings(fixed["batch"])}


def read_run_file(path: Path) -> RunFile | None:
    """Read a run.json; None where there is none."""
    try:
        document = read_json(path)
        written = document.get("format") if isinstance(document, dict) else RUN_FORMAT
        if isinstance(written, int) and written != RUN_FORMAT:
            raise RunError(
                f"{path.parent} was written by another version of mptune (run format {written}, this one reads "
                f"{RUN_FORMAT})",
                "search again in another directory with --out DIR, or start over with --fresh (nothing is deleted)",
            )
        return RunFile.model_validate(document)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    except ValueError as error:  # no JSON, or something else
        raise RunError(f"{path} is damaged: {one_line(error)}", DAMAGED_HINT) from None


def identity_of(file: RunFile, *, as_named: bool = False) -> dict[str, Any]:
    """What a study is made with, by the names that messages use: runs share one only where all of it is equal.

    Of target, engine and search space counts what they came to; ``as_named``: how they were named, too. A metric counts
    by its name: ``check_metrics`` compares scripts.
    """
    fixed, target = file.fixed_settings, file.target
    identity: dict[str, Any] = {"run format": file.format, "model": file.model.sha256, "metric": file.search.metric}
    given = {**fixed.model_dump(mode="json"), "shapes": list(map(str, fixed.shapes))}
    # The data and the target are recorded once they are known; a profile counts where latencies are predicted.
    given |= {} if file.data is None else {"data_sha256": file.data.sha256}
    given |= {} if target is None or target.profile_sha256 is None else {"profile_sha256": target.profile_sha256}
    for name, value in given.items():
        parts = {f"{name} {key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        if as_named or name not in ("target", "engine", "space"):
            identity |= {_label(key): part for key, part in parts.items()}
    identity |= {} if target is None else {TARGET: str(target)}
    return {**identity, "nodes apart": list(file.nodes_apart)}


def _label(setting: str) -> str:
    """How messages name a setting: its option where it has one; of a file by what was in it."""
    declared = declarations(SearchSettings).get(setting)
    if declared is not None and declared.panel:
        return option_name(setting)
    name = setting.removesuffix("_sha256")
    return name.replace("_", " ") if name == setting else f"{_CONTENT}{name}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], there: str, here: str) -> dict[str, str]:
    """What differs between two identities: name -> both values in brackets, or nothing where they are hashes.

    What only one of them has does not count.
    """

    def text(value: object) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        return "none" if value is None else cut(words) or "none"

    return {
        name: "" if name.startswith((_CONTENT, "model")) else f" ({text(before[name])} {there}, {text(new)} {here})"
        for name, new in now.items()
        if name in before and before[name] != new
    }


def check_same(path: Path, recorded: RunFile, asked: RunFile) -> None:
    """Refuse to go on with the run at ``path`` if it was made with something else than what is asked for."""
    before, now = identity_of(recorded, as_named=True), identity_of(asked, as_named=True)
    for name, values in differences(before, now, "before", "now").items():
        refuse_other(path, name, values)


def refuse_other(path: Path, name: str, shown: str = "") -> NoReturn:
    """Refuse to go on with a run that was made with something else."""
    hint = "give it a run directory of its own with --out DIR, or start over with --fresh (nothing is deleted)"
    raise RunError(f"{path} was made with another {name}{shown}", f"go on with the same {name}, {hint}")


def plugins_sha256(paths: Sequence[Path]) -> tuple[str, ...]:
    """Of the content of each library of plugins, in the order in which they are loaded."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise SettingsError(f"{missing} is no file", "check the path", setting="plugins")
    return tuple(map(files_sha256, paths))
