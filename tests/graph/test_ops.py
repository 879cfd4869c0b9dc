"""The table of operators."""

from __future__ import annotations

import onnx.defs

from mptune.graph.ops import _TABLE


def test_each_row_is_an_operator_of_onnx_or_of_its_runtime() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    names = {s.name for s in (*onnx.defs.get_all_schemas_with_history(), *get_all_operator_schema())}
    newest = {"TransposeMatMul", "GatedRMSNorm", "LinearAttention", "PagedAttention"}  # older versions lack them
    assert not _TABLE.keys() - names - newest


def test_inputs_that_are_named_are_there() -> None:
    for name, row in _TABLE.items():
        if onnx.defs.has(name):
            schema = max((s for s in onnx.defs.get_all_schemas_with_history() if s.name == name), key=_since)
            slots = row.sizes | row.indices | row.fp32_inputs | set(row.shaped_like or ())
            assert max(slots, default=0) < max(schema.max_input, 1), name


def _since(schema: onnx.defs.OpSchema) -> int:
    return int(schema.since_version)
