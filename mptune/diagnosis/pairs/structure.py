"""Two models side by side: which node is which, which constants differ, and the candidate's precisions as a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper

from mptune.diagnosis.comparison import finding
from mptune.diagnosis.limits import HEADROOM
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING
from mptune.diagnosis.runner import Outputs
from mptune.diagnosis.sides import Side, Sides
from mptune.errors import BaselineError
from mptune.finding import Finding, OutputColumns, Where
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import from_stored
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.weights import round_values

_FEWEST = 8
"""Of fewer values that are zero, nothing is said."""


@dataclass(frozen=True, eq=False)
class ConstantDifference:
    """Two constants that differ.

    Attributes:
        values: the left constant with the right one's values where the two differ; None where shapes or types do.
        change: root mean square difference by that of the larger constant; infinite where it is not known.
    """

    text: str
    values: np.ndarray | None = None
    change: float = math.inf


def constant_difference(a: np.ndarray, b: np.ndarray) -> ConstantDifference | None:
    """What differs between two constants; None where one is the other, or the other rounded to FP16 or BF16.

    What is beyond these may have become the largest finite value (``round_values``).
    """
    a, b = (each.astype(np.float32) if each.dtype.name == "bfloat16" else each for each in (a, b))  # of ml_dtypes
    if a.shape != b.shape:
        return ConstantDifference(f"shape {list(a.shape)} in one model and {list(b.shape)} in the other")
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return None if np.array_equal(a, b) else ConstantDifference("other values")
    differs = _differing(a, b)
    count = int(differs.sum())
    if not count:
        return None
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y)[differs]
        share = float(np.linalg.norm(apart) / max(np.linalg.norm(x), np.linalg.norm(y)))
    largest = float(apart[np.isfinite(apart)].max(initial=0.0))
    text = f"{count} of {a.size} values differ, by up to {largest:.3g}"
    if lost := int((~np.isfinite(y) & np.isfinite(x)).sum()):
        text += f", and {lost} are NaN or Inf in the candidate"
        if lost == count:
            text = f"{count} of {a.size} values are NaN or Inf in the candidate"
    elif not y[differs].any() and count >= _FEWEST:
        text += ": these are zero in the candidate"
    change = share if math.isfinite(share) else math.inf
    return ConstantDifference(text, np.where(differs, b, a).astype(a.dtype), change)


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which values differ, shape of both, by the one rounding that explains most of them."""
    same = [_equal(a, b)]
    with np.errstate(over="ignore", invalid="ignore"):
        for values, others in ((a, b), (b, a)):
            if values.dtype.kind == "f":
                same += [_equal(each, others) for each in _held(values)]
    differs: np.ndarray = ~max(same, key=np.count_nonzero)
    return differs


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Value by value; NaN is NaN."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    result: np.ndarray = (x == y) | (np.isnan(x) & np.isnan(y))
    return result


def _held(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Values as each reduced precision holds them."""
    wide = values.astype(np.float32)
    return round_values(wide, Precision.FP16), from_stored(round_values(wide, Precision.BF16))


_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})

_FLOAT_CODES = frozenset(onnx.TensorProto.DataType.Value(name.upper()) for name in _FLOATS)

_SHOWN = 60
"""Characters of a value in a text."""

_REDUCED = {precision.dtype: precision for precision in REDUCED if precision.is_rounded_by_casts}
"""Types of values -> the precisions that compute them."""


@dataclass(frozen=True)
class Difference:
    """One attribute, constant or input of a node that is not the same in both models.

    Attributes:
        kind: ``attribute``, ``constant`` or ``structure``.
        what: the attribute, the constant's slot, or what of the structure.
        root: the constant that ``what`` is, before Casts; "" where it is none.
        attributes: the attribute -> its value on the right; None where it is not there.
    """

    kind: str
    node: str
    text: str
    what: str
    left: str
    right: str
    root: str = ""
    constant: ConstantDifference | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def change(self) -> float:
        """Relative change, at most 2; infinite where it is not known."""
        return math.inf if self.constant is None else self.constant.change


@dataclass(frozen=True)
class Alignment:
    """Two models side by side."""

    values: Mapping[str, str]
    """Value of the left model -> the same of the right one; computed values only."""
    differences: tuple[Difference, ...]
    """In the topological order of the left model."""
    reduced: Mapping[str, Precision]
    """Name of each node of the left model that computes in FP16 or BF16 on the right -> which."""


def align(left: Model, right: Model) -> Alignment:
    """Align two models; inputs by name, else by position."""
    ours, theirs = [i.name for i in left.inputs], [i.name for i in right.inputs]
    inputs = {name: name for name in theirs} if set(theirs) <= set(ours) else dict(zip(ours, theirs, strict=True))
    return _Aligner(left, right, inputs).run()


class _Aligner:
    def __init__(self, left: Model, right: Model, inputs: Mapping[str, str]) -> None:
        self.left, self.right = left, right
        sparse, theirs = (
            {tensor.values.name: tensor for tensor in m.proto.graph.sparse_initializer} for m in (left, right)
        )
        # roots on the left -> roots on the right
        self.same = dict(inputs) | {name: name for name, tensor in sparse.items() if theirs.get(name) == tensor}
        self.used: set[int] = set()
        self.by_name = {node.name: node for node in right.nodes}

    def run(self) -> Alignment:
        values: dict[str, str] = {}
        differences: list[Difference] = []
        reduced: dict[str, Precision] = {}
        for node in self.left.nodes:
            if _is_float_cast(self.left, node) or (node.op_type == "Constant" and node.is_standard):
                continue
            partner = self._partner(node)
            if partner is None:
                differences.append(self._missing(node))
                continue
            self.used.add(partner.index)
            differences += self._differences(node, partner)
            for ours, theirs in zip(node.outputs, partner.outputs, strict=False):
                if ours and theirs:
                    self.same[_root(self.left, ours)] = _root(self.right, theirs)
                    values[ours] = self._value(ours, theirs)
            for dtype in (self.right.info(out).dtype for out in partner.outputs if out):
                if dtype in _REDUCED:
                    reduced[node.name] = _REDUCED[dtype]
        for node in self.left.nodes:
            if _is_float_cast(self.left, node) and node.outputs[0] in self.right.tensors:
                values.setdefault(node.outputs[0], node.outputs[0])
        return Alignment(values, tuple(differences), reduced)

    def _value(self, ours: str, theirs: str) -> str:
        """The right value under the left one's name where that is the same but for Casts: what the readers get."""
        is_there = ours in self.right.producer and _root(self.right, ours) == _root(self.right, theirs)
        return ours if is_there else theirs

    def _partner(self, node: Node) -> Node | None:
        candidates: dict[int, Node] = {}
        named = self.by_name.get(node.name)
        if named is not None:
            candidates[named.index] = named
        for out in node.outputs:
            if out in self.right.producer and (root := _root(self.right, out)) in self.right.producer:
                maker = self.right.nodes[self.right.producer[root]]
                candidates[maker.index] = maker
        for reader in self._readers(node):
            candidates[reader.index] = reader
        fitting = [c for c in candidates.values() if c.index not in self.used and c.op_type == node.op_type]
        return max(fitting, key=lambda other: (self._likeness(node, other), -other.index), default=None)

    def _readers(self, node: Node) -> list[Node]:
        """Nodes of the right model that read what the left node reads."""
        readers: dict[int, Node] = {}
        for name in node.inputs:
            root = self.same.get(_root(self.left, name))
            if root is None:
                continue
            for value in self._aliases.get(root, (root,)):
                for index in self.right.consumers.get(value, ()):
                    readers[index] = self.right.nodes[index]
        return list(readers.values())

    @cached_property
    def _aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Root on the right -> all values that are the same but for Casts."""
        aliases: dict[str, list[str]] = {}
        for name in [*(i.name for i in self.right.inputs), *self.right.producer]:
            aliases.setdefault(_root(self.right, name), []).append(name)
        return {root: tuple(names) for root, names in aliases.items()}

    def _likeness(self, node: Node, other: Node) -> tuple[int, int, int, int]:
        wired = sum(self._is_same_input(a, b) for a, b in zip(node.inputs, other.inputs, strict=False))
        differs = next(self._differences(node, other), None)
        named = int(node.name == other.name) + int(bool(set(node.outputs) & set(other.outputs) - {""}))
        return int(differs is None), named, wired, int(len(node.inputs) == len(other.inputs))

    def _is_same_input(self, ours: str, theirs: str) -> bool:
        if not ours or not theirs:
            return ours == theirs
        a, b = _root(self.left, ours), _root(self.right, theirs)
        if a in self.left.initializers or b in self.right.initializers:
            return a in self.left.initializers and b in self.right.initializers
        return self.same.get(a) == b

    def _differences(self, node: Node, other: Node) -> Iterator[Difference]:
        ours, theirs = _attributes(self.left, node), _attributes(self.right, other)
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if name == "to" and {a, b} <= _FLOAT_CODES:
                continue
            if not _is_equal(a, b):
                text = f"attribute {name!r} is {_shown(a)} in one model and {_shown(b)} in the other"
                yield Difference("attribute", node.name, text, name, _shown(a), _shown(b), attributes={name: b})
        count = max(len(node.inputs), len(other.inputs))
        for slot in range(count):
            difference = self._input_difference(node, other, slot)
            if difference is not None:
                yield difference

    def _input_difference(self, node: Node, other: Node, slot: int) -> Difference | None:
        ours = node.inputs[slot] if slot < len(node.inputs) else ""
        theirs = other.inputs[slot] if slot < len(other.inputs) else ""
        if not self._is_same_input(ours, theirs):
            a, b = self._described(self.left, ours), self._described(self.right, theirs)
            text = f"input {slot} is {a} in one model and {b} in the other"
            return Difference("structure", node.name, text, f"input {slot}", a, b)
        a, b = _root(self.left, ours) if ours else "", _root(self.right, theirs) if theirs else ""
        if a in self.left.initializers and b in self.right.initializers:
            our_values, their_values = self.left.initializers[a].numpy(), self.right.initializers[b].numpy()
            difference = constant_difference(np.asarray(our_values), np.asarray(their_values))
            if difference is not None:
                text = f"constant {ours!r} (input {slot}): {difference.text}"
                return Difference(
                    "constant", node.name, text, ours, _shown(our_values), _shown(their_values), a, difference
                )
        return None

    def _missing(self, node: Node) -> Difference:
        named = self.by_name.get(node.name)
        if named is not None and named.index not in self.used:
            self.used.add(named.index)
            for ours, theirs in zip(node.outputs, named.outputs, strict=False):
                self.same[_root(self.left, ours)] = _root(self.right, theirs)
            text = f"the operator is {node.op_type} in one model and {named.op_type} in the other"
            return Difference("structure", node.name, text, "operator", node.op_type, named.op_type)
        text = f"{node.op_type} has no counterpart in the other model"
        return Difference("structure", node.name, text, "operator", node.op_type, "none")

    def _described(self, model: Model, value: str) -> str:
        root = _root(model, value) if value else ""
        if root in model.producer and root not in model.initializers:
            return f"{root!r} ({model.nodes[model.producer[root]].op_type})"
        return repr(root) if root else "none"


def _is_float_cast(model: Model, node: Node) -> bool:
    """Whether a node only gives a value another floating-point type, or name."""
    if not node.is_standard or not node.inputs:
        return False
    if node.op_type == "Identity" or _subtracts_nothing(model, node) or _limits_to_range(model, node):
        return True
    kinds = {model.info(node.inputs[0]).dtype, model.info(node.outputs[0]).dtype}
    return node.op_type == "Cast" and kinds <= _FLOATS


def _subtracts_nothing(model: Model, node: Node) -> bool:
    """Whether a node is ``x - 0``, as a mixed model has before some recurrent layers."""
    zero = model.initializers.get(node.inputs[1]) if node.op_type == "Sub" else None
    return zero is not None and not any(zero.shape) and not np.any(zero.numpy())


def _limits_to_range(model: Model, node: Node) -> bool:
    """Whether a node limits a value to FP16's or BF16's range before it is cast, as a mixed model has at masks."""
    readers = [model.nodes[index] for index in model.consumers.get(node.outputs[0], ())]
    if node.op_type != "Clip" or not readers or any(reader.op_type != "Cast" for reader in readers):
        return False
    limits = [model.initializers[name].numpy() for name in node.inputs[1:] if name in model.initializers]
    limits += [np.float32(attribute.f) for attribute in node.proto.attribute]
    largest = {float(np.float32(precision.largest)) for precision in REDUCED}
    return len(limits) == 2 and {float(abs(limit)) for limit in limits if limit.size == 1} <= largest


def _root(model: Model, value: str) -> str:
    """The value before all Casts between floating-point types."""
    while value in model.producer and value not in model.initializers:
        node = model.nodes[model.producer[value]]
        if not _is_float_cast(model, node):
            return _first_casts(model).get(value, value)
        value = node.inputs[0]
    return value


@once
def _first_casts(model: Model) -> Mapping[str, str]:
    """Integers cast to a floating-point type -> the result of the first such Cast of the same integers.

    A mixed model casts them once for each type that it needs.
    """
    first: dict[str, str] = {}
    casts: dict[str, str] = {}
    for node in model.nodes:
        if node.op_type == "Cast" and node.is_standard and model.info(node.outputs[0]).dtype in _FLOATS:
            casts[node.outputs[0]] = first.setdefault(node.inputs[0], node.outputs[0])
    return casts


def _attributes(model: Model, node: Node) -> dict[str, Any]:
    """Attributes with the defaults of the operator filled in."""
    attributes: dict[str, Any] = {}
    if node.is_standard and onnx.defs.has(node.op_type, model.opset):
        schema = onnx.defs.get_schema(node.op_type, model.opset)
        for name, info in schema.attributes.items():
            if info.default_value.type:
                attributes[name] = onnx.helper.get_attribute_value(info.default_value)
    if node.op_type == "ConstantOfShape" and node.is_standard:  # the only default that is a tensor
        attributes["value"] = onnx.numpy_helper.from_array(np.zeros(1, np.float32))
    for attribute in node.proto.attribute:
        attributes[attribute.name] = onnx.helper.get_attribute_value(attribute)
    return attributes


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, onnx.TensorProto) and isinstance(b, onnx.TensorProto):
        return constant_difference(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b)) is None
    if a is None or b is None:
        return a is b
    if hasattr(a, "SerializeToString") and hasattr(b, "SerializeToString"):
        return bool(a.SerializeToString(deterministic=True) == b.SerializeToString(deterministic=True))
    if isinstance(a, float) and any(precision.largest in (abs(a), abs(b)) for precision in REDUCED):
        return constant_difference(np.float32(a), np.float32(b)) is None  # a limit holds what is beyond it
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"{value.dtype} of shape {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.7g}"  # what FP32 holds: an attribute of 1e-5 is 9.999999747378752e-06 as a Python number
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.split())[:_SHOWN]


_NO_EFFECT = 1e-6
"""An error up to this shows no effect of a difference: it is what another order of FP32 additions makes."""

_LEAST_SHARE = 0.1
"""Of the whole difference, that a cause makes alone."""

_NOT_FINITE = 1.0
"""What stands for the whole where it is not finite: the standard deviation of the output."""

_MOST_TRIALS = 64
"""Runs of the model with constants and attributes of the candidate."""

_MOST_NAMED = 4

_MOST_BYTES = 1 << 30
"""Of constants that are changed together: protobuf ends at 2 GiB."""


def with_candidate_plan(sides: Sides, alignment: Alignment) -> Sides:
    """The sides with the groups that the candidate computes in FP16 or BF16, where there are some."""
    owners = sides.runner.grouped.owners
    groups = {owners[node]: precision for node, precision in alignment.reduced.items() if node in owners}
    return replace(sides, plan=sides.runner.grouped.uniform(Precision.FP32).replace(groups))


def structure_finding(sides: Sides, alignment: Alignment) -> tuple[Finding | None, tuple[Difference, ...]]:
    """The nodes whose differences change an output, the largest effect first; None where none does.

    Constants and attributes are tried in the model in FP32: what they do is not seen from the outputs of a candidate in
    FP16, which differ anyway. Another structure is not tried; it makes what those and rounding leave.
    Second, the constants and attributes that were seen to make less than a tenth of the difference.
    """
    parts = [
        part
        for name in sides.layouts
        for part in sides.parts(name, sides.candidate, sides.reference)
        if part.error > _NO_EFFECT
    ]
    if not parts or not alignment.differences:
        return None, ()
    worst = max(parts, key=lambda part: part.judged / part.limit.value)
    trials = _Trials(sides, [part for part in parts if not part.is_within] or parts, alignment.differences)
    causes, together = trials.causes(), trials.together
    if causes:
        return _named(causes, parts, worst), tuple(trials.harmless)
    if together is None or (together.share < _LEAST_SHARE and worst.is_within):
        return None, tuple(trials.harmless)
    return _none_alone(len(trials.tried), together, worst), tuple(trials.harmless)


def changes_of(differences: Sequence[Difference]) -> tuple[dict[str, np.ndarray], list[tuple[str, str, Any]]]:
    """Constants and attributes of the model with the candidate's values (``mptune.graph.writing.write_changed``)."""
    constants = {each.root: each.constant.values for each in differences if each.constant is not None}
    attributes = [(each.node, name, setting) for each in differences for name, setting in each.attributes.items()]
    return {name: values for name, values in constants.items() if values is not None}, attributes


def _named(causes: Sequence[tuple[Difference, _Effect | None]], parts: Sequence[Side], worst: Side) -> Finding:
    first, effect = causes[0]
    owners = worst.sides.runner.grouped.owners
    nodes = tuple(dict.fromkeys(difference.node for difference, _ in causes))
    return finding(
        "attribute-differs",
        "",
        tuple(OutputColumns(name) for name in dict.fromkeys(part.name for part in parts)),
        {
            "kind": first.kind,
            "what": first.what,
            "reference": first.left,
            "candidate": first.right,
            "differences": len(causes),
            **({} if effect is None else {"alone": effect.error}),
            **worst.evidence,
        },
        Where(nodes, tuple(dict.fromkeys(owners[node] for node in nodes if node in owners))),
        node=first.node,
        difference=first.text,
        next=", ".join(
            f"{difference.node} ({difference.what if e is None else f'{e.error:.3g}'})" for difference, e in causes[1:]
        ),
        place=str(worst.where),
        error_shown=worst.limit.sentence(worst.judged),
        judged_fp16=worst.judged_fp16,
    )


def _none_alone(count: int, together: _Effect, worst: Side) -> Finding:
    """Of constants and attributes of which none alone makes a tenth of the difference."""
    return finding(
        "attribute-differs",
        "together little" if together.share < _LEAST_SHARE else "together",
        (worst.where,),
        {"differences": count, "together": together.error, **worst.evidence},
        place=str(worst.where),
        error_shown=worst.limit.sentence(worst.judged),
    )


@dataclass(frozen=True)
class _Effect:
    """What differences make of the outputs of the model in FP32: the largest error of a part."""

    error: float
    share: float
    """Of the whole difference there; 0 where it is no more than what rounding makes."""


class _Trials:
    """Gives the model in FP32 the candidate's constants and attributes, all together and then one by one."""

    def __init__(self, sides: Sides, parts: Sequence[Side], differences: Sequence[Difference]) -> None:
        self._sides, self._parts = sides, parts
        self.harmless: list[Difference] = []
        ways: dict[str | tuple[str, str], Difference] = {}
        self._untried: list[Difference] = []
        for difference in sorted(differences, key=lambda each: -each.change):
            if any(changes_of([difference])):
                ways.setdefault(difference.root or (difference.node, difference.what), difference)
            else:
                self._untried.append(difference)
        self.tried = list(ways.values())
        self.together = self._effect(self.tried) if self.tried else None

    def causes(self) -> list[tuple[Difference, _Effect | None]]:
        """What makes a tenth of the difference, or more, alone, the largest first; no effect where it was not tried."""
        alone = self._alone()
        causes: list[tuple[Difference, _Effect | None]] = list(alone)
        if self._untried and (left := self._left([difference for difference, _ in alone])) >= _LEAST_SHARE:
            causes.insert(0 if not alone or left > alone[0][1].share else len(alone), (self._untried[0], None))
        return causes

    def _alone(self) -> list[tuple[Difference, _Effect]]:
        """Those that make enough alone, of the constants that change most and the attributes."""
        if self.together is not None and self.together.share < _LEAST_SHARE:
            self.harmless += self.tried
            return []
        causes: list[tuple[Difference, _Effect]] = []
        for difference in self.tried[:_MOST_TRIALS]:
            effect = self.together if len(self.tried) == 1 else self._effect([difference])
            if effect is None:
                self._untried.append(difference)
            elif effect.share < _LEAST_SHARE:
                self.harmless.append(difference)
            else:
                causes.append((difference, effect))
        return sorted(causes, key=lambda each: -each[1].share)[:_MOST_NAMED]

    def _effect(self, differences: Sequence[Difference]) -> _Effect | None:
        outputs, exact = self._outputs(differences), self._sides.runner.exact
        if outputs is None:
            return None
        errors = self._errors(outputs, exact)
        shares = [0.0]
        for part, error, rounding in zip(self._parts, errors, self._roundings, strict=True):
            # Constants that are rescaled to fit FP16 are other numbers for the same function, and round otherwise.
            least = max(_NO_EFFECT, rounding) if math.isfinite(rounding) else _NO_EFFECT
            shares += [error / _whole(part)] if error > least else []
        return _Effect(max(errors), max(shares))

    @cached_property
    def _roundings(self) -> list[float]:
        """Twice the error that the candidate's precisions make in each part, emulated."""
        runner, plan = self._sides.runner, self._sides.plan
        rounded = runner.emulated(plan) if plan.reduced_groups else runner.exact
        return [HEADROOM * error for error in self._errors(rounded, runner.exact)]

    def _errors(self, got: Outputs, wanted: Outputs) -> list[float]:
        return [self._sides.error(part.name, part.limit.columns, got, wanted) for part in self._parts]

    def _left(self, differences: Sequence[Difference]) -> float:
        """Share of the candidate's difference that these leave; 0 where rounding makes as much."""
        errors = self._errors(self._sides.candidate, self._outputs(differences) or self._sides.runner.exact)
        shares = [0.0]
        for part, left, rounding in zip(self._parts, errors, self._roundings, strict=True):
            if left > max(rounding, FP32_ROUNDING):
                shares.append(left / _whole(part))
        return max(shares)

    def _outputs(self, differences: Sequence[Difference]) -> Outputs | None:
        """The model's with these as in the candidate; None where it does not run."""
        constants, attributes = changes_of(differences)
        if sum(each.nbytes for each in constants.values()) > _MOST_BYTES:
            return None
        try:
            return self._sides.runner.changed(constants, attributes)
        except (BaselineError, KeyError):
            return None


def _whole(part: Side) -> float:
    """The whole difference of a part, in which effects are measured."""
    return part.error if math.isfinite(part.error) else _NOT_FINITE
