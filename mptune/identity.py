"""What a run and its study were made with: figures stand beside each other only where all of it is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mptune.errors import RunError, SettingsError
from mptune.files import files_sha256
from mptune.run_json import DataSection, FixedSettings, RunFile, TargetSection

FRESH_HINT = "give it a run directory of its own with --out DIR, or start over with --fresh (nothing is deleted)"

DATA = "set of calibration data"
TARGET = "target"
PROFILE = "content of the target's profile"
SPACE = "content of the search space"
PLUGINS = "content of the plugins (--plugin)"
APART = "set of nodes that stay in FP32"
_LABELS = {
    "space_sha256": SPACE,
    "groups_sha256": "set of layer groups",
    "labels_sha256": "content of the labels",
    "plugins_sha256": PLUGINS,
    "precisions": "set of precisions",
    "opset": "operator set (--opset)",
    "shapes": "--shapes",
}
"""How messages name a fixed setting; the others by their field's name."""

_HASHES = {"model", DATA, PROFILE, APART, *(_LABELS[name] for name in _LABELS if name.endswith("_sha256"))}
"""What of an identity is not shown."""


def identity_of(file: RunFile) -> dict[str, Any]:
    """What a study is made with, by the names that messages use: runs share one only where all of it is equal.

    Of target, engine and search space counts what they came to, not how they were named. A metric counts by its name:
    ``check_metrics`` compares scripts.
    """
    settings = _by_label(file.fixed_settings)
    for name in (TARGET, "engine", "space"):
        del settings[name]
    data = {} if file.data is None else {DATA: file.data.sha256}
    target = {} if file.target is None else _target_identity(file.target)
    return {
        "run format": file.format,
        "model": file.model.sha256,
        **data,
        **settings,
        **target,
        APART: list(file.nodes_apart),
        "metric": file.search.metric,
    }


def plugins_sha256(paths: Sequence[Path]) -> tuple[str, ...]:
    """Of the content of each library of plugins, in the order in which they are loaded."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise SettingsError(f"{missing} is no file", "check the path", setting="plugins")
    return tuple(map(files_sha256, paths))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], there: str, here: str) -> dict[str, str]:
    """What differs between two identities: name -> both values in brackets, or nothing where they are hashes.

    What only one of them has does not count: the target and the data are recorded once they are known.
    """
    changed = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    return {
        name: "" if name in _HASHES else f" ({_value_text(old)} {there}, {_value_text(new)} {here})"
        for name, (old, new) in changed.items()
    }


def check_same(path: Path, recorded: RunFile, model_sha256: str, settings: FixedSettings, metric: str) -> None:
    """Refuse to go on with the run at ``path`` if it was made with another model, metric or other fixed settings."""
    if recorded.model.sha256 != model_sha256:
        raise RunError(f"{path} belongs to another model: {recorded.model.path} had another content", FRESH_HINT)
    before, now = _by_label(recorded.fixed_settings), _by_label(settings)
    _check_equal(path, {**before, "metric": recorded.search.metric}, {**now, "metric": metric})


def _check_equal(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, values in differences(before, now, "before", "now").items():
        refuse_other(path, name, values)


def _by_label(settings: FixedSettings) -> dict[str, Any]:
    """Fixed settings as JSON values, by the names that messages use."""
    labelled: dict[str, Any] = {}
    for name, value in settings.model_dump(mode="json").items():
        inner = value if isinstance(value, dict) else None
        parts = {name: value} if inner is None else {f"{name} {key}": part for key, part in inner.items()}
        labelled.update({_LABELS.get(key, key.replace("_", " ")): part for key, part in parts.items()})
    return {**labelled, _LABELS["shapes"]: [str(shape) for shape in settings.shapes]}


def _target_identity(target: TargetSection) -> dict[str, str]:
    profile = {} if target.profile_sha256 is None else {PROFILE: target.profile_sha256}
    return {TARGET: target_text(target), **profile}


def target_text(target: TargetSection) -> str:
    """A target in one line, with what of its figures is not measured."""
    latency = "" if target.latency_source == "measured" else ", predicted"
    error = "" if target.error_source == "measured" else f", errors {target.error_source}"
    return f"{target.name}: {target.engine} on {target.device}{latency}{error}"


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else str(value)


def refuse_confirmation(path: Path, recorded: RunFile | None) -> None:
    """Refuse to search in the directory of a confirmation."""
    if recorded is not None and recorded.confirms is not None:
        raise RunError(f"{path} is a confirmation", "go on with it: `mptune confirm` with the run around it")


def check_data(path: Path, recorded: RunFile, data: DataSection) -> None:
    """Refuse to go on with a run that was made with other calibration data."""
    before = recorded.data
    if before is not None and before.sha256 != data.sha256:
        raise RunError(
            f"{path} was made with other data ({before.source}, {before.samples} samples; "
            f"{data.source}, {data.samples} samples now)",
            f"give the same --data, {FRESH_HINT}",
        )


def check_target(path: Path, recorded: RunFile, target: TargetSection) -> None:
    """Refuse to go on with a run whose figures were taken on another device."""
    if recorded.target is not None:
        _check_equal(path, _target_identity(recorded.target), _target_identity(target))


def refuse_other(path: Path, name: str, shown: str = "") -> NoReturn:
    """Refuse to go on with a run that was made with something else."""
    raise RunError(f"{path} was made with another {name}{shown}", f"go on with the same {name}, {FRESH_HINT}")
