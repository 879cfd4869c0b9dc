"""Layer groups: nodes that always share a precision, the unit of the search.

Indivisible patterns come first, recognised by structure (``patterns``). At ``op`` granularity each pattern and each
other node is a group; views belong to the group of their input. At ``fusion`` each pattern and each remaining heavy
node (convolution, matrix product, norm, ...) starts a group; every other node joins the group of the latest producer
among its inputs, as a fused epilogue would; a node that reads no group (masks, views of constants) joins its reader.
At ``block`` these groups are merged by module, as the names of nodes tell it. A coarser granularity only ever merges
groups of the finer one.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import get_args

from mptune.errors import PlanError
from mptune.graph.facts import casts_integers, facts_of, node_rule, node_rules, origin
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fixed_shape
from mptune.graph.ops import ALIASES, ARITHMETIC, BOUNDS, MOVEMENT, QUANTISING, anchor_kind
from mptune.graph.patterns import QUANTISED, find_patterns
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import Granularity

FOLDED = "computed from constants alone: folded before the model runs, so FP16 saves nothing"
CASTS_INTEGERS = "casts integers: every reader gets them in the type that it needs"
_KEPT_QUANTISED = "quantised: engines run it in INT8, and a Cast beside it would keep them from fusing it"

APART = "apart"  # ends the ids of groups of nodes that are set apart
GROUPS_PER_BUDGET = 2.0  # ``auto`` takes ``op`` where that makes at most this many free groups per evaluation
MOST_GROUPS = 500
"""``auto`` takes ``block`` where ``fusion`` makes more free groups: each costs an emulated inference before a search,
and time in each proposal of the sampler. A small budget does not call for blocks: one-group errors are known."""

Scope = tuple[str, ...]


@dataclass(frozen=True)
class LayerGroup:
    """Nodes that always share a precision.

    Attributes:
        id: ``g000``, ``g001``, ... in topological order; the same for the same model on every machine.
        name: readable, from the scopes in the node names.
        kind: conv, matmul, norm, softmax, attention, rnn, reduce, resample, quantised, elementwise; block for several.
        nodes: node names in topological order.
        ops: operator -> how many of it.
        pinned: why the group is FP32 under any plan; None where it is free.
        pattern: hash of the structure: equal for groups that repeat each other with other weights.
    """

    id: str
    name: str
    kind: str
    nodes: tuple[str, ...]
    ops: Mapping[str, int]
    pinned: str | None = None
    pattern: str = ""


@dataclass(frozen=True, eq=False)
class GroupedModel:
    """A model and its layer groups, which always go together.

    ``io`` is the precision of FP32 inputs and outputs in mixed models (``mptune.graph.interface``).
    """

    model: Model
    groups: tuple[LayerGroup, ...]
    io: str = Precision.FP32

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """Node name -> id of its group; nodes without a precision are not in it."""
        return {node: group.id for group in self.groups for node in group.nodes}

    def in_one_group(self, nodes: Iterable[Node]) -> bool:
        """Whether all of these nodes (at least one) belong to the same group: then no plan puts a Cast between them."""
        groups = {self.owners.get(node.name) for node in nodes}
        return len(groups) == 1 and None not in groups

    def uniform(self, precision: Precision) -> PrecisionPlan:
        """The plan that gives every group the same precision."""
        return PrecisionPlan.uniform(self.model.sha256, (group.id for group in self.groups), precision)


def find_groups(model: Model, granularity: Granularity = "fusion", budget: int | None = None) -> tuple[LayerGroup, ...]:
    """Partition the nodes that have a precision into groups.

    Raises:
        PlanError: an unknown granularity, or ``auto`` without a budget.
    """
    if granularity not in get_args(Granularity):
        raise PlanError(f"unknown granularity {granularity!r}", f"one of: {', '.join(get_args(Granularity))}")
    return find_fitting_groups(model, budget)[1] if granularity == "auto" else _Partition(model).groups(granularity)


def find_fitting_groups(model: Model, budget: int | None) -> tuple[Granularity, tuple[LayerGroup, ...]]:
    """The granularity that ``auto`` stands for, and its groups: see ``GROUPS_PER_BUDGET`` and ``MOST_GROUPS``."""
    if budget is None or budget < 1:
        raise PlanError("granularity 'auto' needs a budget", "give the number of evaluations, or choose a granularity")
    partition = _Partition(model)
    limits: dict[Granularity, float] = {"op": GROUPS_PER_BUDGET * budget, "fusion": MOST_GROUPS}
    for granularity, most in limits.items():
        groups = partition.groups(granularity)
        if sum(group.pinned is None for group in groups) <= most:
            return granularity, groups
    return "block", partition.groups("block")


def groups_sha256(groups: Sequence[LayerGroup]) -> str:
    """A hash of which nodes are in which group."""
    content = "\n".join(f"{g.id} {' '.join(g.nodes)}" for g in groups)
    return hashlib.sha256(content.encode()).hexdigest()


# -- plans that name nodes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodesPlan:
    """A plan by nodes, as a plan of groups."""

    groups: tuple[LayerGroup, ...]
    plan: PrecisionPlan
    warnings: tuple[str, ...]


def plan_of_nodes(model: Model, wanted: Mapping[str, Precision], source: str = "the plan") -> NodesPlan:
    """Turn precisions of nodes into precisions of indivisible groups.

    A key is a node's name, a glob on names, or ``op:Softmax``; where several keys match a node, the last one counts.
    Nodes that no key matches are FP32, except that a view takes the precision of its input, and a bias, batch norm or
    activation that of its convolution or product. A pattern that would be split is FP32 as a whole.
    """
    groups, nodes = find_groups(model, "op"), {node.name: node for node in model.nodes}
    grouped = {name for group in groups for name in group.nodes}
    explicit: dict[str, Precision] = {}
    warnings = []
    for key, precision in wanted.items():
        prefix, _, op_type = key.partition(":")
        names = [n for n, node in nodes.items() if (node.op_type == op_type if prefix == "op" else fnmatchcase(n, key))]
        names = [key] if key in nodes else names  # names may hold brackets
        if not names:
            close = difflib.get_close_matches(key, nodes, 1)
            hint = f"did you mean {close[0]!r}?" if close else "`mptune inspect MODEL --json` lists the nodes"
            raise PlanError(f"{source}: {key!r} names no node of {model.path}", hint)
        explicit.update(dict.fromkeys(names, precision))
        if precision is not Precision.FP32 and grouped.isdisjoint(names):
            reason = node_rule(model, nodes[names[0]]).fixed or "it computes nothing in FP32"
            warnings.append(f"{key!r} names only nodes that cannot be {precision.name}: {reason}")
    precisions: dict[str, Precision] = {}  # by group
    for group in groups:
        without_views = [explicit.get(name) for name in group.nodes if nodes[name].op_type not in MOVEMENT]
        asked = without_views if {*without_views} - {None} else [explicit.get(name) for name in group.nodes]
        stated = {precision for precision in asked if precision is not None}
        reduced = [precision.name for precision in asked if precision not in (None, Precision.FP32)]
        is_layer = asked is without_views and group.kind in _LAYERS
        precisions[group.id] = Precision.FP32
        if group.kind == QUANTISED and reduced:
            asks = f"{group.name} stays in FP32 although the plan asks for"
            warnings.append(f"{asks} {reduced[0]}: {group.pinned}")
        elif len(stated) == 1 and (is_layer or None not in asked or not reduced):
            (precisions[group.id],) = stated
        elif stated:
            warnings.append(
                f"{group.name} ({group.kind}) is indivisible, and the plan has {len(reduced)} of its {len(group.nodes)}"
                f" nodes in {' or '.join(dict.fromkeys(reduced))}: it is FP32 as a whole"
            )
    return NodesPlan(groups, PrecisionPlan(model.sha256, precisions), tuple(warnings))


# -- nodes that are set apart -------------------------------------------------------------------------------------


def set_apart(model: Model, groups: Sequence[LayerGroup], names: Collection[str]) -> tuple[LayerGroup, ...]:
    """The groups, with these nodes of each in a group of its own; the rest keeps the id and the name."""
    nodes, parts = {node.name: node for node in model.nodes}, list[LayerGroup]()
    names_before = {group.name for group in groups}
    for group in groups:
        apart = [nodes[name] for name in group.nodes if name in names]
        if not apart:
            parts.append(group)
            continue
        name = apart[0].name.strip("/")
        name = f"{group.name}/{APART}" if name in names_before else name
        kind = next((kind for node in apart if (kind := anchor_kind(node.op_type))), "elementwise")
        own = replace(group, id=f"{group.id}-{APART}", name=name, kind=kind)
        rest = [nodes[name] for name in group.nodes if name not in names]
        parts += [_with_nodes(model, group, rest), _with_nodes(model, own, apart)]
    return tuple(parts)


def _with_nodes(model: Model, group: LayerGroup, nodes: Sequence[Node]) -> LayerGroup:
    ops = dict(Counter(node.op_type for node in nodes))
    return replace(group, nodes=tuple(n.name for n in nodes), ops=ops, pattern=_structural_hash(model, nodes))


# -- the partition ------------------------------------------------------------------------------------------------

_KEEPS_MASKS_OUT = frozenset({"attention", "softmax"})
_SCALES_OR_MASKS = ARITHMETIC | BOUNDS | {"Where", "Pow", "Neg"}

_LAYERS = frozenset({"conv", "matmul"})
"""A BatchNormalization right after one of these is folded into it by every runtime; the scaling of its input is not."""


class _Partition:
    """What the partitions of one model at every granularity share: patterns, and which nodes have a precision."""

    def __init__(self, model: Model) -> None:
        self._model, self._facts = model, facts_of(model)
        self._static = self._facts.static
        if all(fixed_shape(info.shape) is not None for info in model.inputs):
            self._static |= self._facts.folded  # shapes are constants then
        typed = {index for index, rule in enumerate(node_rules(model)) if rule.inputs or rule.outputs}
        self._patterns = [(pattern, [i for i in pattern.nodes if i in typed]) for pattern in find_patterns(model)]
        # Each node that has a precision -> those that go with it wherever it goes, itself among them.
        self._whole = {i: [i] for i in typed} | {i: whole for _, whole in self._patterns for i in whole}

    def groups(self, granularity: Granularity) -> tuple[LayerGroup, ...]:
        """The groups at a granularity other than ``auto``."""
        members, kind = self._assigned(fuse=granularity != "op")
        return self._blocks(members, kind) if granularity == "block" else self._named(members, kind, {})

    def _assigned(self, *, fuse: bool) -> tuple[dict[int, list[Node]], dict[int, str]]:
        """The groups at ``fusion`` granularity, or at ``op``: patterns, then every other node in topological order.

        Nodes that read no group come last. They take the group of their readers; where these differ, they are a group
        of their own. Masks stay apart from the softmax or product that they feed, and so does the scaling of an input:
        (1 - mask) * -1e9, and pixels of 16 bits, must be FP32 where the attention or the convolution need not be. What
        is computed from constants stays in FP32, to be rounded once. Views of constants (exporters put an Identity
        before a weight that two layers share) go with their first reader, whoever else reads them: converting a weight
        twice costs nothing. Nothing joins a quantised part where another group reads it.

        Returns:
            Leading node -> the nodes of its group, in topological order; and -> its kind if not elementwise.
        """
        nodes, leader, kind = self._model.nodes, dict[int, int](), dict[int, str]()
        for pattern, typed in self._patterns:
            if pattern.kind != "activation" and typed:
                first = pattern.anchor if pattern.anchor in typed else typed[0]
                leader.update(dict.fromkeys(typed, first))
                kind[first] = pattern.kind
        sources: dict[int, bool] = {}  # nodes that read no group -> whether they fold, and are no scale or weight
        for i, whole in sorted(self._whole.items()):
            if i in leader:
                continue
            node, read = nodes[i], [leader[p] for p in self._producers(nodes[i]) if p in leader]
            producers = [p for p in read if kind.get(p) != QUANTISED]  # nothing joins a quantised part
            latest = max(producers, default=i if read else -1)
            is_folded = node.op_type == "BatchNormalization" and kind.get(latest) in _LAYERS
            anchor = None if is_folded else anchor_kind(node.op_type)
            is_alone = anchor is not None if fuse else not (node.op_type in MOVEMENT and producers)
            target = i if is_alone else latest
            if self._is_static(node) or target < 0:
                sources[i] = self._is_static(node) and not self._is_scale(node) and not self._is_weight(node)
                continue
            leader.update(dict.fromkeys(whole, target))  # a decomposed activation is whole
            if target == i and anchor is not None:
                kind[i] = anchor
        for i in sources:  # those that are connected share one leader
            earlier = [leader[p] for p in self._producers(nodes[i]) if sources.get(p) == sources[i]]
            first = i if len(self._whole[i]) > 1 else max(earlier, default=i)
            leader.update(dict.fromkeys(self._whole[i], first))

        def group_of(index: int) -> int:  # a leader that joined another group takes along those that it led
            while leader[index] != index:
                index = leader[index]
            return index

        for i in (i for i in reversed(sources) if not sources[i]):
            indices = (r.index for out in nodes[i].outputs for r in self._facts.readers(out) if r.index in leader)
            readers = {leader[index] for index in indices if group_of(index) != i}
            floats = {reader for reader in readers if kind.get(reader) != QUANTISED}
            if readers and self._is_weight(nodes[i]):
                leader[i] = min(floats or readers)
            elif len(floats) == 1:
                (only,) = floats
                is_scaling = kind.get(only) in _LAYERS and nodes[i].op_type in _SCALES_OR_MASKS
                if self._is_scale(nodes[i]) or not (kind.get(only) in _KEEPS_MASKS_OUT or is_scaling):
                    leader[i] = only
        members: dict[int, list[Node]] = {first: [] for first in sorted(map(group_of, leader))}
        for index in sorted(leader):
            members[group_of(index)].append(nodes[index])
        return members, kind

    def _is_static(self, node: Node) -> bool:
        return all(out in self._static for out in node.outputs if out)

    def _is_scale(self, node: Node) -> bool:
        return all(self._facts.is_single(out) for out in node.outputs if out)

    def _is_weight(self, node: Node) -> bool:
        """Whether a node is a view of a constant, or of a dequantised constant."""
        value, _ = origin(self._model, node.outputs[0], MOVEMENT | QUANTISING)
        return node.op_type in MOVEMENT and value in self._model.initializers

    def _producers(self, node: Node) -> list[int]:
        """The nodes that compute the FP32 values that a node reads, constants folded or not."""
        roots = (self._facts.root(i) for i in node.inputs if i and self._model.info(i).is_float32)
        return [self._model.producer[root] for root in roots if root in self._model.producer]

    def _pinned(self, kind: str, nodes: Sequence[Node]) -> str | None:
        """Why a group is FP32 under any plan."""
        if kind == QUANTISED:
            return _KEPT_QUANTISED
        movement = MOVEMENT - {"Cast"}
        if nodes[0].op_type == "Cast" and all(n.op_type in movement or casts_integers(self._model, n) for n in nodes):
            return CASTS_INTEGERS
        return FOLDED if all(self._is_static(node) for node in nodes) else None

    def _blocks(self, members: Mapping[int, list[Node]], kind: Mapping[int, str]) -> tuple[LayerGroup, ...]:
        """The groups at fusion granularity, merged by module."""
        scopes = _block_scopes([_group_scope(self._model.nodes[first], nodes) for first, nodes in members.items()])
        module = dict(zip(members, scopes, strict=True))  # of each fusion group: the one that it merges into
        module |= {first: None for first, nodes in members.items() if self._pinned(kind.get(first, ""), nodes)}
        # What reads no group, and is read in another module than its own, is shared (a mask): it stays out of both.
        leader = {node.index: first for first, nodes in members.items() for node in nodes}
        read_in: dict[int, set[Scope | None]] = {first: set() for first in members}
        reads = set[int]()
        for index, first in leader.items():
            for maker in {leader.get(p, first) for p in self._producers(self._model.nodes[index])} - {first}:
                reads.add(first)
                read_in[maker].add(module[first])
        blocks: dict[Scope | int, list[int]] = {}
        for first, scope in module.items():
            is_apart = scope is None or (first not in reads and not read_in[first] <= {scope})
            blocks.setdefault(first if scope is None or is_apart else scope, []).append(first)
        merged = {block[0]: [node for first in block for node in members[first]] for block in blocks.values()}
        merged = {first: sorted(nodes, key=lambda node: node.index) for first, nodes in merged.items()}
        kinds = {**kind, **{block[0]: "block" for block in blocks.values() if len(block) > 1}}
        titles = {block[0]: "/".join(scope) for scope, block in blocks.items() if isinstance(scope, tuple)}
        return self._named(merged, kinds, titles)

    def _named(
        self, members: Mapping[int, list[Node]], kind: Mapping[int, str], titles: Mapping[int, str]
    ) -> tuple[LayerGroup, ...]:
        """The groups in topological order of their leaders; titles are names that do not follow from the nodes."""
        # Names are unique by the groups' kinds, and by number where that is not enough.
        kinds = [kind.get(leader, "elementwise") for leader in members]
        names = []
        for leader, nodes in members.items():
            start = self._model.nodes[leader]
            own, scope = start.name, "/".join(_group_scope(start, nodes))
            names.append(titles.get(leader) or scope or own.strip("/") or own)
        shared = Counter(names)
        names = [f"{name}/{kinds[k]}" if shared[name] > 1 else name for k, name in enumerate(names)]
        total, number, width = Counter(names), Counter[str](), max(3, len(str(len(members))))
        groups: list[LayerGroup] = []
        for k, (nodes, name) in enumerate(zip(members.values(), names, strict=True)):
            number[name] += 1
            unique = name if total[name] == 1 else f"{name}#{number[name]}"
            group = LayerGroup(f"g{k:0{width}d}", unique, kinds[k], (), {}, self._pinned(kinds[k], nodes))
            groups.append(_with_nodes(self._model, group, nodes))
        return tuple(groups)


# -- structure that repeats ---------------------------------------------------------------------------------------

_SMALL_BYTES = 512  # integer constants up to this size are part of the structure: axes, shapes, indices


def _structural_hash(model: Model, nodes: Sequence[Node]) -> str:
    """16 hexadecimal digits, equal for groups of the same operators, attributes and weight shapes in any order."""

    def text(name: str) -> str:
        """What a node reads: nothing, a constant of some shape, or a computed value."""
        name = origin(model, name, ALIASES)[0]
        constant = model.initializers.get(name)
        if constant is None:
            return f"value {model.info(name).dtype}" if name else "none"
        is_small = constant.dtype in ("int64", "int32", "bool") and constant.nbytes <= _SMALL_BYTES
        return f"constant {constant.dtype} {constant.shape} {constant.numpy().tolist() if is_small else ''}"

    lines = []
    for node in nodes:
        if node.op_type not in ALIASES:
            attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.proto.attribute)
            lines.append(" ".join((node.domain, node.op_type, *attributes, *map(text, node.inputs))))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


# -- modules ------------------------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"(^|[._-])\d+$")
_METADATA_KEY = "pkg.torch.onnx.name_scopes"
_MAX_UNNUMBERED = 12  # a scope without a number that holds more groups than this is a network, not a block


def _group_scope(leader: Node, nodes: Sequence[Node]) -> Scope:
    """The modules of a group's leading node, or of its first one with a name, outermost first; empty without any."""
    for node in [leader] if leader.proto.name else nodes:
        parts = node.name.split("/")[:-1]
        for entry in node.proto.metadata_props:
            if entry.key == _METADATA_KEY:  # a Python list of paths, from '' to the node's own name
                modules = [path for path in re.findall(r"'([^']*)'", entry.value)[:-1] if path]
                parts = modules[-1].split(".") if modules else []
        scopes: list[str] = []
        for part in filter(None, parts):  # blocks/blocks.0 and blocks/0 both become blocks.0
            if scopes and part.isdecimal():
                scopes[-1] = f"{scopes[-1]}.{part}"
            elif scopes and part.startswith(f"{scopes[-1]}."):
                scopes[-1] = part
            else:
                scopes.append(part)
        if scopes:
            return tuple(scopes)
    return ()


def _block_scopes(scopes: Sequence[Scope]) -> list[Scope | None]:
    """The block that each group of a model lies in, by the groups' scopes; None for a group on its own.

    A block is the innermost numbered module that holds several groups, such as ``blocks.3`` or ``layers.0/blocks.1``;
    outside of these, the innermost module that holds a few.
    """
    counts = Counter(scope[:depth] for scope in scopes for depth in range(1, len(scope) + 1))
    every = sum(map(bool, scopes))  # the outermost modules hold all groups, and are no blocks
    numbered = {prefix for prefix, count in counts.items() if 1 < count < every and _NUMBERED.search(prefix[-1])}
    around = {prefix[:depth] for prefix in numbered for depth in range(1, len(prefix))}
    few = {prefix for prefix, count in counts.items() if 1 < count < min(every, _MAX_UNNUMBERED + 1)} - around
    blocks: list[Scope | None] = []
    for scope in scopes:
        inner = [scope[:depth] for depth in range(len(scope), 0, -1)]
        blocks.append(next((prefix for level in (numbered, few) for prefix in inner if prefix in level), None))
    return blocks
