"""Concrete shapes of a model's values, for counting."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from mptune.graph.loading.model import Model

Shape = tuple[int, ...]


class ShapeTable:
    """Concrete shapes: observed ones first, then the model's own with symbolic sizes filled in from what was observed.

    An unknown dimension counts as 1.
    """

    def __init__(self, model: Model, observed: Mapping[str, Shape]) -> None:
        self._model = model
        self._observed = observed
        self._sizes: dict[str, int] = {}
        for name, shape in observed.items():
            for dim, size in zip(model.info(name).shape or (), shape, strict=False):
                if isinstance(dim, str):
                    self._sizes.setdefault(dim, size)

    def __getitem__(self, tensor: str) -> Shape:
        if tensor in self._observed:
            return self._observed[tensor]
        if tensor in self._model.initializers:
            return self._model.initializers[tensor].shape
        dims = self._model.info(tensor).shape or ()
        return tuple(dim if isinstance(dim, int) else self._sizes.get(dim or "", 1) for dim in dims)

    @property
    def constants(self) -> Collection[str]:
        """Names of the model's constants."""
        return self._model.initializers.keys()

    def elements(self, tensor: str) -> int:
        """Number of elements of a tensor."""
        return math.prod(self[tensor])
