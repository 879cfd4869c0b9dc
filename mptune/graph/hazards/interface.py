"""Findings about a model's inputs and outputs: rows that values select, and state that a step hands to the next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mptune.finding import Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import listed
from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo, all_graphs
from mptune.graph.ops import COPIES, MOVEMENT, RECURRENT

_BEFORE = frozenset(("past", "prev", "previous", "old", "last", "init", "initial"))
_AFTER = frozenset(("present", "next", "new", "cur", "current", "updated", "update"))
_DIRECTIONS = _BEFORE | _AFTER | {"in", "out", "input", "output"}
"""Words that tell the state before a step from that after it, and nothing else of it."""
_WHOLE_CACHE = re.compile("key_?values|k_?v_?cache|kv|cache", re.IGNORECASE)
"""``past_key_values.0.key`` is ``present.0.key`` afterwards: what stands for the whole cache tells nothing."""
_STATE_SLOTS: Mapping[str, slice] = {**dict.fromkeys(RECURRENT, slice(5, 7)), "Loop": slice(2, None)}
"""Operator -> the inputs that hold the state before its first step; of a Scan they are those before its sequences."""
_SHOWN = 3


def interface_findings(model: Model, origin: FindingOrigin, fed: Sequence[tuple[str, str]] = ()) -> tuple[Finding, ...]:
    """Outputs whose shape depends on values, and outputs that pair with inputs as state.

    Args:
        fed: output and input of each state that is fed back already.
    """
    facts, findings = facts_of(model), list[Finding]()
    names = [output.name for output in facts.dependent_outputs]
    deciding = {name for output in facts.dependent_outputs for name in output.nodes}
    nodes = [node for node in facts.deciding_nodes if not names or node.name in deciding]
    if nodes:
        where = Where(nodes=tuple(node.name for node in nodes), outputs=tuple(map(OutputColumns, names)))
        about: dict[str, Any] = {
            "kind": "" if names else "inside",
            "names": _listed([repr(name) for name in names]),
            "operators": _listed([f"{node.op_type} {node.name!r}" for node in nodes]),
        }
        counts = {"nodes": len(nodes), "outputs": len(names)}
        findings.append(Finding.of("value-dependent-shape", origin, where, counts, **about))
    done = {name for pair in fed for name in pair}
    pairs = [pair for pair in state_pairs(model) if not done.intersection(pair)]
    if pairs:
        options = ["--feedback " + shlex.quote(f"{output}:{given}") for output, given in pairs]
        outputs, inputs = zip(*pairs, strict=True)
        where = Where(outputs=tuple(map(OutputColumns, outputs)), inputs=inputs)
        evidence: dict[str, int | str] = {"pairs": len(pairs), **{f"to {given}": output for output, given in pairs}}
        about = {
            "shown": _listed([f"{output} -> {given}" for output, given in pairs]),
            "options": " ".join(options[:_SHOWN]) + (" and so on" if len(pairs) > _SHOWN else ""),
        }
        findings.append(Finding.of("state-fed-back", origin, where, evidence, **about))
    return tuple(findings)


def state_pairs(model: Model) -> tuple[tuple[str, str], ...]:
    """Outputs and the inputs that they become in the next step, by name and shape, in the order of the outputs.

    Names agree but for words such as past and present, or but for the step that they end on (``h0`` and ``hn``). Types
    and ranks agree, and sizes but for one axis along which a cache grows.
    """
    if len(model.inputs) < 2 and len(model.outputs) < 2:
        return ()  # an image in and an image out
    pairs: dict[str, str] = {}
    for names_agree in (_same_but_direction, _same_but_step):
        for output in model.outputs:
            if output.name in pairs:
                continue
            left = [given for given in model.inputs if given.name not in pairs.values()]
            fitting = [given for given in left if names_agree(output, given)]
            if len(fitting) == 1:
                pairs[output.name] = fitting[0].name
    return tuple((output.name, pairs[output.name]) for output in model.outputs if output.name in pairs)


def state_inputs(model: Model) -> frozenset[str]:
    """Inputs that hold a state: fed back from an output, or where a recurrent operator or a loop begins."""
    nodes = [node for graph in all_graphs(model.proto.graph) for node in graph.node]
    makers = {name: node for node in nodes for name in node.output}
    waiting, states = [given for _, given in state_pairs(model)], set[str]()
    for node in nodes:
        slots = _STATE_SLOTS.get(node.op_type, slice(0))
        if node.op_type == "Scan":
            slots = slice(len(node.input) - next(a.i for a in node.attribute if a.name == "num_scan_inputs"))
        waiting += node.input[slots]
    while waiting:
        name = waiting.pop()
        if name in makers and makers[name].op_type in MOVEMENT | COPIES:
            waiting += makers[name].input
        states.add(name)
    return frozenset(info.name for info in model.inputs if info.name in states)


def _words(name: str) -> list[str]:
    apart = re.sub("(?<=[a-z])(?=[A-Z])", "_", _WHOLE_CACHE.sub("", name).replace("states", "state"))
    return re.findall(r"[a-z]+|\d+", apart.lower())


def _same_but_direction(output: TensorInfo, given: TensorInfo) -> bool:
    """``past_state`` becomes ``new_state``; along one axis a cache grows."""
    mine, its = _words(output.name), _words(given.name)
    stem, other = ([word for word in words if word not in _DIRECTIONS] for words in (mine, its))
    if output.name == given.name or stem != other or not _same_shape(output, given, growing=1):
        return False
    if not stem:  # nothing but "past" and "present", not "input" and "output"
        return not _AFTER.isdisjoint(mine) and not _BEFORE.isdisjoint(its)
    return len(stem) < max(len(mine), len(its))


def _same_but_step(output: TensorInfo, given: TensorInfo) -> bool:
    """``h0`` becomes ``hn`` or ``h1``, ``h_t`` becomes ``h_t1``, ``state`` becomes ``stateN``: with equal shapes."""
    after = re.fullmatch(r"(.+?)_?(n|N|t1|0|1|t|T)", output.name)
    stem = re.sub(r"_?(0|t)$", "", given.name)
    if after is None or output.name == given.name or after[1] != stem:
        return False
    return (stem != given.name or after[2] in ("n", "N", "t1")) and _same_shape(output, given, growing=0)


def _same_shape(output: TensorInfo, given: TensorInfo, growing: int) -> bool:
    """Whether types agree and all but ``growing`` axes may have the same size; a symbolic size may be any."""
    mine, its = output.shape, given.shape
    if output.dtype != given.dtype or mine is None or its is None or len(mine) != len(its) or not mine:
        return False
    return sum(isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(mine, its, strict=True)) <= growing


def fixed_rows(model: Model) -> tuple[str, int] | None:
    """A Reshape that fixes the rows of a batch, and their number; None where none does.

    Its first number is fixed where the first dimension of what it takes is the dynamic one of an input.
    """
    dynamic = {info.shape[0] for info in model.inputs if info.shape and isinstance(info.shape[0], str)}
    for node in model.nodes:
        if node.op_type != "Reshape" or not node.is_standard or len(node.inputs) < 2:
            continue
        given, wanted = model.info(node.inputs[0]).shape, model.initializers.get(node.inputs[1])
        sizes = [] if wanted is None else [int(size) for size in wanted.numpy().reshape(-1)]
        if given and given[0] in dynamic and sizes and sizes[0] > 0:
            return node.name, sizes[0]
    return None


def _listed(names: Sequence[str]) -> str:
    return listed(names, _SHOWN, " and {others} more")
