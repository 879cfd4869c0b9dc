"""Layer groups: nodes that always share a precision, the unit of the search.

Indivisible patterns are found first, by structure (``patterns``). At ``op`` granularity each pattern and each other
node is a group; views belong to the group of their input. At ``fusion`` each pattern and each remaining heavy node
(convolution, matrix product, norm, ...) starts a group; every other node joins the group of the latest producer among
its inputs, as a fused epilogue would; a node that reads no group (masks, views of constants) joins its reader. At
``block`` these groups are merged by module or, where names say nothing, by repeated structure. A coarser granularity
only ever merges groups of the finer one.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import get_args

from mptune.errors import PlanError
from mptune.graph.facts import casts_integers, dequantises_weights, facts_of, node_rules
from mptune.graph.grouping.norms import Pattern
from mptune.graph.grouping.patterns import KEPT_QUANTISED, QUANTISED, find_patterns
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fixed_shape
from mptune.graph.ops import ALIASES, ARITHMETIC, BOUNDS, MOVEMENT, QUANTISING, anchor_kind
from mptune.settings import Granularity

FOLDED = "computed from constants alone: folded before the model runs, so FP16 saves nothing"
CASTS_INTEGERS = "casts integers: every reader gets them in the type that it needs"

_SMALL = 64
"""Integer constants up to this many elements are part of the structure: axes, shapes, indices."""

_MAX_PERIOD = 96


def structural_hash(model: Model, nodes: Sequence[Node]) -> str:
    """16 hexadecimal digits that are equal for groups of the same operators, attributes, wiring and weight shapes.

    Names, weights and the order in which independent nodes stand do not count.
    """
    made: dict[str, str] = {}
    digests = []
    for node in nodes:
        if node.op_type in ALIASES and node.is_standard:
            made[node.outputs[0]] = made.get(node.inputs[0]) or _source_text(model, node.inputs[0])
            continue
        seen: dict[str, int] = {}
        parts = [
            node.domain,
            node.op_type,
            *sorted(a.SerializeToString(deterministic=True).hex() for a in node.proto.attribute),
        ]
        for name in node.inputs:
            parts.append(f"{seen.setdefault(name, len(seen))}:{made.get(name) or _source_text(model, name)}")
        digest = _digest(parts)
        digests.append(digest)
        made.update((out, f"{digest}.{slot}") for slot, out in enumerate(node.outputs) if out)
    return _digest(sorted(digests))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _source_text(model: Model, name: str) -> str:
    """What a value from outside the group is: nothing, a constant of some shape, or a computed value."""
    if not name:
        return "none"
    while name in model.producer and name not in model.initializers:
        maker = model.nodes[model.producer[name]]
        if maker.op_type not in ALIASES:
            break
        name = maker.inputs[0]
    constant = model.initializers.get(name)
    if constant is None:
        return f"value {model.info(name).dtype}"
    text = f"constant {constant.dtype} {constant.shape}"
    if constant.dtype in ("int64", "int32", "bool") and constant.nbytes <= 8 * _SMALL:
        text += f" {constant.numpy().reshape(-1).tolist()}"
    return text


def find_runs(patterns: Sequence[str]) -> list[tuple[int, int]]:
    """Blocks in a sequence of groups without names: (start, length) of every turn of a run that repeats.

    A run is at least two equal turns of two or more groups, the longest cover first; a last turn that differs in
    its final group only (the network's output is cut from it) belongs to the run.
    """
    turns_found: list[tuple[int, int]] = []
    alike = [1] * len(patterns)  # how many equal groups begin here
    for at in range(len(patterns) - 2, -1, -1):
        alike[at] += alike[at + 1] if patterns[at] == patterns[at + 1] else 0
    start = 0
    while start < len(patterns) - 3:
        turns, period = (1, 1) if alike[start] > _MAX_PERIOD else _best_run(patterns, start)
        if turns < 2:
            start += 1
            continue
        following = patterns[start + turns * period : start + (turns + 1) * period]
        if len(following) == period and list(following[:-1]) == list(patterns[start : start + period - 1]):
            turns += 1
        turns_found += [(start + turn * period, period) for turn in range(turns)]
        start += turns * period
    return turns_found


def _best_run(patterns: Sequence[str], start: int) -> tuple[int, int]:
    """The number of turns and the period of the run from ``start`` that covers most; of equals, the shortest period."""
    best = (1, 1)
    for period in range(2, min(_MAX_PERIOD, (len(patterns) - start) // 2) + 1):
        matched = 0
        while start + period + matched < len(patterns) and (
            patterns[start + matched] == patterns[start + period + matched]
        ):
            matched += 1
        turns = 1 + matched // period
        if turns > 1 and turns * period > best[0] * best[1] and len(set(patterns[start : start + period])) > 1:
            best = (turns, period)
    return best


Scope = tuple[str, ...]

_NUMBERED = re.compile(r"(^|[._-])\d+$")

_METADATA_KEY = "pkg.torch.onnx.name_scopes"

_MAX_UNNUMBERED = 12
"""A scope without a number that holds more groups than this is a network, not a block."""


def scope_of(node: Node) -> Scope:
    """The modules that a node lies in, outermost first; empty where nothing says so."""
    for entry in node.proto.metadata_props:
        if entry.key == _METADATA_KEY:
            return _tidy(_innermost(entry.value).split("."))
    return _tidy(node.name.split("/")[:-1])


def _innermost(text: str) -> str:
    """The path of the innermost module in the metadata: a Python list from "" to the node's own name."""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    modules = [s for s in scopes[:-1] if isinstance(s, str) and s] if isinstance(scopes, list) else []
    return modules[-1] if modules else ""


def _tidy(parts: Sequence[str]) -> Scope:
    """Without what says nothing new: ``blocks/blocks.0`` and ``blocks/0`` both become ``blocks.0``."""
    scopes: list[str] = []
    for part in parts:
        if not part:
            continue
        if scopes and part.isdecimal():
            scopes[-1] = f"{scopes[-1]}.{part}"
        elif scopes and part.startswith(f"{scopes[-1]}."):
            scopes[-1] = part
        else:
            scopes.append(part)
    return tuple(scopes)


def group_name(leader: Node, nodes: Sequence[Node]) -> str:
    """A readable name: the scope of the group, else the leading node's own name."""
    return "/".join(group_scope(leader, nodes)) or leader.name.strip("/") or leader.name


def group_scope(leader: Node, nodes: Sequence[Node]) -> Scope:
    """The scope of the leading node; of another one where the exporter gave the leading node no name."""
    if leader.proto.name:
        return scope_of(leader)
    return next((scope for node in nodes if (scope := scope_of(node))), ())


def unique_names(names: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Make the names of groups unique: by their kind, and by number where that is not enough, in order."""
    shared = Counter(names)
    names = [f"{name}/{kind}" if shared[name] > 1 else name for name, kind in zip(names, kinds, strict=True)]
    seen: Counter[str] = Counter()
    total = Counter(names)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if total[name] == 1 else f"{name}#{seen[name]}")
    return result


def block_scopes(scopes: Sequence[Scope]) -> list[Scope | None]:
    """The block that each group of a model lies in, by the groups' scopes; None for a group on its own.

    A block is the innermost numbered module that holds several groups, such as ``blocks.3`` or ``layers.0/blocks.1``;
    outside of these, the innermost module that holds a few.
    """
    counts = Counter(scope[:depth] for scope in scopes for depth in range(1, len(scope) + 1))
    levels = zip(*(scope for scope in scopes if scope), strict=False)
    common = len([*takewhile(lambda modules: len({*modules}) == 1, levels)])  # the outermost modules of all groups
    numbered = {prefix for prefix, count in counts.items() if count > 1 and _NUMBERED.search(prefix[-1])}
    around = {prefix[:depth] for prefix in numbered for depth in range(1, len(prefix))}

    def choose(scope: Scope) -> Scope | None:
        prefixes = [scope[:depth] for depth in range(len(scope), common, -1)]
        inner = next((p for p in prefixes if p in numbered), None)
        if inner is not None:
            return inner
        return next((p for p in prefixes if 1 < counts[p] <= _MAX_UNNUMBERED and p not in around), None)

    return [choose(scope) for scope in scopes]


GROUPS_PER_BUDGET = 2.0
"""``auto`` takes ``op`` where that makes at most this many free groups per evaluation."""

MOST_GROUPS = 500
"""``auto`` takes ``block`` where ``fusion`` makes more free groups: each costs an emulated inference before the search,
and time in every proposal of the sampler. A small budget does not call for blocks: as the one-group errors are known,
10 builds reach 1.8 times the hypervolume with 120 groups that they reach with the 20 blocks of these, and blocks that
are split later do not catch up within 50 builds (``benchmarks.granularity`` of commit 672f8217)."""

_KEEPS_MASKS_OUT = frozenset({"attention", "softmax"})

_KEEPS_SCALINGS_OUT = frozenset({"conv", "matmul"})

_SCALES_OR_MASKS = ARITHMETIC | BOUNDS | {"Where", "Pow", "Neg"}

_FOLDS_INTO = frozenset({"conv", "matmul"})
"""A BatchNormalization right after one of these is folded into it by every runtime."""


@dataclass(frozen=True)
class LayerGroup:
    """Nodes that always share a precision.

    Attributes:
        id: ``g000``, ``g001``, ... in topological order; the same for the same model on every machine.
        name: readable, from the scopes in the node names.
        kind: of the node that started it: conv, matmul, norm, softmax, attention, rnn, reduce, resample,
            quantised or elementwise; block for several of these together; range for nodes that are set apart.
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


def find_groups(model: Model, granularity: Granularity = "fusion", budget: int | None = None) -> tuple[LayerGroup, ...]:
    """Partition the nodes that have a precision into groups.

    Args:
        model: the model.
        granularity: how coarse.
        budget: evaluations of the search; ``auto`` needs it.

    Raises:
        PlanError: an unknown granularity, or ``auto`` without a budget.
    """
    if granularity == "auto":
        return find_fitting_groups(model, budget)[1]
    if granularity not in get_args(Granularity):
        raise PlanError(f"unknown granularity {granularity!r}", f"one of: {', '.join(get_args(Granularity))}")
    return _Partition(model).groups(granularity)


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


def find_units(model: Model) -> tuple[tuple[LayerGroup, Pattern | None], ...]:
    """The finest partition: every pattern whole, every other node on its own. For plans that name nodes."""
    return _Partition(model).units()


def groups_sha256(groups: Sequence[LayerGroup]) -> str:
    """A hash of which nodes are in which group."""
    content = "\n".join(f"{g.id} {' '.join(g.nodes)}" for g in groups)
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass
class _Assignment:
    """Node index -> index of the node that leads its group, -1 without a precision; and leader -> kind of its group."""

    leader: list[int]
    kind: dict[int, str] = field(default_factory=dict)


class _Partition:
    """What the partitions of one model at every granularity share: patterns, and which nodes have a precision."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._facts = facts_of(model)
        self._folded = self._facts.static
        if all(fixed_shape(info.shape) is not None for info in model.inputs):
            self._folded |= self._facts.folded  # shapes are constants then
        self._has_precision = [bool(rule.inputs or rule.outputs) for rule in node_rules(model)]
        self._patterns = find_patterns(model)
        self._pattern_of = {index: pattern for pattern in self._patterns for index in pattern.nodes}
        self._fusion: _Assignment | None = None

    def groups(self, granularity: Granularity) -> tuple[LayerGroup, ...]:
        """The groups at a granularity other than ``auto``."""
        if granularity == "op":
            return self._named(self._assign(fuse=False))
        self._fusion = self._fusion or self._assign(fuse=True)
        return self._named(self._fusion) if granularity == "fusion" else self._blocks(self._fusion)

    def units(self) -> tuple[tuple[LayerGroup, Pattern | None], ...]:
        """See ``find_units``."""
        assignment = _Assignment([-1] * len(self._model.nodes))
        for index, has_precision in enumerate(self._has_precision):
            pattern = self._pattern_of.get(index)
            if has_precision:
                lead = index if pattern is None else self._leader_of(pattern)
                assignment.leader[index] = lead
                kind = anchor_kind(self._model.nodes[lead].op_type) if pattern is None else pattern.kind
                assignment.kind.setdefault(lead, "elementwise" if kind in (None, "activation") else str(kind))
        index_of = {node.name: node.index for node in self._model.nodes}
        return tuple((group, self._pattern_of.get(index_of[group.nodes[0]])) for group in self._named(assignment))

    def _leader_of(self, pattern: Pattern) -> int:
        """The anchor, or the first node with a precision."""
        if self._has_precision[pattern.anchor]:
            return pattern.anchor
        return next((i for i in pattern.nodes if self._has_precision[i]), pattern.anchor)

    def _assign(self, *, fuse: bool) -> _Assignment:
        model = self._model
        assignment = _Assignment([-1] * len(model.nodes))
        leader, kind = assignment.leader, assignment.kind
        for pattern in self._patterns:
            if pattern.kind != "activation":
                self._take(pattern, self._leader_of(pattern), assignment)
                kind[self._leader_of(pattern)] = pattern.kind
        sources = []
        for node in model.nodes:
            i = node.index
            if not self._has_precision[i] or leader[i] >= 0:
                continue
            read = [leader[p] for p in self._producers(node) if leader[p] >= 0]
            producers = [p for p in read if kind.get(p) != QUANTISED]  # nothing joins a quantised part
            latest = max(producers, default=i if read else -1)
            if self._is_static(node):
                sources.append(i)
                continue
            pattern_here = self._pattern_of.get(i)
            is_folded = node.op_type == "BatchNormalization" and kind.get(latest) in _FOLDS_INTO
            anchor = None if is_folded else anchor_kind(node.op_type)
            alone = not (node.op_type in MOVEMENT and producers) if not fuse else anchor is not None
            target = i if alone else latest
            if target < 0:
                sources.append(i)
            elif pattern_here is not None:  # a decomposed activation
                self._take(pattern_here, target, assignment)
            else:
                leader[i] = target
            if target == i:
                kind[i] = anchor or "elementwise"
        self._join_readers(sources, assignment)
        return assignment

    def _take(self, pattern: Pattern, leader: int, assignment: _Assignment) -> None:
        for index in pattern.nodes:
            if self._has_precision[index]:
                assignment.leader[index] = leader

    def _is_static(self, node: Node) -> bool:
        return all(out in self._folded for out in node.outputs if out)

    def _producers(self, node: Node) -> list[int]:
        """The nodes that compute the FP32 values that a node reads, constants folded or not."""
        model = self._model
        roots = (self._facts.root(i) for i in node.inputs if i and model.info(i).is_float32)
        return [model.producer[root] for root in roots if root in model.producer]

    def _join_readers(self, sources: Sequence[int], assignment: _Assignment) -> None:
        """Give nodes that read no group the group of their readers; where these differ, a group of their own.

        Masks stay apart from the softmax or product that they feed, and so does the scaling of an input: (1 - mask) *
        -1e9, and pixels of 16 bits, must be FP32 where the attention or the convolution need not be. What is computed
        from constants stays in FP32, to be rounded once. Views of constants (exporters put an Identity before a weight
        that two layers share) go with their first reader, whoever else reads them: converting a weight twice costs
        nothing. Only where no other reads them it is a quantised part, which nothing else joins.
        """
        model, leader, kind = self._model, assignment.leader, assignment.kind
        folded = {i for i in sources if self._is_folded(model.nodes[i])}
        others = set(sources) - folded
        for i in sources:  # connected sources that feed nothing in a group yet share one leader
            alike = folded if i in folded else others
            earlier = [leader[p] for p in self._producers(model.nodes[i]) if p in alike and leader[p] >= 0]
            pattern = self._pattern_of.get(i)
            leader[i] = i if pattern is not None else max(earlier, default=i)
            if pattern is not None:
                self._take(pattern, i, assignment)
        for i in reversed(sources):
            node = model.nodes[i]
            if i in folded:
                continue
            is_view = self._is_view_of_constant(node)
            readers = {r for r in self._reading_groups(node, leader, through=is_view) if not _is_led_by(i, r, leader)}
            floats = {r for r in readers if kind.get(r) != QUANTISED}
            if readers and is_view:
                leader[i] = min(floats or readers)
            elif len(floats) == 1 and self._may_join(node, kind.get(min(floats))):
                leader[i] = floats.pop()
        for i in reversed(sources):  # a leader that joined another group takes along those that it led
            while leader[leader[i]] != leader[i]:
                leader[i] = leader[leader[i]]

    def _reading_groups(self, node: Node, leader: Sequence[int], *, through: bool) -> set[int]:
        """Leaders of the groups that read what a node computes, also ``through`` QuantizeLinear and its like."""
        leaders, outputs = set(), [*node.outputs]
        while outputs:
            for reader in self._facts.readers(outputs.pop()):
                if leader[reader.index] >= 0:
                    leaders.add(leader[reader.index])
                elif through and reader.op_type in QUANTISING:
                    outputs += reader.outputs
        return leaders

    def _may_join(self, node: Node, kind: str | None) -> bool:
        """Whether a node may share the precision of its only reader, a group of this kind."""
        if self._is_single(node):
            return True
        if kind in _KEEPS_SCALINGS_OUT:
            return node.op_type not in _SCALES_OR_MASKS
        return kind not in _KEEPS_MASKS_OUT

    def _is_folded(self, node: Node) -> bool:
        """Whether a node computes a tensor of constants: in FP32, once, before the model runs; rounded only then."""
        return self._is_static(node) and not self._is_single(node) and not self._is_view_of_constant(node)

    def _is_view_of_constant(self, node: Node) -> bool:
        """Whether a node shows a constant in another form: a view of it, its dequantised values, or a view of those."""
        if not (node.op_type in MOVEMENT or dequantises_weights(self._model, node)) or not node.inputs:
            return False
        value = node.inputs[0]
        while value in self._model.producer and value not in self._model.initializers:
            before = self._model.nodes[self._model.producer[value]]
            if before.op_type not in MOVEMENT | QUANTISING:
                return False
            value = before.inputs[0]
        return value in self._model.initializers

    def _is_single(self, node: Node) -> bool:
        """Whether a node computes single values: a scale, not a mask."""
        return all(self._facts.is_single(out) for out in node.outputs if out)

    # -- blocks -------------------------------------------------------------------------------------------------

    def _blocks(self, fusion: _Assignment) -> tuple[LayerGroup, ...]:
        """Merge fusion groups by module, and the rest by repeated structure."""
        fine = self._named(fusion)
        names = {node.name: node for node in self._model.nodes}
        leaders = sorted({lead for lead in fusion.leader if lead >= 0})
        scopes = [
            group_scope(self._model.nodes[lead], [names[name] for name in group.nodes])
            for group, lead in zip(fine, leaders, strict=True)
        ]
        labels: list[tuple[str, ...] | int | None] = [
            None if group.pinned else scope for group, scope in zip(fine, block_scopes(scopes), strict=True)
        ]
        self._keep_shared_out(fusion, leaders, labels)
        alone = [k for k, label in enumerate(labels) if label is None and fine[k].pinned is None]
        for start, length in find_runs([fine[k].pattern for k in alone]):
            for k in alone[start : start + length]:
                labels[k] = alone[start]
        first: dict[tuple[str, ...] | int, int] = {}
        to_block = {}
        for k, label in enumerate(labels):
            to_block[leaders[k]] = leaders[k if label is None else first.setdefault(label, k)]
        sizes = Counter(to_block.values())
        assignment = _Assignment(
            [to_block[lead] if lead >= 0 else -1 for lead in fusion.leader],
            {lead: "block" if size > 1 else fusion.kind.get(lead, "elementwise") for lead, size in sizes.items()},
        )
        last = {label: k for k, label in enumerate(labels) if label is not None}
        titles = {
            leaders[k]: "/".join(label) if isinstance(label, tuple) else f"{fine[k].name}..{fine[last[label]].name}"
            for label, k in first.items()
        }
        return self._named(assignment, titles)

    def _keep_shared_out(
        self, fusion: _Assignment, leaders: Sequence[int], labels: list[tuple[str, ...] | int | None]
    ) -> None:
        """Take nodes that several blocks read (masks, for instance) out of the block that their names put them in."""
        position = {lead: k for k, lead in enumerate(leaders)}
        reads = [False] * len(leaders)
        read_by: list[set[tuple[str, ...] | int | None]] = [set() for _ in leaders]
        for node in self._model.nodes:
            if fusion.leader[node.index] < 0:
                continue
            at = position[fusion.leader[node.index]]
            for producer in self._producers(node):
                lead = fusion.leader[producer]
                if lead >= 0 and position[lead] != at:
                    reads[at] = True
                    read_by[position[lead]].add(labels[at])
        for k in range(len(leaders)):
            if not reads[k] and labels[k] is not None and len(read_by[k] - {labels[k]}) > 0:
                labels[k] = None

    # -- from assignments to groups -----------------------------------------------------------------------------

    def _named(self, assignment: _Assignment, titles: Mapping[int, str] | None = None) -> tuple[LayerGroup, ...]:
        """The groups of an assignment, in topological order of their leaders."""
        model = self._model
        members: dict[int, list[Node]] = {}
        for node in model.nodes:
            if assignment.leader[node.index] >= 0:
                members.setdefault(assignment.leader[node.index], []).append(node)
        ordered = sorted(members.items())
        kinds = [assignment.kind.get(lead, "elementwise") for lead, _ in ordered]
        names = [(titles or {}).get(lead) or group_name(model.nodes[lead], nodes) for lead, nodes in ordered]
        unique = unique_names(names, kinds)
        width = max(3, len(str(len(ordered))))
        return tuple(
            LayerGroup(
                id=f"g{position:0{width}d}",
                name=name,
                kind=kind,
                nodes=tuple(n.name for n in nodes),
                ops=dict(Counter(n.op_type for n in nodes)),
                pinned=self._reason_for_fp32(kind, nodes),
                pattern=structural_hash(model, nodes),
            )
            for position, ((_, nodes), name, kind) in enumerate(zip(ordered, unique, kinds, strict=True))
        )

    def _reason_for_fp32(self, kind: str, nodes: Sequence[Node]) -> str | None:
        if kind == QUANTISED:
            return KEPT_QUANTISED
        moves = MOVEMENT - {"Cast"}
        if nodes[0].op_type == "Cast" and all(n.op_type in moves or casts_integers(self._model, n) for n in nodes):
            return CASTS_INTEGERS
        return FOLDED if all(self._is_static(n) for n in nodes) else None


def _is_led_by(node: int, other: int, leader: Sequence[int]) -> bool:
    """Whether ``node`` leads ``other``, directly or through other leaders: joining ``other`` would make a cycle."""
    while other != node and leader[other] != other:
        other = leader[other]
    return other == node
