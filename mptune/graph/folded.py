"""What ONNX Runtime computes from shapes and constants before a run, computed once for all plans of a search.

An exported Swin-T has 6,170 nodes, of which 5,589 compute shapes, window masks and their constants. ONNX Runtime folds
them each time that a session opens, which takes most of that time. They are the same under every plan that computes
them in FP32, so a search folds them once, by ONNX Runtime itself (``mptune.engines.ort.fusions``), and the typed models
of its trials hold the results. What ONNX Runtime does not fold stays: a session computes the same kernels either way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model
from mptune.graph.loading.reading import without_weights
from mptune.graph.ops import SHAPE_OF
from mptune.graph.plan import REDUCED
from mptune.graph.value_types import Resolution, ValueTypes

_WORTHWHILE = 100
"""At least this many nodes, without Constants, are worth a session of their own that folds them."""

_LARGEST_CONSTANT = 1 << 14
"""Constants of more bytes are weights: an input takes their place where ONNX Runtime folds a model."""

_MOST_BYTES = 1 << 22
"""Larger results are not held: every trial's model would have them."""


def is_worthwhile(model: Model) -> bool:
    """Whether a session that folds what computes shapes saves time."""
    return sum(model.nodes[index].op_type != "Constant" for index in facts_of(model).folded_nodes) >= _WORTHWHILE


def write_without_weights(model: Model, path: Path) -> Path:
    """Write the model with inputs in place of its weights: folding depends on shapes and small constants alone."""
    slim = without_weights(model.proto, [n.proto for n in model.nodes], model.initializers, _LARGEST_CONSTANT)
    return write_bytes(path, [slim.SerializeToString(deterministic=True)])


@dataclass(frozen=True)
class LeftOut:
    """What a typed model leaves out, and what it holds instead.

    Attributes:
        unread: constants of the model that only these nodes read.
        values: constants in place of their results.
    """

    nodes: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()
    values: tuple[onnx.TensorProto, ...] = ()


@dataclass(frozen=True)
class FoldedValues:
    """Results of shape arithmetic that ONNX Runtime has folded, by name."""

    values: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    _by_plan: dict[tuple[frozenset[int], frozenset[str]], LeftOut] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path, model: Model) -> FoldedValues:
        """Those of the file that ONNX Runtime wrote from what ``write_without_weights`` gave it."""
        proto = onnx.load(path, load_external_data=False)
        computed = {name for index in facts_of(model).folded_nodes for name in model.nodes[index].outputs}
        constants = {t.name: t for t in proto.graph.initializer if t.name in computed - model.initializers.keys()}
        return cls({name: tensor for name, tensor in constants.items() if tensor.ByteSize() <= _MOST_BYTES})

    def left_out(self, types: ValueTypes, resolution: Resolution) -> LeftOut:
        """What a plan's typed model can do without; what the plan computes in a reduced precision stays."""
        if not self.values:
            return LeftOut()
        reduced = frozenset(i for i in types.facts.folded_nodes if resolution.node_precisions[i] in REDUCED)
        sources = frozenset(types.own.sources[value] for value in resolution.casts.keys() & types.own.sources.keys())
        key = reduced, sources  # nearly always the same
        if key not in self._by_plan:
            self._by_plan[key] = self._left_out(types.model, reduced | types.own.casts.keys(), sources)
        return self._by_plan[key]

    def unread(self, model: Model, wanted: Collection[str]) -> LeftOut:
        """What the untouched model needs no more where these values are read, and not its outputs.

        A value that is wanted and is folded is a constant then; all others are computed.
        """
        return self._left_out(model, frozenset(), frozenset(wanted)) if self.values else LeftOut()

    def _left_out(self, model: Model, staying: frozenset[int], wanted: frozenset[str]) -> LeftOut:
        """``staying`` nodes are computed, and so is what depends on them but for its shape; ``wanted`` is needed."""
        folded = set(facts_of(model).folded_nodes)
        stack = list(staying & folded)
        folded -= staying
        while stack:
            for name in model.nodes[stack.pop()].outputs:
                for index in model.consumers.get(name, ()):
                    if index in folded and model.nodes[index].op_type not in SHAPE_OF:
                        folded.remove(index)
                        stack.append(index)
        # Back from what is read, as far as it is computed: most of it is folded.
        reads = [{name for name in (*node.inputs, *node.captures) if name} for node in model.nodes]
        outputs = {info.name for info in model.outputs}
        read = outputs.union(wanted, *(names for index, names in enumerate(reads) if index not in folded))
        waiting, computed = list(read), set[int]()
        while waiting:
            name = waiting.pop()
            index = model.producer.get(name, -1)
            if index in folded and index not in computed and (name not in self.values or name in outputs):
                computed.add(index)
                waiting += reads[index] - read
                read |= reads[index]
        left_out = frozenset(folded - computed)
        entered = sorted(name for name in read & self.values.keys() if model.producer[name] in left_out)
        gone = frozenset(name for name in model.initializers.keys() - read if model.consumers.get(name))
        return LeftOut(left_out, gone, tuple(self.values[name] for name in entered))
