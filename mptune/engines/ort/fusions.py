"""Which nodes of a model ONNX Runtime computes as one, with FP32 inside: asked of a session of the all-FP16 model.

The session saves its graph as it was optimised, and each fused node there is traced back to nodes of the model by the
names of tensors. Providers fuse differently, so the provider that runs the plans is asked. Only operators count that
were seen to round once (``benchmarks.roundings``, CUDA provider, H200): norms, BiasSoftmax and Gelu. BiasGelu, FastGelu
and QuickGelu round within (``mptune.graph.writing.rounding_steps``), and norms that are fused with the sum before them
(SkipLayerNormalization) took their statistics in FP16 until 2026 (microsoft/onnxruntime#28682).

A fusion counts where every plan has it that runs these nodes in FP16. They lie in one group, so they have one type. A
Cast in front of a norm is taken into it, and with it from operator set 17 on a LayerNormalization of two types is made,
which is none: such a session is opened without LayerNormFusion (``OrtSession``). So from there on only
SimplifiedLayerNormalization counts, whose two types may differ.

Seen on that H200, too: SimplifiedLayerNormFusion takes an epsilon only from an FP32 constant. In FP16 it is 1e-5,
whatever the model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.optimised import computed_nodes, given_name, load_graph, take_optimised
from mptune.engines.ort.session import Provider, SessionOptions
from mptune.engines.worker.child import WorkerState
from mptune.graph.fused import FusedNodes, epsilon_step
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.loading.model import Node

_CENTRED = "LayerNormalization"
_NORMS = frozenset({_CENTRED, "SimplifiedLayerNormalization"})
_OTHERS = frozenset({"BiasSoftmax", "Gelu"})
_OPERATOR_SINCE = 17
"""The operator set from which LayerNormalization is one of ONNX's own operators, of one type."""

_NEARLY = 0.01
"""Relative difference up to which two epsilons are one that was rounded."""


@dataclass(frozen=True)
class OptimisedNode:
    """A node of a session's graph.

    Attributes:
        epsilon: its attribute; None where it has none.
    """

    op_type: str
    nodes: tuple[str, ...]
    result: str
    epsilon: float | None = None


@dataclass(frozen=True)
class FusionsJob:
    """Open a typed model as a search opens it, and name the nodes that several of its own became.

    Attributes:
        folder: an empty folder for the optimised graph; it is empty again afterwards.
    """

    model: Path
    folder: Path
    provider: Provider

    def run(self, state: WorkerState) -> tuple[OptimisedNode, ...]:
        """See the class."""
        options = SessionOptions(self.provider, timing=False, optimised_dir=self.folder)
        state.transient(partial(open_session, self.model, options))
        return tuple(optimised_nodes(load_graph(self.model), take_optimised(self.folder)))


def may_fuse(grouped: GroupedModel) -> bool:
    """Whether a model has nodes that may be fused so: else there is nothing to ask."""
    look = Lookup(grouped.model)
    if any(node.op_type == "Erf" or _adds_bias(look, node) for node in grouped.model.nodes):
        return True
    return any(pattern.squares for pattern in find_patterns(grouped.model, look))


def _adds_bias(look: Lookup, softmax: Node) -> bool:
    before = look.producer(softmax.inputs[0]) if softmax.op_type == "Softmax" else None
    return before is not None and before.op_type == "Add"


def optimised_nodes(typed: onnx.GraphProto, optimised: onnx.GraphProto) -> Iterator[OptimisedNode]:
    """The nodes of an optimised graph that several of the typed one became, of the operators that round once."""
    producer = {out: node.name for node in typed.node for out in node.output if out}
    for node, computed in zip(optimised.node, computed_nodes(typed, optimised), strict=True):
        if node.op_type not in _NORMS | _OTHERS or len(computed) < 2:
            continue
        result = given_name(node.output[0], producer)
        epsilon = next((float(a.f) for a in node.attribute if a.name == "epsilon"), None)
        if result is not None:
            yield OptimisedNode(node.op_type, computed, producer[result], epsilon)


def fused_nodes(grouped: GroupedModel, found: Iterable[OptimisedNode]) -> tuple[FusedNodes, ...]:
    """The nodes of a model that are fused under every plan that has them in FP16."""
    model, look = grouped.model, Lookup(grouped.model)
    named = {node.name: node for node in model.nodes}
    fused = []
    for one in found:
        if one.op_type == _CENTRED and model.opset >= _OPERATOR_SINCE:
            continue
        members = sorted((named[name] for name in one.nodes if name in named), key=lambda node: node.index)
        if len(members) < 2 or members[-1].name != one.result or not grouped.in_one_group(members):
            continue
        names = tuple(node.name for node in members)
        if one.op_type in _NORMS:
            fused.append(FusedNodes(names, _source(look, members), _other_epsilon(look, members, one.epsilon)))
        else:
            fused.append(FusedNodes(names))
    return tuple(fused)


def _source(look: Lookup, members: Sequence[Node]) -> str:
    """The first value that the nodes read from elsewhere and that varies; "" where there is none."""
    made = {out for node in members for out in node.outputs}
    read = (name for node in members for name in look.varying(node))
    return next((name for name in read if name not in made and look.model.info(name).is_float32), "")


def _other_epsilon(look: Lookup, members: Sequence[Node], taken: float | None) -> float | None:
    """The engine's epsilon; None where it is the model's, as it is or rounded to FP16."""
    step = epsilon_step(look, members)
    stated = None if step is None else look.number(step[0].inputs[step[1]])
    if stated is None or not taken:
        return None
    return None if any(abs(taken - own) <= _NEARLY * taken for own in (stated, float(np.float16(stated)))) else taken
