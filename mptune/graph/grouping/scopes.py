"""Scopes: which module of the user's network a node came from, as the exporter recorded it.

torch's TorchScript exporter puts the scope into the node's name (``/blocks/blocks.0/attn/MatMul``), its newer one into
the metadata. Names are for people to read; which nodes form a group is decided by structure alone, except for blocks.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence

from mptune.graph.loading.model import Node

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
    common = _common_depth([scope for scope in scopes if scope])
    numbered = {prefix for prefix, count in counts.items() if count > 1 and _NUMBERED.search(prefix[-1])}
    around = {prefix[:depth] for prefix in numbered for depth in range(1, len(prefix))}

    def choose(scope: Scope) -> Scope | None:
        prefixes = [scope[:depth] for depth in range(len(scope), common, -1)]
        inner = next((p for p in prefixes if p in numbered), None)
        if inner is not None:
            return inner
        return next((p for p in prefixes if 1 < counts[p] <= _MAX_UNNUMBERED and p not in around), None)

    return [choose(scope) for scope in scopes]


def _common_depth(scopes: Sequence[Scope]) -> int:
    """How many of the outermost modules all groups share."""
    if not scopes:
        return 0
    first, last = min(scopes), max(scopes)
    depth = 0
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return depth
