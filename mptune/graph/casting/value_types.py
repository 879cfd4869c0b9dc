"""Which type every FP32 value of a model takes under a plan, and in which other types it is needed as well.

The one place that decides it, for the typed model (``rewrite``), its emulation (``emulate``) and the count of Casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import onnx

from mptune.errors import PlanError
from mptune.graph.casting.rescaled import Rescaled, rescale
from mptune.graph.facts import attribute, facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import Initializer, all_graphs
from mptune.graph.op_rules import NodeRule, casts_integers, node_rules
from mptune.graph.ops import COPIES, FLOAT_TYPES, RECURRENT, onnx_schema
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan


@dataclass(frozen=True)
class OwnCast:
    """A Cast of the model's own among FP32, FP16 and BF16, but one that leaves a reduced value as it is."""

    index: int
    source: str
    result: str
    from_precision: Precision
    to: Precision

    @property
    def widens(self) -> bool:
        """Whether it casts to FP32, which changes no value."""
        return self.to is Precision.FP32


def own_cast(model: Model, node: Node) -> OwnCast | None:
    """The node as an ``OwnCast``, or None where it is none."""
    if node.op_type != "Cast" or not node.is_standard:
        return None
    source, result = node.inputs[0], node.outputs[0]
    from_precision, to = (FLOAT_TYPES.get(model.info(name).dtype) for name in (source, result))
    if from_precision is None or to is None or (from_precision is to and to is not Precision.FP32):
        return None
    return OwnCast(node.index, source, result, from_precision, to)


@dataclass(frozen=True)
class Folds:
    """Which of the model's own Casts a plan removes, and what their readers read instead.

    The root of a Cast is the value that a chain of such Casts starts from.

    Attributes:
        narrow: (FP32 result, reduced precision) -> its root; what reads the result in it reads the root in it.
        wide: FP32 result -> its root; what reads the result in FP32 reads the FP32 copy of the root.
        either: FP32 result of a Cast that goes away -> its root; what takes any type reads the root as it is computed.
        folded: reduced result of a Cast that goes away -> its root and its precision; what reads the result reads the
            root in that.
        adopted: (root that crosses, precision) -> the Cast whose result, an output, serves as that form of the root.
        renamed: root -> the reduced output that it is computed as; the Cast between them would change nothing.
        dropped: indices of the Casts that go away.
    """

    narrow: Mapping[tuple[str, Precision], str] = field(default_factory=dict)
    wide: Mapping[str, str] = field(default_factory=dict)
    either: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, tuple[str, Precision]] = field(default_factory=dict)
    adopted: Mapping[tuple[str, Precision], OwnCast] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()


class Folding:
    """Resolves the model's own Casts under one plan; adds the Casts and constants that this makes necessary."""

    def __init__(
        self,
        types: ValueTypes,
        computed: Mapping[str, Precision],
        casts: dict[str, set[Precision]],
        constants: dict[str, set[Precision]],
    ) -> None:
        """Start before the first node; ``casts`` and ``constants`` are added to."""
        self._types = types
        self._named = types.named
        self._computed = computed
        self._casts = casts
        self._constants = constants
        self._root: dict[str, str] = {}
        self._narrow: dict[tuple[str, Precision], str] = {}
        self._wide: dict[str, str] = {}
        self._passed: set[str] = set()  # what is read only in another form, as far as it was read
        self._read_wide: set[str] = set()
        self._read_by_casts: set[str] = set()  # by those that stay
        self._read_any: set[str] = set()

    def pass_cast(self, cast: OwnCast) -> None:
        """Note a Cast of the model, in topological order."""
        root = self._root.get(cast.source, cast.source)
        if cast.from_precision is not Precision.FP32 and self._form(root) is not cast.from_precision:
            root = cast.source  # rounded: only what the Cast reads is the same value
        self._root[cast.result] = root

    def read(self, name: str, precision: Precision) -> None:
        """Note that a node reads the FP32 result of a Cast in ``precision``."""
        root = self._root[name]
        if precision is not Precision.FP32:
            self._narrow[name, precision] = root
            self._passed.add(name)
            if root in self._types.constants:
                self._need_constant(root, precision)
            elif self._form(root) is not precision:
                self._need_cast(root, precision)
        elif root in self._computed and name not in self._named:
            self._wide[name] = root
            self._need_cast(root, Precision.FP32)
        else:
            self._read_wide.add(name)

    def read_any(self, name: str) -> None:
        """Note that a node reads the FP32 result of a Cast in any type."""
        self._read_any.add(name)

    def finish(self) -> Folds:
        """Decide which Casts stay, from the last to the first: a Cast that stays needs its input."""
        dropped: set[int] = set()
        either: dict[str, str] = {}
        folded: dict[str, tuple[str, Precision]] = {}
        adopted: dict[tuple[str, Precision], OwnCast] = {}
        renamed: dict[str, str] = {}
        for cast in reversed(self._types.own_casts):
            root = self._root[cast.result]
            if cast.widens:
                stays = cast.result in self._named or not (root in self._computed or self._is_passed(cast.result))
            else:
                stays = self._narrowing_stays(cast)
            if not cast.widens and not stays:
                folded[cast.result] = root, cast.to
            elif not stays:
                either[cast.result] = root
                if root in self._types.constants and cast.result in self._read_any:
                    self._need_constant(root, Precision.FP32)
            elif self._may_adopt(cast) and (root, cast.to) not in adopted:
                adopted[root, cast.to] = cast
                stays = False
            elif self._changes_nothing(cast) and root not in renamed:
                renamed[root] = cast.result
                stays = False
            if not stays:
                dropped.add(cast.index)
                self._passed.add(cast.source)
                continue
            self._read_by_casts.add(cast.source)
            if root in self._types.constants:
                self._need_constant(root, Precision.FP32)
            elif root not in self._computed:
                self._read_wide.add(cast.source)
        return Folds(self._narrow, self._wide, either, folded, adopted, renamed, frozenset(dropped))

    def _form(self, value: str) -> Precision:
        """What a value is computed in, by the model itself or by the plan."""
        return self._computed.get(value) or self._types.own_forms.get(value, Precision.FP32)

    def _need_cast(self, value: str, precision: Precision) -> None:
        self._casts.setdefault(value, set()).add(precision)

    def _need_constant(self, name: str, precision: Precision) -> None:
        self._constants.setdefault(name, set()).add(precision)

    def _may_adopt(self, cast: OwnCast) -> bool:
        """Whether the Cast's result is an output of the model and is the form of its root that the plan needs."""
        root = self._root[cast.result]
        if cast.result not in self._named or cast.to not in self._casts.get(root, ()):
            return False
        return not cast.widens or (root in self._computed and root not in self._named)

    def _changes_nothing(self, cast: OwnCast) -> bool:
        """Whether the Cast only gives the name of a reduced output to what the plan computes in its precision."""
        root = self._root[cast.result]
        is_same = not cast.widens and self._computed.get(root) is cast.to
        return is_same and cast.result in self._named and root not in self._named

    def _is_passed(self, name: str) -> bool:
        """Whether all readers of a Cast's FP32 result read its root under the plan."""
        return name not in self._read_wide and name in self._passed

    def _narrowing_stays(self, cast: OwnCast) -> bool:
        root = self._root[cast.result]
        if cast.result in self._named:
            return True
        if self._computed.get(root) is cast.to or cast.to in self._constants.get(root, ()):
            return False
        if self._form(root) is cast.to:  # the model's own: folds where nothing else needs the FP32 form between them
            is_read = cast.result in self._types.read_by_nodes or cast.result in self._read_by_casts
            if cast.result in self._passed and not is_read:
                return False
            return cast.source in self._named or not self._is_passed(cast.source)
        return cast.to not in self._casts.get(root, ())


@dataclass(frozen=True)
class Resolution:
    """What a plan means for each node and value.

    Attributes:
        computed: value -> the precision that its node computes it in, where that is not FP32.
        casts: value -> the precisions that it is needed in besides the one it is computed in: one Cast each.
        constants: FP32 constant -> the precisions that it is needed in.
    """

    node_precisions: tuple[Precision, ...]
    computed: Mapping[str, Precision]
    casts: Mapping[str, AbstractSet[Precision]]
    constants: Mapping[str, AbstractSet[Precision]]
    folds: Folds

    def computed_in(self, value: str) -> Precision:
        """The precision that an FP32 value of the model is computed in."""
        return self.computed.get(value, Precision.FP32)

    @property
    def added_casts(self) -> int:
        """How many Casts the plan adds, less those of the model's own that it makes needless."""
        return sum(map(len, self.casts.values())) - len(self.folds.dropped)


_SUFFIX = "__"
"""Begins what ``new_suffix`` gives."""

_Needs = tuple[tuple[str, Precision], ...]


@dataclass(frozen=True, slots=True)
class _NodeNeeds:
    """What one node needs of FP32 values and computes when it runs in one precision.

    Attributes:
        cast_results: the same of what the model's own Casts to FP32 compute.
        any_type: results of these Casts that it takes in any type.
    """

    values: _Needs
    constants: _Needs
    cast_results: _Needs
    any_type: tuple[str, ...]
    outputs: tuple[str, ...]


_NOTHING = _NodeNeeds((), (), (), (), ())


class ValueTypes:
    """The typing of one model under any plan. Made once; resolving a plan is one pass over the nodes.

    Attributes:
        group_of: each node's position among the groups, [nodes]; -1 for a node of none.
        named: what keeps its FP32 form and its name under any plan: the interface, and what subgraphs read.
        stored: the constants of reduced types that they read.
        own_forms: the reduced values that the model's own Casts read or make.
        read_by_nodes: the values that other nodes than these Casts read.
        integers: FP32 result of a Cast -> the integers that it casts; every other form of it is cast from them too.
    """

    def __init__(self, grouped: GroupedModel) -> None:
        self.model = model = grouped.model
        self.facts = facts_of(model)
        self.groups = grouped.groups
        self._ids = tuple(group.id for group in self.groups)
        self.rules: tuple[NodeRule, ...] = node_rules(model)
        self.group_of = self._nodes_by_group()
        self.integers = {n.outputs[0]: n.inputs[0] for n in model.nodes if casts_integers(model, n)}
        self.constants = {n: c for n, c in model.initializers.items() if c.dtype == "float" and not c.overridable}
        self.named = frozenset(o.name for o in model.outputs) | {c for n in model.nodes for c in n.captures}
        self.own_casts = tuple(c for node in model.nodes if (c := own_cast(model, node)) is not None)
        self._own_at: Mapping[int, OwnCast] = {c.index: c for c in self.own_casts}
        self._widened = frozenset(c.result for c in self.own_casts if c.widens)
        reduced_sources = (c.source for c in self.own_casts if c.from_precision is not Precision.FP32)
        self.stored = tuple(dict.fromkeys(source for source in reduced_sources if source in model.initializers))
        ends = ((name, p) for c in self.own_casts for name, p in ((c.source, c.from_precision), (c.result, c.to)))
        self.own_forms = {name: p for name, p in ends if p is not Precision.FP32}
        others = (node for node in model.nodes if node.index not in self._own_at)
        self.read_by_nodes = frozenset(name for node in others for name in (*node.inputs, *node.captures))
        self._needs = {p: self._needs_in(p) for p in DEFAULT_PRECISIONS}  # of the others when a plan has them
        self._lacking: dict[Precision, Mapping[int, tuple[str, ...]]] = {Precision.FP32: {}}
        self._rescaled: dict[Precision, Rescaled] = {}
        self._written_from = grouped.written_from
        # Under any plan: constants that are outputs or that nothing reads stay, computed outputs are FP32.
        self._kept = tuple(c for c in self.constants if c not in model.consumers or c in self.named)
        self._outputs = tuple(o.name for o in model.outputs if o.name in model.producer)

    def _nodes_by_group(self) -> list[int]:
        index = {node.name: node.index for node in self.model.nodes}
        group_of = [-1] * len(index)
        for position, group in enumerate(self.groups):
            for name in group.nodes:
                if name not in index:
                    raise PlanError(f"group {group.id} names a node {name!r} that the model has not")
                group_of[index[name]] = position
        return group_of

    def precision_of_input(self, node: Node, slot: int, precision: Precision) -> Precision | None:
        """What a node in ``precision`` reads an FP32 input in; None where it takes any type without a Cast."""
        rule = self.rules[node.index]
        if slot in rule.inputs:
            return precision
        return None if slot in rule.reads_any else Precision.FP32

    def _needs_in(self, precision: Precision) -> tuple[_NodeNeeds, ...]:
        return tuple(self._needs_of(node, precision) for node in self.model.nodes)

    def _needs_of(self, node: Node, precision: Precision) -> _NodeNeeds:
        if node.index in self._own_at:
            return _NOTHING
        rule = self.rules[node.index]
        values: dict[tuple[str, Precision], None] = {}
        constants: dict[tuple[str, Precision], None] = {}
        results: dict[tuple[str, Precision], None] = {}
        any_type: dict[str, None] = {}
        for slot, name in (*enumerate(node.inputs), *((-1, c) for c in node.captures)):
            if not name or not self.model.info(name).is_float32:
                continue
            wanted = self.precision_of_input(node, slot, precision)
            if name in self.constants:
                constants[name, wanted or Precision.FP32] = None
            elif wanted is not None:
                (results if name in self._widened else values)[name, wanted] = None
            elif name in self._widened:
                any_type[name] = None
        outputs = () if precision is Precision.FP32 else tuple(node.outputs[slot] for slot in rule.outputs)
        return _NodeNeeds(tuple(values), tuple(constants), tuple(results), tuple(any_type), outputs)

    def lacking(self, precision: Precision) -> Mapping[int, tuple[str, ...]]:
        """Position of each group that cannot have a precision -> its operators that could be FP16 and not this."""
        operators = self._lacking.get(precision)
        if operators is None:
            by_group: dict[int, dict[str, None]] = {}
            for node, rule, position in zip(self.model.nodes, self.rules, self.group_of, strict=True):
                if position >= 0 and rule.precisions and precision not in rule.precisions:
                    by_group.setdefault(position, {})[node.op_type] = None
            operators = self._lacking[precision] = {position: tuple(ops) for position, ops in by_group.items()}
        return operators

    def _precisions_of_groups(self, plan: PrecisionPlan) -> list[Precision]:
        """The precision of each group, [groups]."""
        if plan.model_sha256 and plan.model_sha256 != self.model.sha256:
            raise PlanError(
                f"the plan is another model's: sha256 {plan.model_sha256[:12]}, not {self.model.sha256[:12]}",
                "give the model that the plan was made for",
            )
        unknown, missing = sorted(plan.precision.keys() - self._ids), sorted({*self._ids} - plan.precision.keys())
        if unknown or missing:
            what = f"names a group that the model has not: {unknown[0]}" if unknown else f"lacks a group: {missing[0]}"
            raise PlanError(f"the plan {what}", "was it made at another granularity?")
        return [plan.precision[group] for group in self._ids]

    def _precisions_of_nodes(self, plan: PrecisionPlan) -> tuple[Precision, ...]:
        """The precision of each node, [nodes]: FP32 where it has none, or where its operator does not admit it.

        A group with an operator that lacks what others of it have is FP32 as a whole: patterns are never split.
        """
        groups = enumerate(self._precisions_of_groups(plan))
        of_group = [Precision.FP32 if k in self.lacking(p) else p for k, p in groups]
        of_group.append(Precision.FP32)  # serves what belongs to no group (-1)
        wanted = (of_group[group] for group in self.group_of)
        return tuple(p if p in rule.precisions else Precision.FP32 for p, rule in zip(wanted, self.rules, strict=True))

    def resolve(self, plan: PrecisionPlan) -> Resolution:
        """Type every value under ``plan``."""
        precisions = self._precisions_of_nodes(plan)
        for precision in {*precisions} - self._needs.keys():
            self._needs[precision] = self._needs_in(precision)
        computed: dict[str, Precision] = {}
        casts: dict[str, set[Precision]] = {}
        constants: dict[str, set[Precision]] = {name: {Precision.FP32} for name in self._kept}
        for index, precision in enumerate(precisions):  # in topological order: what a node reads is typed already
            needs = self._needs[precision][index]
            for name in needs.outputs:
                computed[name] = precision
            for name, wanted in needs.values:
                if computed.get(name, Precision.FP32) is not wanted:
                    casts.setdefault(name, set()).add(wanted)
            for name, wanted in needs.constants:
                constants.setdefault(name, set()).add(wanted)
        for name in self._outputs:
            if name in computed:
                casts.setdefault(name, set()).add(Precision.FP32)
        if not self.own_casts:
            return Resolution(precisions, computed, casts, constants, Folds())
        folding = Folding(self, computed, casts, constants)
        for index, precision in enumerate(precisions):
            own, needs = self._own_at.get(index), self._needs[precision][index]
            if own is not None:
                folding.pass_cast(own)
            for name, wanted in needs.cast_results:
                folding.read(name, wanted)
            for name in needs.any_type:
                folding.read_any(name)
        return Resolution(precisions, computed, casts, constants, folding.finish())

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        precisions = zip(self.model.nodes, self.group_of, self._precisions_of_nodes(plan), strict=True)
        return {node.name: precision for node, group, precision in precisions if group >= 0}

    def rescaled(self, precision: Precision) -> Rescaled:
        """The constants that have other values in a precision, since it does not hold their own."""
        if precision not in self._rescaled:
            types = self if self._written_from is None else value_types(self._written_from)
            self._rescaled[precision] = rescale(types.model, types.group_of, precision)
        return self._rescaled[precision]

    def in_precision(self, name: str, precision: Precision | None) -> Initializer:
        """The constant that is rounded to a precision; the model's own for None."""
        constant = self.model.initializers[name]
        return constant if precision is None else self.rescaled(precision).constants.get(name, constant)

    def convertible_constants(self) -> frozenset[str]:
        """Constants that some plan reads in less than FP32: what the weight bank keeps more than once.

        What is read in BF16 under some plan is read in FP16 under another (``NodeRule.precisions``).
        """
        fp32 = Precision.FP32
        names = {name for n in self._needs[Precision.FP16] for name, wanted in n.constants if wanted is not fp32}
        # A constant that the model casts itself may be read through the Cast.
        return frozenset(names | {c.source for c in self.own_casts if c.source in self.constants})


@once
def value_types(grouped: GroupedModel) -> ValueTypes:
    """The typing of a model, made once for its groups."""
    return ValueTypes(grouped)


def new_suffix(model: Model, kind: str) -> str:
    """A suffix such that no name in the model ends with it: a name plus the suffix is always new."""
    suffix = f"{_SUFFIX}{kind}"
    while any(name.endswith(suffix) for name in _suffixed_names(model)):
        suffix += "_"
    return suffix


@once
def _suffixed_names(model: Model) -> frozenset[str]:
    """Names in the model, subgraphs included, that may end with a suffix of ``new_suffix``."""
    graphs = [*all_graphs(model.proto.graph)]
    names = {name for graph in graphs for node in graph.node for name in (node.name, *node.output)}
    names |= {v.name for graph in graphs for v in (*graph.input, *graph.initializer)}
    names |= {s.values.name for graph in graphs for s in graph.sparse_initializer}
    names |= {name for node in model.nodes for name in (node.name, *node.outputs)}
    return frozenset(name for name in names if _SUFFIX in name)


@dataclass(frozen=True)
class Unsupported:
    """Groups with operators that lack a precision at the model's operator set (group id -> operators).

    All of these operators have it from operator set ``newer`` on; None where there is no such set.
    """

    precision: Precision
    opset: int
    groups: dict[str, tuple[str, ...]]
    newer: int | None

    @property
    def reasons(self) -> dict[str, str]:
        """Group id -> why it cannot have the precision."""
        return {group: self.reason(ops) for group, ops in self.groups.items()}

    def reason(self, ops: Iterable[str]) -> str:
        """Why groups with these operators cannot have the precision, and what to do about it."""
        name = self.precision.name
        cure = "" if self.newer is None else f"; --opset {self.newer} raises the model to one that has it"
        return f"ONNX has no {name} for {', '.join(ops)} at opset {self.opset}{cure}"


def unsupported(types: ValueTypes, precision: Precision) -> Unsupported:
    """The groups of which some nodes could be FP16, and not this precision."""
    model = types.model
    lacking = types.lacking(precision)
    groups = {types.groups[position].id: ops for position, ops in lacking.items()}
    firsts = [
        _first_opset(node, rule, precision, model.opset)
        for node, rule in zip(model.nodes, types.rules, strict=True)
        if types.group_of[node.index] in lacking and precision not in rule.precisions and rule.precisions
    ]
    opsets = [first for first in firsts if first is not None]
    newer = max(opsets) if opsets and len(opsets) == len(firsts) else None
    return Unsupported(precision, model.opset, groups, newer)


def _first_opset(node: Node, rule: NodeRule, precision: Precision, above: int) -> int | None:
    """The first operator set above one at which a node's operator admits a precision; None where there is none."""
    if not node.is_standard:
        return None
    for opset in range(above + 1, onnx.defs.onnx_opset_version() + 1):
        schema = onnx_schema(node.op_type, opset)
        if schema is None:
            continue
        formal = [*map(schema.input_type, rule.inputs), *map(schema.output_type, rule.outputs)]
        if formal and all(precision in schema.admitted(type_parameter) for type_parameter in formal):
            return opset
    return None


_MOVES = COPIES | {"Dropout", "MaxPool", "Pad"}
"""Operators that TensorRT-RTX moves a Cast past where they change nothing."""


def needs_barrier(types: ValueTypes, node: Node, resolution: Resolution) -> bool:
    """Whether a plan puts a Cast to FP32, and nothing that computes, before the input of a forward recurrent layer."""
    if node.op_type not in RECURRENT or not node.is_standard or attribute(node, "direction") not in (None, b"forward"):
        return False
    if resolution.node_precisions[node.index] is not Precision.FP32:
        return False
    value = node.inputs[0]
    while resolution.computed_in(value) is Precision.FP32:
        maker = types.model.nodes[types.model.producer[value]] if value in types.model.producer else None
        if maker is None or not maker.is_standard or maker.op_type not in _MOVES:
            return False
        value = maker.inputs[0]
    return True


def add_barrier(graph: onnx.GraphProto, value: str, name: str, zero: str) -> str:
    """Append ``value - 0`` as a new node and result ``name``; all barriers of a graph share the constant ``zero``."""
    if all(constant.name != zero for constant in graph.initializer):
        graph.initializer.add(name=zero, data_type=onnx.TensorProto.FLOAT, float_data=[0.0])
    graph.node.add(op_type="Sub", name=name, input=[value, zero], output=[name])
    return name
