"""Shows on the website what ``mptune.settings.documented`` writes into a docstring when Python imports it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class DeclaredSettings(griffe.Extension):
    """Reads docstrings with ``{settings}`` from the imported function, since griffe reads the source alone."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the docstring of one function."""
        if func.docstring is not None and "{settings}" in func.docstring.value:
            function = getattr(importlib.import_module(func.module.path), func.name)
            func.docstring.value = inspect.cleandoc(function.__doc__ or "")
