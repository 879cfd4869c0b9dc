"""The names that ``import mptune`` gives."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import mptune
import mptune.errors
from tests.test_optional import run_python

PACKAGE = Path(mptune.__file__).parent


def test_every_error_is_public() -> None:
    declared = {name for name, value in vars(mptune.errors).items() if isinstance(value, type)}
    errors = {name for name in declared if issubclass(getattr(mptune.errors, name), Exception)}
    assert errors == {name for name in mptune.__all__ if name.endswith("Error")}


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported: set[tuple[str, str | None]] = set()
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.name for alias in node.names]
            assert names in (["*"], [alias.asname for alias in node.names]), "else mypy --strict: not exported"
            every = importlib.import_module(node.module).__all__ if names == ["*"] else names
            imported |= {(name, node.module) for name in every}
    assert imported == set(mptune._HOME.items())


FUNCTIONS = ("apply", "confirm", "export", "inspect", "pick", "report", "search")

MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py"
]


def test_no_module_has_the_name_of_a_public_name() -> None:
    """Importing ``mptune.search`` as a module would put it in the function's place."""
    assert not {f"mptune.{name}" for name in mptune.__all__} & set(MODULES)


@pytest.mark.parametrize("first", ["", "mptune.Evaluation; mptune.search"])
def test_functions_stay_functions_whatever_module_is_imported(first: str) -> None:
    run_python(f"""
import importlib, types
import mptune
import mptune.tuning.front
{first}
for module in {MODULES!r}:
    importlib.import_module(module)
for name in {FUNCTIONS!r}:
    function = getattr(mptune, name)
    assert isinstance(function, types.FunctionType) and function.__module__ == mptune._HOME[name], name
assert mptune.Front is mptune.tuning.front.Front
assert type(mptune) is types.ModuleType
""")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        mptune.nothing_like_it  # noqa: B018
