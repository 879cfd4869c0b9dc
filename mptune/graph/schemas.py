"""What an operator's schema says about types: formal types per position, and the types that each admits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from mptune.graph.plan import REDUCED, Precision


@dataclass(frozen=True)
class OperatorSchema:
    """The part of an operator's schema that typing needs.

    Attributes:
        inputs: formal type per position: a type parameter such as ``T``, or a type such as ``tensor(int64)``.
        variadic_input: whether the last input may be there any number of times.
        types: type parameter -> the types that it admits.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variadic_input: bool
    variadic_output: bool
    types: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, schema: Any, type_attribute: str = "type_str") -> OperatorSchema:
        """Read a schema object of onnx, or of ONNX Runtime, which has ``typeStr`` for ``type_str``."""
        return cls(
            tuple(getattr(p, type_attribute) for p in schema.inputs),
            tuple(getattr(p, type_attribute) for p in schema.outputs),
            bool(schema.inputs) and schema.inputs[-1].option.name == "Variadic",
            bool(schema.outputs) and schema.outputs[-1].option.name == "Variadic",
            {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
        )

    def input_type(self, position: int) -> str:
        """Formal type of the input at a position; "" beyond the last."""
        return _at(self.inputs, position, variadic=self.variadic_input)

    def output_type(self, position: int) -> str:
        """Formal type of the output at a position; "" beyond the last."""
        return _at(self.outputs, position, variadic=self.variadic_output)

    def admitted(self, type_parameter: str) -> frozenset[Precision]:
        """The reduced precisions that a type parameter admits besides FP32."""
        types = self.types.get(type_parameter, frozenset())
        if f"tensor({Precision.FP32.dtype})" not in types:
            return frozenset()
        return frozenset(p for p in REDUCED if f"tensor({p.dtype})" in types)


def _at(formal: tuple[str, ...], position: int, *, variadic: bool) -> str:
    if variadic:
        position = min(position, len(formal) - 1)
    return formal[position] if position < len(formal) else ""


@cache
def onnx_schema(op_type: str, opset: int) -> OperatorSchema | None:
    """The schema of one of ONNX's own operators; None where the operator set has none of this name."""
    try:
        return OperatorSchema.of(onnx.defs.get_schema(op_type, opset, ""))
    except onnx.defs.SchemaError:
        return None


def is_written_out(op_type: str, opset: int) -> bool:
    """Whether ONNX defines one of its operators by others, so that a runtime without a kernel can write it out."""
    try:
        schema: Any = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)
