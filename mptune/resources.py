"""The files that come with mptune: target profiles and search spaces, in the source tree or installed; templates."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from mptune.errors import EXIT_USAGE, MptuneError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["targets", "spaces"]
_THE_GPU_HERE = frozenset({"cuda", "gpu", "nvidia", "cuda:0", "gpu0", "local", "here", "this", "host"})
"""Names that other tools have for what ``--target auto`` means."""

Schema = TypeVar("Schema", bound=pydantic.BaseModel)


def _folder(kind: Kind) -> Path:
    """Where the files of a kind lie: inside the package once installed, beside it in the source tree."""
    package = Path(__file__).resolve().parent
    inside = package / "search_spaces"
    root = inside if inside.is_dir() else package.parent / "search_spaces"
    return root / "targets" if kind == "targets" else root


def read_template(name: str) -> str:
    """The text of a file under ``mptune/reporting/templates``."""
    return (Path(__file__).resolve().parent / "reporting" / "templates" / name).read_text(encoding="utf-8")


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all files of a kind, sorted."""
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.toml")))


def find(kind: Kind, name: str) -> Path:
    """The path of one of the files that ``names`` lists; another name is a ``KeyError``."""
    if name not in names(kind):
        raise KeyError(name)
    return _folder(kind) / f"{name}.toml"


def locate(kind: Kind, name_or_path: str, error: type[MptuneError]) -> Path:
    """The path that a person means by a known name, or by the path of a TOML file of their own.

    A path ends in ``.toml`` or has a folder in it. An ``error`` has close matches in its hint, and the exit code of
    wrong usage.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        raise _usage(
            error(f"no such file: {path}", f"give the path of a TOML file, or a name that `mptune {kind}` lists")
        )
    if name_or_path in names(kind):
        return find(kind, name_or_path)
    word = name_or_path.lower()
    close = [name for name in names(kind) if len(word) > 2 and word in name]
    close = close or difflib.get_close_matches(word, names(kind), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    if kind == "targets" and word in _THE_GPU_HERE:
        hint = "--target auto takes the GPU of this machine; "
    what = {"targets": "target", "spaces": "search space"}[kind]
    more = f"{hint}`mptune {kind}` lists them all; a TOML file of your own works too"
    raise _usage(error(f"there is no {what} {name_or_path!r}", more))


def _usage(error: MptuneError) -> MptuneError:
    error.exit_code = EXIT_USAGE
    return error


def read_toml(
    path: Path,
    schema: type[Schema],
    error: type[MptuneError],
    example: str,
) -> Schema:
    """Read a TOML file that a person wrote, checked against a schema."""
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return schema.model_validate(document)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", "check the path and its permissions") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(f"{path} is not TOML: {problem}", example) from None
    except pydantic.ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise error(f"{path}: {where}: {message}", example) from None
