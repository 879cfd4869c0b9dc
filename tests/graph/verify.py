"""Holds a typed model against its plan, without trusting what wrote it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
from onnx import TensorProto

from mptune.graph.loading.model import Model
from mptune.graph.ops import FLOAT_TYPES, onnx_schema
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter, frame_of
from tests.graph.helpers import check

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def is_inferable(model: Model) -> bool:
    """Whether ONNX can type every value: not with operators of other domains, nor with sparse initializers."""
    return all(node.is_standard for node in model.nodes) and not model.proto.graph.sparse_initializer


def is_checkable(model: Model) -> bool:
    """Whether ONNX's checker takes the model: not with one of its own operators at a set that lacks it.

    ONNX Runtime's optimiser writes such ones: LayerNormalization, which came with 17, at 13.
    """
    return all(not node.is_standard or onnx_schema(node.op_type, model.opset) is not None for node in model.nodes)


def typed_graph(path: Path, model: Model) -> onnx.GraphProto:
    """The written graph with every value typed; checked in full wherever ONNX knows all operators."""
    if is_inferable(model) and is_checkable(model):
        return check(path).graph
    if is_checkable(model):
        onnx.checker.check_model(str(path))
    return onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True).graph


def value_types(graph: onnx.GraphProto) -> dict[str, int]:
    values = (*graph.value_info, *graph.input, *graph.output)
    found = {v.name: v.type.tensor_type.elem_type for v in values}
    return found | {i.name: i.data_type for i in graph.initializer}


def same_graph(one: onnx.GraphProto, other: onnx.GraphProto) -> bool:
    """Equal but for the order of constants and the types of values, which are inferred anew."""

    def normal(graph: onnx.GraphProto) -> onnx.GraphProto:
        copy = onnx.GraphProto()
        copy.CopyFrom(graph)
        del copy.initializer[:], copy.value_info[:]
        copy.initializer.extend(sorted(graph.initializer, key=lambda i: i.name))
        return copy

    return bool(normal(one) == normal(other))


def verify(rewriter: Rewriter, plan: PrecisionPlan, path: Path) -> None:
    """The written model is valid, keeps its interface, realises the plan, and spends no Cast in vain."""
    model = rewriter.types.model
    graph = typed_graph(path, model)
    original = frame_of(model).graph
    assert list(graph.input) == list(original.input)
    ends = ([(o.name, o.type.tensor_type.elem_type) for o in each.output] for each in (graph, original))
    assert next(ends) == next(ends), "the interface is kept"
    _plan_is_realised(rewriter, plan, graph)
    _casts_are_needed(model, graph)
    if not rewriter.types.own.casts:
        added = Counter(n.op_type for n in graph.node)["Cast"] - Counter(n.op_type for n in model.nodes)["Cast"]
        assert added == ideal_casts(rewriter, plan)


def _plan_is_realised(rewriter: Rewriter, plan: PrecisionPlan, graph: onnx.GraphProto) -> None:
    types = value_types(graph)
    nodes = {n.name: n for n in graph.node}
    assert len(nodes) == len(graph.node), "node names are unique"
    index = {n.name: n.index for n in rewriter.types.model.nodes}
    for name, precision in rewriter.types.node_precisions(plan).items():
        wanted = precision.onnx_type
        rule = rewriter.types.rules[index[name]]
        realised = {types.get(nodes[name].output[i], wanted) for i in rule.outputs}
        realised |= {types.get(nodes[name].input[i], wanted) for i in rule.inputs}
        assert realised <= {wanted}, name
    for node in rewriter.types.model.nodes:  # what has no precision keeps every type
        if node.name in nodes and node.name not in rewriter.types.node_precisions(plan) and node.op_type != "Cast":
            written = *nodes[node.name].input, *nodes[node.name].output
            for old, new in zip((*node.inputs, *node.outputs), written, strict=True):
                info = rewriter.types.model.info(old)
                if new in types and info.is_float32 and node.op_type not in ("Shape", "Size"):
                    assert types[new] == TensorProto.FLOAT, (node.name, new)


def _casts_are_needed(model: Model, graph: onnx.GraphProto) -> None:
    """No value is cast twice to one type, none to the type it has, none for nobody; FP32 never goes through FP16.

    What the model's own Casts do twice stays twice, but no Cast is added beside them.
    """
    types = value_types(graph)
    named = {o.name for o in graph.output} | {c for n in model.nodes for c in n.captures}
    read = Counter(i for n in graph.node for i in n.input)
    own = {n.outputs[0]: n.inputs[0] for n in model.nodes if n.op_type == "Cast"}
    rounded_to = {FLOAT_TYPES[of].onnx_type for r in own if (of := model.info(r).dtype) in FLOAT_TYPES}
    idle = {result for result in own if not model.consumers.get(result)}
    casts = [n for n in graph.node if n.op_type == "Cast" and {types.get(n.input[0]), types[n.output[0]]} <= FLOATS]
    source = {n.output[0]: n.input[0] for n in casts}
    made: dict[tuple[str, int], list[str]] = {}
    for result, value in source.items():
        assert read[result] or result in named | idle, f"{result} is cast for nobody"
        if own.get(result) in (value, own.get(value, value)) or result in named:
            continue
        made.setdefault((value, types[result]), []).append(result)
        assert types[value] != types[result], f"{result} is cast to the type it has"
        there_and_back = value in source and types[source[value]] == types[result]
        # A Cast of the model's own to one reduced type rounds what the plan has in the other.
        rounds = types[value] in rounded_to and TensorProto.FLOAT not in (types[value], types[result])
        assert not there_and_back or rounds or result in own or value in named, f"{value} goes there and back"
    for (value, _), results in made.items():
        # What one of the model's Casts gives may be two of its values: the one before and the one behind the Cast.
        assert len(results) == 1 or value in own or all(r in own for r in results), f"{value} is cast twice"


def ideal_casts(rewriter: Rewriter, plan: PrecisionPlan) -> int:
    """One Cast for each value and type that crosses, counted from the plan alone (for models without own Casts)."""
    model, rules = rewriter.types.model, rewriter.types.rules
    precision = rewriter.types.node_precisions(plan)
    made: dict[str, Precision] = {}
    wanted: dict[str, set[Precision]] = {o.name: {Precision.FP32} for o in model.outputs}
    for node in model.nodes:
        rule, own = rules[node.index], precision.get(node.name, Precision.FP32)
        made.update((node.outputs[i], own) for i in rule.outputs)
        for slot, name in enumerate(node.inputs):
            if slot not in rule.reads_any:
                wanted.setdefault(name, set()).add(own if slot in rule.inputs else Precision.FP32)
        for name in node.captures:
            wanted.setdefault(name, set()).add(Precision.FP32)
    constants = {name for name, c in model.initializers.items() if not c.overridable}
    return sum(
        len(types - {made.get(name, Precision.FP32)})
        for name, types in wanted.items()
        if model.info(name).is_float32 and name not in constants
    )
