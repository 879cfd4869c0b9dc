"""The house: lower floors never import higher ones, and each outside package stays on its floor."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mptune"

FLOORS = {
    "mptune._version": 0,
    "mptune.errors": 0,
    "mptune.scratch": 0,
    "mptune.finding": 0,
    "mptune.settings": 0,
    "mptune.resources": 0,
    "mptune.files": 0,
    "mptune.printable": 0,
    "mptune.graph": 1,
    "mptune.data": 1,
    "mptune.targets": 1,
    "mptune.engines": 2,
    "mptune.selftest": 3,
    "mptune.tuning": 3,
    "mptune.run_json": 3,
    "mptune.rundir": 3,
    "mptune.inspection": 3,
    "mptune.diagnosis": 3,
    "mptune.applying": 4,
    "mptune.reporting": 4,
    "mptune.arguments": 5,
    "mptune.deploying": 5,
    "mptune.joining": 5,
    "mptune.comparing": 5,
    "mptune.api": 5,
    "mptune.run": 5,
    "mptune.commands": 6,
    "mptune.cli": 6,
    "mptune.__main__": 7,
}

HOMES = {
    "optuna": ("mptune.tuning",),
    "tensorrt": ("mptune.engines",),
    "tensorrt_rtx": ("mptune.engines",),
    "onnxruntime": ("mptune.engines",),
    "cuda": ("mptune.engines",),
    "rich": ("mptune.reporting",),
    "typer": ("mptune.cli", "mptune.commands"),
    "torch": (),
}

PRINTERS = ("mptune.cli", "mptune.commands", "mptune.reporting.terminal")
MOST_ENTRIES = 14
"""In a folder below mptune/."""
MOST_LINES = 400
"""In a file."""

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in FILES}


def _part(module: str) -> str:
    """The key of FLOORS for a module: mptune.graph.plan -> mptune.graph."""
    return ".".join(module.split(".")[:2])


def _imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING too, with the line.

    ``from mptune.graph import plan`` imports ``mptune.graph.plan``, ``from mptune import search`` ``mptune.search``.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                is_module = node.module == "mptune" or name in MODULES
                found.append((name if is_module else node.module, node.lineno))
    return found


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_lower_floors_never_import_higher_ones(path: Path) -> None:
    module = _module(path)
    if module == "mptune":
        return  # the roof: it imports the version and, for type checkers, what it names
    assert _part(module) in FLOORS, f"{module} has no floor: add it to FLOORS, and to CONTRIBUTING.md"
    floor = FLOORS[_part(module)]
    for imported, line in _imports(path):
        if imported.split(".")[0] == "mptune":
            part = _part(imported)
            assert part in FLOORS, f"{module}:{line} imports {imported} from the package's root: name its module"
            assert FLOORS[part] <= floor, f"{module}:{line} is on floor {floor} and imports {imported} above it"


def test_no_module_imports_itself_by_way_of_others() -> None:
    imported = {module: {name for name, _ in _imports(path)} & MODULES.keys() for module, path in MODULES.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_outside_packages_stay_on_their_floor(path: Path) -> None:
    module = _module(path)
    for imported, line in _imports(path):
        homes = HOMES.get(imported.split(".")[0])
        if homes is not None:
            assert _part(module) in homes, f"{module}:{line} imports {imported}, which belongs to {homes or 'no floor'}"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_only_the_command_line_prints_or_exits(path: Path) -> None:
    module = _module(path)
    may_print = module.startswith(PRINTERS)
    # The worker's child is a process of its own.
    may_exit = module.startswith(("mptune.__main__", "mptune.cli", "mptune.commands", "mptune.engines"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert may_print or name != "print", f"{module}:{node.lineno} prints"
            assert may_exit or name not in {"sys.exit", "exit", "quit", "os._exit"}, f"{module}:{node.lineno} exits"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_no_file_is_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{path.relative_to(PACKAGE.parent)} has {lines} lines: give each subject a file"


def test_no_folder_is_full() -> None:
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        entries = [entry for entry in folder.iterdir() if entry.name != "__pycache__"]
        assert len(entries) <= MOST_ENTRIES, f"{folder.relative_to(PACKAGE.parent)} has {len(entries)} entries"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_every_file_says_what_it_is_about(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"


def test_every_public_name_can_be_imported() -> None:
    import mptune

    for name in mptune.__all__:
        assert getattr(mptune, name) is not None
    assert set(mptune.__all__) <= set(dir(mptune))
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        mptune.serch  # noqa: B018
