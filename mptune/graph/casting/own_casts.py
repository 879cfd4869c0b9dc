"""The model's own Casts between FP32 and FP16: kept, or folded into what a plan computes anyway, never doubled.

Such a Cast computes nothing: its result is another value (its *root*) in another type. So an FP16 node that would read
the result of a Cast to FP32 reads the root instead, and a Cast to FP16 of what the plan has in FP16 goes away.
Under the all-FP32 plan every Cast stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import onnx

from mptune.graph.casting.name_sets import Marked
from mptune.graph.loading.model import Model, Node

_FLOATS = ("float", "float16")


@dataclass(frozen=True)
class OwnCast:
    """A Cast of the model's own among FP32 and FP16.

    Attributes:
        index: of its node.
        source: what it reads.
        result: what it computes.
        widens: from FP16 or FP32 to FP32; otherwise from FP32 to FP16.
    """

    index: int
    source: str
    result: str
    widens: bool


def own_cast(model: Model, node: Node) -> OwnCast | None:
    """The node as an ``OwnCast``, or None where it is none."""
    if node.op_type != "Cast" or not node.is_standard:
        return None
    source, result = node.inputs[0], node.outputs[0]
    from_dtype = model.info(source).dtype
    to = next((a.i for a in node.proto.attribute if a.name == "to"), None)
    if from_dtype not in _FLOATS or to not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
        return None
    if from_dtype == "float16" and to == onnx.TensorProto.FLOAT16:
        return None
    return OwnCast(node.index, source, result, widens=to == onnx.TensorProto.FLOAT)


@dataclass(frozen=True)
class Folds:
    """What a plan makes of the model's own Casts.

    Attributes:
        narrow: FP32 result -> its root; what reads the result in FP16 reads the root in FP16.
        wide: FP32 result -> its root; what reads the result in FP32 reads the FP32 copy of the root.
        either: FP32 result of a Cast that goes away -> its root; what takes any type reads the root as it is computed.
        folded: FP16 result of a Cast that goes away -> its root; what reads the result reads the root in FP16.
        adopted: root that crosses -> the Cast whose result, an output, serves as the root's other form.
        dropped: indices of the Casts that go away.
    """

    narrow: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, str] = field(default_factory=dict)
    either: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)
    adopted: Mapping[str, OwnCast] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()


class Folding:
    """Resolves the model's own Casts under one plan; marks what that makes cross, and which constants it reads."""

    def __init__(
        self,
        named: frozenset[str],
        is_fp16: Callable[[str], bool],
        crossing: Marked,
        constants_fp16: Marked,
        constants_fp32: Marked,
    ) -> None:
        self._named = named
        self._is_fp16 = is_fp16  # computed in FP16, by the model itself or by the plan
        self._crossing = crossing
        self._constants = constants_fp32.names
        self._constants_fp16 = constants_fp16
        self._constants_fp32 = constants_fp32
        self._root: dict[str, str] = {}
        self._planned: dict[str, bool] = {}
        self._narrow: dict[str, str] = {}
        self._wide: dict[str, str] = {}
        self._passed: set[str] = set()  # what a Cast that goes away has read
        self._read_wide: set[str] = set()
        self._read_any: set[str] = set()

    def pass_cast(self, cast: OwnCast, half: Set[str]) -> None:
        """Note a Cast of the model, in topological order."""
        root = self._root.get(cast.source, cast.source)
        if cast.widens and not self._is_fp16(root) and self._is_fp16(cast.source):
            root = cast.source  # FP32 rounded to FP16 and back: only its FP16 form is the same value
        self._root[cast.result] = root
        self._planned[cast.result] = root in half

    def read(self, name: str, in_fp16: bool) -> None:
        """Note that a node reads the FP32 result of a Cast."""
        root = self._root[name]
        if in_fp16:
            self._narrow[name] = root
            if root in self._constants:
                self._constants_fp16.add(root)
            elif not self._is_fp16(root):
                self._crossing.add(root)
        elif self._planned[name] and name not in self._named:
            self._wide[name] = root
            self._crossing.add(root)
        else:
            self._read_wide.add(name)

    def read_any(self, name: str) -> None:
        """Note that a node reads the FP32 result of a Cast in whichever type it comes."""
        self._read_any.add(name)

    def finish(self, casts: tuple[OwnCast, ...]) -> Folds:
        """Decide which Casts stay: from the last to the first, as one that stays needs what it reads."""
        dropped: set[int] = set()
        either: dict[str, str] = {}
        folded: dict[str, str] = {}
        adopted: dict[str, OwnCast] = {}
        for cast in reversed(casts):
            root = self._root[cast.result]
            stays = self._widening_stays(cast) if cast.widens else self._narrowing_stays(cast)
            if not cast.widens and not stays:
                folded[cast.result] = root
            elif not stays:
                either[cast.result] = root
                if root in self._constants and cast.result in self._read_any:
                    self._constants_fp32.add(root)
            elif self._may_adopt(cast) and root not in adopted:
                adopted[root] = cast
                stays = False
            if not stays:
                dropped.add(cast.index)
                self._passed.add(cast.source)
            elif root in self._constants:
                self._constants_fp32.add(root)
            elif not self._planned[cast.result]:
                self._read_wide.add(cast.source)
        return Folds(self._narrow, self._wide, either, folded, adopted, frozenset(dropped))

    def _may_adopt(self, cast: OwnCast) -> bool:
        """Whether the Cast is an output and computes what the plan needs of its root anyway."""
        root = self._root[cast.result]
        if root not in self._crossing or cast.result not in self._named:
            return False
        if cast.widens:
            return self._planned[cast.result] and root not in self._named
        return not self._is_fp16(root)

    def _widening_stays(self, cast: OwnCast) -> bool:
        name = cast.result
        return name in self._named or not (self._planned[name] or self._is_passed(name))

    def _is_passed(self, name: str) -> bool:
        """Whether the plan lets the readers of a Cast's FP32 result read its root, all of them."""
        return name not in self._read_wide and (name in self._narrow or name in self._passed)

    def _narrowing_stays(self, cast: OwnCast) -> bool:
        root = self._root[cast.result]
        if cast.result in self._named:
            return True
        if self._planned[cast.result] or root in self._constants_fp16:
            return False
        if self._is_fp16(root):  # the model's own: folds where nothing else needs the FP32 form between them
            return cast.source in self._named or not self._is_passed(cast.source)
        return root not in self._crossing
