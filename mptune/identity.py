"""What a run and its study were made with: figures stand beside each other only where all of it is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mptune.errors import RunError, SettingsError
from mptune.files import files_sha256
from mptune.run_json import RunFile, TargetSection

TARGET, SPACE, PLUGINS = "target", "content of the search space", "content of the plugins (--plugin)"
_DATA, _PROFILE = "set of calibration data", "content of the target's profile"
_APART = "set of nodes that stay in FP32"
_LABELS = {
    "space_sha256": SPACE,
    "groups_sha256": "set of layer groups",
    "labels_sha256": "content of the labels",
    "plugins_sha256": PLUGINS,
    "precisions": "set of precisions",
    "opset": "operator set (--opset)",
    "shapes": "--shapes",
    "target": "--target",
    "engine": "--engine",
    "space": "--space",
}
"""How messages name a fixed setting; the others by their field's name."""

_HASHES = {"model", _DATA, _PROFILE, _APART, *(label for name, label in _LABELS.items() if name.endswith("_sha256"))}
"""What of an identity is not shown."""


def identity_of(file: RunFile, *, as_named: bool = False) -> dict[str, Any]:
    """What a study is made with, by the names that messages use: runs share one only where all of it is equal.

    Of target, engine and search space counts what they came to; ``as_named``: how they were named, too. A metric counts
    by its name: ``check_metrics`` compares scripts.
    """
    identity: dict[str, Any] = {"run format": file.format, "model": file.model.sha256, "metric": file.search.metric}
    if file.data is not None:
        identity[_DATA] = file.data.sha256
    for name, value in file.fixed_settings.model_dump(mode="json").items():
        parts = {f"{name} {key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        if as_named or name not in ("target", "engine", "space"):
            identity |= {_LABELS.get(key, key.replace("_", " ")): part for key, part in parts.items()}
    identity["--shapes"] = list(map(str, file.fixed_settings.shapes))
    if file.target is not None:
        identity[TARGET] = target_text(file.target)
        if file.target.profile_sha256 is not None:
            identity[_PROFILE] = file.target.profile_sha256
    return {**identity, _APART: list(file.nodes_apart)}


def target_text(target: TargetSection) -> str:
    """A target in one line, with what of its figures is not measured."""
    latency = "" if target.latency_source == "measured" else ", predicted"
    error = "" if target.error_source == "measured" else f", errors {target.error_source}"
    return f"{target.name}: {target.engine} on {target.device}{latency}{error}"


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

    def text(value: object) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, list):
            return " ".join(map(str, value)) or "none"
        return "none" if value is None else str(value)

    changed = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    return {
        name: "" if name in _HASHES else f" ({text(old)} {there}, {text(new)} {here})"
        for name, (old, new) in changed.items()
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
