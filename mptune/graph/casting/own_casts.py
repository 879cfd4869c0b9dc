"""The model's own Casts between FP32 and FP16: kept, or folded where a plan makes them redundant, never doubled.

Such a Cast computes nothing: its result is another value (its *root*) in another type. So an FP16 node that would read
the result of a Cast to FP32 reads the root instead, and a Cast to FP16 of what the plan has in FP16 goes away.
Under the all-FP32 plan every Cast stays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import onnx

from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import Precision

_FLOATS = ("float", "float16")
_FOLDED = frozenset({Precision.FP32, Precision.FP16})


@dataclass(frozen=True)
class OwnCast:
    """A Cast of the model's own among FP32 and FP16.

    Attributes:
        index: of its node.
        source: what it reads.
        result: what it computes.
        widens: whether it casts to FP32 (from FP16 or FP32); otherwise it casts from FP32 to FP16.
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
    """Which of the model's own Casts a plan removes, and what their readers read instead.

    The root of a Cast is the value that a chain of such Casts starts from.

    Attributes:
        narrow: FP32 result -> its root; what reads the result in FP16 reads the root in FP16.
        wide: FP32 result -> its root; what reads the result in FP32 reads the FP32 copy of the root.
        either: FP32 result of a Cast that goes away -> its root; what takes any type reads the root as it is computed.
        folded: FP16 result of a Cast that goes away -> its root; what reads the result reads the root in FP16.
        adopted: root that crosses -> the Cast whose result, an output, serves as the root's other form.
        renamed: root -> the FP16 output that it is computed as; the Cast between them would change nothing.
        other: (FP32 result, another precision) -> its root; what reads the result in it reads the root in it.
        dropped: indices of the Casts that go away.
    """

    narrow: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, str] = field(default_factory=dict)
    either: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)
    adopted: Mapping[str, OwnCast] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[tuple[str, Precision], str] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()


class Folding:
    """Resolves the model's own Casts under one plan; adds the Casts and constants that this makes necessary.

    What a node reads in another reduced precision it reads from the root, unless that is FP16 in the model itself: then
    from the FP32 form.
    """

    def __init__(
        self,
        named: frozenset[str],
        constant_names: Container[str],
        is_fp16: Callable[[str], bool],
        computed: Mapping[str, Precision],
        casts: dict[str, set[Precision]],
        constants: dict[str, set[Precision]],
    ) -> None:
        """Start before the first node.

        Args:
            named: what keeps its FP32 form and its name under any plan.
            constant_names: the constants of FP32 type.
            is_fp16: whether a value is computed in FP16, by the model itself or by the plan.
            computed: value -> the reduced precision that the plan computes it in.
            casts: value -> the precisions that it is cast to; is added to.
            constants: constant -> the precisions that it is needed in; is added to.
        """
        self._named = named
        self._constant_names = constant_names
        self._is_fp16 = is_fp16
        self._computed = computed
        self._casts = casts
        self._constants = constants
        self._root: dict[str, str] = {}
        self._planned: dict[str, bool] = {}
        self._narrow: dict[str, str] = {}
        self._wide: dict[str, str] = {}
        self._other: dict[tuple[str, Precision], str] = {}
        self._passed: set[str] = set()  # what a Cast that goes away has read
        self._read_wide: set[str] = set()
        self._read_any: set[str] = set()

    def pass_cast(self, cast: OwnCast, is_planned: Callable[[str], bool]) -> None:
        """Note a Cast of the model, in topological order; ``is_planned``: whether the plan computes a value in FP16."""
        root = self._root.get(cast.source, cast.source)
        if cast.widens and not self._is_fp16(root) and self._is_fp16(cast.source):
            root = cast.source  # FP32 rounded to FP16 and back: only its FP16 form is the same value
        self._root[cast.result] = root
        self._planned[cast.result] = is_planned(root)

    def read(self, name: str, precision: Precision) -> None:
        """Note that a node reads the FP32 result of a Cast in ``precision``."""
        root = self._root[name]
        if precision not in _FOLDED:
            self._read_in_other(name, root, precision)
        elif precision is Precision.FP16:
            self._narrow[name] = root
            if root in self._constant_names:
                self._need_constant(root, Precision.FP16)
            elif not self._is_fp16(root):
                self._need_cast(root, Precision.FP16)
        elif self._planned[name] and name not in self._named:
            self._wide[name] = root
            self._need_cast(root, Precision.FP32)
        else:
            self._read_wide.add(name)

    def _read_in_other(self, name: str, root: str, precision: Precision) -> None:
        if self._is_fp16(root) and not self._planned[name]:  # the model's own FP16
            self._need_cast(name, precision)
            self._read_wide.add(name)
            return
        self._other[name, precision] = root
        if root in self._constant_names:
            self._need_constant(root, precision)
        elif self._computed.get(root) is not precision:
            self._need_cast(root, precision)

    def read_any(self, name: str) -> None:
        """Note that a node reads the FP32 result of a Cast in any type."""
        self._read_any.add(name)

    def finish(self, casts: tuple[OwnCast, ...]) -> Folds:
        """Decide which Casts stay, from the last to the first: a Cast that stays needs its input."""
        dropped: set[int] = set()
        either: dict[str, str] = {}
        folded: dict[str, str] = {}
        adopted: dict[str, OwnCast] = {}
        renamed: dict[str, str] = {}
        for cast in reversed(casts):
            root = self._root[cast.result]
            stays = self._widening_stays(cast) if cast.widens else self._narrowing_stays(cast)
            if not cast.widens and not stays:
                folded[cast.result] = root
            elif not stays:
                either[cast.result] = root
                if root in self._constant_names and cast.result in self._read_any:
                    self._need_constant(root, Precision.FP32)
            elif self._may_adopt(cast) and root not in adopted:
                adopted[root] = cast
                stays = False
            elif self._changes_nothing(cast) and root not in renamed:
                renamed[root] = cast.result
                stays = False
            if not stays:
                dropped.add(cast.index)
                self._passed.add(cast.source)
            elif root in self._constant_names:
                self._need_constant(root, Precision.FP32)
            elif not self._planned[cast.result]:
                self._read_wide.add(cast.source)
        return Folds(self._narrow, self._wide, either, folded, adopted, renamed, self._other, frozenset(dropped))

    def _need_cast(self, value: str, precision: Precision) -> None:
        self._casts.setdefault(value, set()).add(precision)

    def _need_constant(self, name: str, precision: Precision) -> None:
        self._constants.setdefault(name, set()).add(precision)

    def _is_cast(self, value: str, precision: Precision) -> bool:
        return precision in self._casts.get(value, ())

    def _may_adopt(self, cast: OwnCast) -> bool:
        """Whether the Cast's result is an output of the model and is the form of its root that the plan needs."""
        root = self._root[cast.result]
        if cast.result not in self._named:
            return False
        if cast.widens:
            return self._planned[cast.result] and root not in self._named and self._is_cast(root, Precision.FP32)
        return not self._is_fp16(root) and self._is_cast(root, Precision.FP16)

    def _changes_nothing(self, cast: OwnCast) -> bool:
        """Whether the Cast only gives the name of an FP16 output to what the plan computes in FP16."""
        root = self._root[cast.result]
        return not cast.widens and cast.result in self._named and self._planned[cast.result] and root not in self._named

    def _widening_stays(self, cast: OwnCast) -> bool:
        name = cast.result
        return name in self._named or not (self._planned[name] or self._is_passed(name))

    def _is_passed(self, name: str) -> bool:
        """Whether all readers of a Cast's FP32 result read its root under the plan."""
        is_read = name in self._narrow or name in self._passed or any((name, p) in self._other for p in Precision)
        return name not in self._read_wide and is_read

    def _narrowing_stays(self, cast: OwnCast) -> bool:
        root = self._root[cast.result]
        if cast.result in self._named:
            return True
        if self._planned[cast.result] or Precision.FP16 in self._constants.get(root, ()):
            return False
        if self._is_fp16(root):  # the model's own: folds where nothing else needs the FP32 form between them
            return cast.source in self._named or not self._is_passed(cast.source)
        return not self._is_cast(root, Precision.FP16)
