"""Which output of a model a built-in task metric judges, and against what: the labels, else the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mptune.errors import DataError


def pairs(
    metric: str,
    outputs: Mapping[str, Any],
    references: Mapping[str, Any],
    labels: Mapping[str, Any],
    fits: Callable[[np.ndarray], bool],
    wanted: str,
    *,
    is_dense: bool = False,
) -> list[tuple[str, np.ndarray, np.ndarray, bool]]:
    """The outputs that a metric judges: name, output, target, and whether the target is a label.

    A label belongs to the output of its name. One label for one output that fits needs no name in common. Without
    labels every output that fits is judged against the reference.

    ``fits`` says by the reference whether an output is of the metric's kind, ``wanted`` is that kind in words. Where
    ``is_dense``, a label is as large as its output: one without its name that is not belongs to another metric, and the
    reference is the target.
    """
    fitting = [name for name, array in references.items() if isinstance(array, np.ndarray) and fits(array)]
    if not fitting:
        raise DataError(
            f"{metric} found no output of {wanted}, of one shape for all samples",
            "use relative_l2, or your own script.py:function",
        )
    if is_dense and not any(name in labels for name in fitting):
        sizes = {np.size(references[name]) for name in fitting}
        labels = {name: label for name, label in labels.items() if np.size(label) in sizes}
    if labels:
        named = [(name, name) for name in fitting if name in labels]
        if not named and len(labels) == 1 and len(fitting) == 1:
            named = [(fitting[0], next(iter(labels)))]
        if not named:
            raise DataError(
                f"{metric} cannot tell which output the labels {', '.join(map(repr, labels))} belong to",
                f"name them as the outputs are named: {', '.join(map(repr, fitting))}",
            )
        found = [(name, outputs[name], labels[label], True) for name, label in named]
    else:
        found = [(name, outputs[name], references[name], False) for name in fitting]
    for name, output, target, _ in found:
        if not isinstance(output, np.ndarray) or not isinstance(target, np.ndarray):
            raise DataError(f"{metric}: the shapes of {name!r} vary between samples", "use your own script.py:function")
        if len(output) != len(target):
            raise DataError(f"{metric}: {name!r} has {len(output)} rows, its target {len(target)}", "give one per row")
    return found


def same_shape(metric: str, name: str, output: np.ndarray, target: np.ndarray) -> None:
    """Refuse what cannot be compared element by element."""
    if output.shape != target.shape:
        raise DataError(
            f"{metric}: output {name!r} has shape {output.shape}, its target {target.shape}",
            "give labels of the output's shape, or your own script.py:function",
        )
