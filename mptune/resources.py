"""Files that come with mptune, in the source tree or installed: targets, search spaces, two small models."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from mptune.errors import EXIT_USAGE, MptuneError, one_line
from mptune.files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["targets", "spaces"]
Schema = TypeVar("Schema", bound=pydantic.BaseModel)


def _installed(folder: str) -> Path:
    """A folder that lies beside the package in the source tree, and inside it once installed."""
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def _folder(kind: Kind) -> Path:
    return _installed("search_spaces/targets" if kind == "targets" else "search_spaces")


def small_model(name: Literal["denoiser", "digits"]) -> tuple[Path, Path]:
    """A model and its calibration samples: the tutorial's denoiser, or a vision transformer for 8x8 digits."""
    folder = _installed("benchmarks/models")
    return folder / ("digits_vit.onnx" if name == "digits" else f"{name}.onnx"), folder / f"{name}_calib.npz"


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all files of a kind, sorted."""
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.toml")))


def find(kind: Kind, name: str) -> Path:
    """The path of one of the files that ``names`` lists."""
    return _folder(kind) / f"{name}.toml"


def is_path(name_or_path: str) -> bool:
    """Whether a person means a file of their own: a path ends in ``.toml`` or has a folder in it."""
    path = Path(name_or_path)
    return path.suffix == ".toml" or len(path.parts) > 1


def locate(kind: Kind, name_or_path: str, error: type[MptuneError]) -> Path:
    """The path that a person means by a known name, or by the path of a TOML file of their own.

    An ``error`` has close matches in its hint, and the exit code of wrong usage.
    """
    if is_path(name_or_path) and Path(name_or_path).is_file():
        return Path(name_or_path)
    if name_or_path in names(kind):
        return find(kind, name_or_path)
    word = name_or_path.lower()
    close = [name for name in names(kind) if len(word) > 2 and word in name]
    close = close or difflib.get_close_matches(word, names(kind), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    what = "file" if is_path(name_or_path) else {"targets": "target", "spaces": "search space"}[kind]
    raised = error(
        f"there is no {what} {name_or_path!r}",
        f"{hint}`mptune {kind}` lists them all; a TOML file of your own works too",
    )
    raised.exit_code = EXIT_USAGE
    raise raised


def read_toml(path: Path, schema: type[Schema], error: type[MptuneError], example: str) -> Schema:
    """Read a TOML file that a person wrote, checked against a schema."""
    try:
        document: dict[str, Any] = tomllib.loads(read_text(path))
        return schema.model_validate(document)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", "check the path and its permissions") from None
    except pydantic.ValidationError as problem:
        raise error(f"{path}: {one_line(problem)}", example) from None
    except (ValueError, RecursionError) as problem:  # no UTF-8, no TOML, nested too deeply
        raise error(f"{path} is not TOML: {one_line(problem)}", example) from None
