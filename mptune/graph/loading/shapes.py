"""Concrete shapes of every value without running the model, and which output columns share one unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mptune.graph.loading.model import Model, output_types
from mptune.graph.loading.reading import INLINE_LIMIT
from mptune.graph.loading.tensors import fixed_shape, type_of

ASSUMED_SIZE = 128
"""Of a symbolic dimension that is not the batch: a sequence, a height, a width. A power of two passes most networks."""


@dataclass(frozen=True)
class StaticShapes:
    """Concrete shapes, the sizes assumed of symbolic dimensions, and how many computed FP32 values have no shape."""

    shapes: Mapping[str, tuple[int, ...]]
    assumed: Mapping[str, int]
    unknown: int


def static_shapes(model: Model, batch: int = 1, given: Mapping[str, tuple[int, ...]] | None = None) -> StaticShapes:
    """Infer the shape of every value with symbolic dimensions of the inputs at assumed sizes.

    ``batch`` is the size of a symbolic dimension 0, and of every dimension of the same name. Nothing is assumed of
    inputs whose shapes are ``given``.
    """
    inputs = dict(given or {})
    assumed: dict[str, int] = {}
    for info in model.inputs:
        pairs = zip(info.shape or (), inputs.get(info.name, ()), strict=False)
        assumed.update((dim, size) for dim, size in pairs if isinstance(dim, str))
    # (time, batch, features): dimension 0 is the batch only where none says it is.
    named = {dim for info in model.inputs for dim in info.shape or () if isinstance(dim, str)}
    batches = {dim for dim in named if "batch" in dim.lower()}
    first = -1 if batches else 0
    batches = batches or {i.shape[0] for i in model.inputs if i.shape and isinstance(i.shape[0], str)}
    for info in model.inputs:
        if info.name not in inputs and info.shape is not None:
            sizes = []
            for axis, dim in enumerate(info.shape):
                size = batch if axis == first or dim in batches else ASSUMED_SIZE
                sizes.append(dim if isinstance(dim, int) else assumed.setdefault(dim or f"{info.name}[{axis}]", size))
            inputs[info.name] = tuple(sizes)
    shapes = dict(inputs)
    for info in model.tensors.values():
        shape = fixed_shape(tuple(assumed.get(dim, dim) if isinstance(dim, str) else dim for dim in info.shape or ()))
        if info.shape is not None and shape is not None:
            shapes.setdefault(info.name, shape)
    computed = [out for node in model.nodes for out in node.outputs if out and model.info(out).is_float32]
    if any(name not in shapes for name in computed):
        _walk(model, shapes)
    return StaticShapes(shapes, assumed, sum(name not in shapes for name in computed))


def _walk(model: Model, shapes: dict[str, tuple[int, ...]]) -> None:
    """Fill in missing shapes, node by node with the values of small integers: whole-graph inference has none."""
    small = {
        name: constant.numpy()
        for name, constant in model.initializers.items()
        if constant.nbytes <= INLINE_LIMIT and constant.dtype not in ("string", "bfloat16")
    }
    opsets = {entry.domain: entry.version for entry in model.proto.opset_import}
    for node in model.nodes:
        if not node.is_standard or node.has_subgraph or node.op_type == "Constant":
            continue
        feeds = {name: small[name] for name in node.inputs if name in small}
        with suppress(Exception):  # an operator that cannot be evaluated alone leaves its shape unknown
            # Its values, where it computes from small ones alone, or from a shape.
            results: Any = ()
            if node.op_type == "Shape" and node.inputs[0] in shapes:
                bounds, shape = {a.name: a.i for a in node.proto.attribute}, shapes[node.inputs[0]]
                results = [np.array(shape[bounds.get("start", 0) : bounds.get("end", len(shape))], np.int64)]
            elif node.inputs and all(not name or name in small for name in node.inputs):
                is_fill = node.op_type in ("ConstantOfShape", "Expand")
                if not is_fill or math.prod(map(int, small[node.inputs[-1]])) * 8 <= INLINE_LIMIT:
                    import onnx.reference  # Takes 0.1 s, and few models need it.

                    results = onnx.reference.ReferenceEvaluator(node.proto, opsets=opsets).run(None, feeds)
            for name, value in zip(node.outputs, map(np.asarray, results), strict=False):
                if name:
                    shapes[name] = tuple(value.shape)
                    small.update({name: value} if value.nbytes <= INLINE_LIMIT else {})
            if all(not out or out in shapes for out in node.outputs):
                continue
            if node.op_type == "GroupNormalization" and node.inputs[0] in shapes:  # ONNX infers nothing for it
                shapes[node.outputs[0]] = shapes[node.inputs[0]]
            for name, proto in output_types(model, node, {n: shapes.get(n) for n in node.inputs}, feeds).items():
                inferred = fixed_shape(type_of(proto)[1])
                if inferred is not None:
                    shapes.setdefault(name, inferred)
