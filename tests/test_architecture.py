"""Lower layers never import higher ones, and each outside package stays in its layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mptune"

LAYERS = {
    "mptune._version": 0,
    "mptune.errors": 0,
    "mptune.finding": 0,
    "mptune.findings": 0,
    "mptune.settings": 0,
    "mptune.resources": 0,
    "mptune.files": 0,
    "mptune.printable": 0,
    "mptune.json_form": 0,
    "mptune.processes": 0,
    "mptune.graph": 1,
    "mptune.data": 1,
    "mptune.targets": 1,
    "mptune.engines": 2,
    "mptune.selftest": 3,
    "mptune.tuning": 3,
    "mptune.choice": 3,
    "mptune.run_json": 3,
    "mptune.rundir": 3,
    "mptune.inspection": 3,
    "mptune.observing": 3,
    "mptune.diagnosis": 3,
    "mptune.applying": 4,
    "mptune.reporting": 4,
    "mptune.api": 5,
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
    "jinja2": ("mptune.reporting",),
    "rich": ("mptune.reporting", "mptune.tuning"),
    "typer": ("mptune.cli", "mptune.commands"),
    "torch": (),
}

PRINTERS = ("mptune.cli", "mptune.commands", "mptune.reporting.terminal")
MOST_LINES = 800
"""In a file."""

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in FILES}


def _part(module: str) -> str:
    """The key of LAYERS for a module: mptune.graph.plan -> mptune.graph."""
    return ".".join(module.split(".")[:2])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING too, with the line.

    ``from mptune.graph import plan`` imports ``mptune.graph.plan``, ``from mptune import search`` ``mptune.search``.
    """
    names = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                is_module = node.module == "mptune" or name in MODULES
                names.append((name if is_module else node.module, node.lineno))
    return names


def _layer_faults(path: Path) -> Iterator[str]:
    module = _module(path)
    if module == "mptune":
        return  # the roof: it imports the version and, for type checkers, what it names
    if _part(module) not in LAYERS:
        yield f"{module} has no layer: add it to LAYERS, and to CONTRIBUTING.md"
        return
    layer = LAYERS[_part(module)]
    for imported, line in _imports(path):
        part = _part(imported)
        if imported.split(".")[0] == "mptune" and part not in LAYERS:
            yield f"{module}:{line} imports {imported} from the package's root: name its module"
        elif LAYERS.get(part, 0) > layer:
            yield f"{module}:{line} is in layer {layer} and imports {imported} above it"


def test_lower_layers_never_import_higher_ones() -> None:
    assert [fault for path in FILES for fault in _layer_faults(path)] == []


def test_search_and_diagnosis_do_not_import_each_other() -> None:
    apart = {"mptune.diagnosis": "mptune.tuning", "mptune.tuning": "mptune.diagnosis"}
    faults = [
        f"{module}:{line} imports {imported}"
        for module, path in MODULES.items()
        for imported, line in _imports(path)
        if _part(imported) == apart.get(_part(module))
    ]
    assert faults == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    imported = {module: {name for name, _ in _imports(path)} & MODULES.keys() for module, path in MODULES.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_outside_packages_stay_in_their_layer() -> None:
    faults = []
    for path in FILES:
        for imported, line in _imports(path):
            homes = HOMES.get(imported.split(".")[0])
            if homes is not None and _part(_module(path)) not in homes:
                faults.append(f"{_module(path)}:{line} imports {imported}, which belongs to {homes or 'no layer'}")
    assert faults == []


def test_only_the_command_line_prints_or_exits() -> None:
    faults = []
    for path in FILES:
        module = _module(path)
        may_print = module.startswith(PRINTERS)
        # The worker's child is a process of its own.
        may_exit = module.startswith(("mptune.__main__", "mptune.cli", "mptune.commands", "mptune.processes"))
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""
                if name == "print" and not may_print:
                    faults.append(f"{module}:{node.lineno} prints")
                if name in {"sys.exit", "exit", "quit", "os._exit"} and not may_exit:
                    faults.append(f"{module}:{node.lineno} exits")
    assert faults == []


def test_no_file_is_long() -> None:
    lines = {_module(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {module: count for module, count in lines.items() if count > MOST_LINES}
    assert long == {}, "give each subject a file"


def test_every_file_says_what_it_is_about() -> None:
    assert [_module(path) for path in FILES if not ast.get_docstring(_tree(path))] == []


VAGUE = frozenset({"found", "known", "one", "some", "taken", "said", "both", "of", "so_many"})
"""Names that do not say what a value is."""


def _variables(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of variables, parameters and fields, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.lstrip("_"), node.lineno


@pytest.mark.smoke
def test_names_say_what_a_value_is() -> None:
    faults = ((path, line, name) for path in FILES for name, line in _variables(_tree(path)) if name in VAGUE)
    assert [f"{_module(path)}:{line}: {name}" for path, line, name in faults] == []
