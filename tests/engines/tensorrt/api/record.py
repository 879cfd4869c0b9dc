"""Writes the lists of names beside this file: what TensorRT's Python module holds, version by version.

python -m tests.engines.tensorrt.api.record tensorrt_bindings 11.4.txt

The module is an installed one, or a wheel's (such as tensorrt-cu13-bindings) with empty libraries in place of
libnvinfer: the names are in the bindings. Those of 10.0 to 10.16 were read from the bindings' sources, as their first
lines say. One name a line: ``Class``, ``Class.member``, ``Enum.VALUE`` or a function.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


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


if __name__ == "__main__":
    title, file = sys.argv[1:]
    recorded = importlib.import_module(title)
    head = f"# Python module {title} {recorded.__version__}, as installed\n"
    lines = "".join(f"{name}\n" for name in sorted(names_in_module(recorded)))
    (HERE / file).write_text(head + lines, encoding="utf-8")
