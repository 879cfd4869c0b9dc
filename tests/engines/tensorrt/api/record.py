"""Writes the lists of names beside this file: what TensorRT's Python module holds, version by version.

python -m tests.engines.tensorrt.api.record --clone PATH v10.0.1=10.0.txt v10.3.0=10.3.txt
python -m tests.engines.tensorrt.api.record --module tensorrt_bindings 11.4.txt

The first form reads the bindings' sources (pybind11) in a clone of github.com/NVIDIA/TensorRT at a tag. The second asks
an installed module; 11.4 was taken from the wheel tensorrt-cu13-bindings, with empty libraries in place of libnvinfer:
the names are in the bindings. One name a line: ``Class``, ``Class.member``, ``Enum.VALUE`` or a function.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SOURCES = (
    "python/src/infer/pyCore.cpp",
    "python/src/infer/pyFoundationalTypes.cpp",
    "python/src/infer/pyGraph.cpp",
    "python/src/infer/pyPlugin.cpp",
    "python/src/parsers/pyOnnx.cpp",
)
PYTHON = "python/packaging/bindings_wheel/tensorrt/__init__.py"

_DECLARATION = re.compile(
    r'py::(?:class_|enum_)<[^;]*?>\s*(?P<variable>\w+)?\s*[({]\s*(?P<scope>\w+)\s*,\s*"(?P<name>\w+)"'
)
_MEMBER = re.compile(r'\.(?:def|def_\w+|value)\(\s*"(\w+)"')
_FUNCTION = re.compile(r'\bm\.def\(\s*"(\w+)"')


def names_in_sources(clone: Path, tag: str) -> set[str]:
    """Everything that the bindings of one tag define."""
    found = set(re.findall(r"^def (\w+)\(", _show(clone, tag, PYTHON), re.MULTILINE))
    for path in SOURCES:
        source = re.sub(r"//[^\n]*", "", _show(clone, tag, path))
        found |= set(_FUNCTION.findall(source))
        variables: dict[str, str] = {}
        for declared in _DECLARATION.finditer(source):
            outer = variables.get(declared["scope"])
            name = declared["name"] if outer is None else f"{outer}.{declared['name']}"
            if declared["variable"]:
                variables[declared["variable"]] = name
            statements = [_statement(source, declared.end())]
            if declared["variable"]:
                later = re.finditer(rf"\b{declared['variable']}\s*(?=\.def)", source)
                statements += [_statement(source, match.end()) for match in later]
            found_here = (member for statement in statements for member in _MEMBER.findall(statement))
            members = {member for member in found_here if not member.startswith("_")}
            found |= {name, *(f"{name}.{member}" for member in members)}
            if outer is not None and ".export_values()" in statements[0]:
                found |= {f"{outer}.{member}" for member in members}
    return found


def names_in_module(module: ModuleType) -> set[str]:
    """Everything that an installed module holds."""
    found = set()
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        found.add(name)
        if isinstance(value, type):
            found |= {f"{name}.{member}" for member in dir(value) if not member.startswith("_")}
    return found


def _show(clone: Path, tag: str, path: str) -> str:
    command = ["git", "-C", str(clone), "show", f"{tag}:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _statement(source: str, start: int) -> str:
    """From ``start`` to the semicolon that ends the statement, over the bodies of lambdas."""
    depth = 0
    for end in range(start, len(source)):
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        if source[end] == ";" and depth <= 0:
            return source[start:end]
    return source[start:]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", type=Path)
    parser.add_argument("--module")
    parser.add_argument("lists", nargs="+")
    options = parser.parse_args(arguments)
    for wanted in options.lists:
        tag, _, file = wanted.rpartition("=")
        if options.module:
            module = importlib.import_module(options.module)
            source = f"Python module {options.module} {module.__version__}, as installed"
            found = names_in_module(module)
        else:
            source = f"github.com/NVIDIA/TensorRT, tag {tag}: {', '.join((*SOURCES, PYTHON))}"
            found = names_in_sources(options.clone, tag)
        (HERE / file).write_text(f"# {source}\n" + "".join(f"{name}\n" for name in sorted(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
