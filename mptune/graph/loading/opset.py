"""Raising a model's operator set with ONNX's own converter: some operators have BFLOAT16 only in newer ones.

Large constants stay out of the converter, which copies them several times and cannot hold 2 GiB: it sees them as inputs
of the graph.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.version_converter

from mptune.errors import ModelError
from mptune.graph.loading.inference import last_line, without_weights
from mptune.graph.loading.tensors import STANDARD_DOMAINS, all_graphs

_GROUP_NORM_BY_CHANNEL = 21


def raised(proto: onnx.ModelProto, path: Path, opset: int) -> onnx.ModelProto:
    """The model, which has no local functions, at a newer operator set; the same model where it is there already."""
    current = next(o.version for o in proto.opset_import if o.domain in STANDARD_DOMAINS)
    newest = onnx.defs.onnx_opset_version()
    if opset < current:
        raise ModelError(
            f"{path} uses opset {current}: --opset {opset} would lower it", "an operator set can only be raised"
        )
    if opset > newest:
        raise ModelError(
            f"--opset is {opset}, the installed onnx {onnx.__version__} knows up to {newest}",
            f"give at most {newest}, or pip install --upgrade onnx",
        )
    if opset == current:
        return proto
    refused = f"{path} cannot be brought from opset {current} to {opset} by ONNX's converter"
    cure = "export it again at that opset, or search at the opset that it has"
    nodes = (node for graph in all_graphs(proto.graph) for node in graph.node)
    norm = next((n for n in nodes if n.op_type == "GroupNormalization" and n.domain in STANDARD_DOMAINS), None)
    if norm is not None and current < _GROUP_NORM_BY_CHANNEL <= opset:
        what = f"GroupNormalization {norm.name!r} has a scale for each group, from {_GROUP_NORM_BY_CHANNEL} on one for"
        raise ModelError(f"{refused}: {what} each channel, and the converter leaves it as it is", cure)
    slim = without_weights(proto, proto.graph.node, {})
    slim.graph.value_info.extend(proto.graph.value_info)
    try:
        converted = onnx.version_converter.convert_version(slim, opset)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise ModelError(f"{refused}: {last_line(error)}", cure) from None
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    result.graph.node.extend(converted.graph.node)
    del result.graph.value_info[:]  # of values that the converter has renamed or typed anew
    there = {constant.name for constant in result.graph.initializer}
    result.graph.initializer.extend(c for c in converted.graph.initializer if c.name not in there)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = opset
    result.ir_version = max(proto.ir_version, converted.ir_version)
    return result
