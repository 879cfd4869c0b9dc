"""The model's own Casts among FP32, FP16 and BF16: kept, or folded where a plan makes them redundant, never doubled.

Such a Cast computes nothing: its result is another value (its *root*) in another type. So a node that would read the
result of a Cast to FP32 in a reduced precision reads the root in it instead, and a Cast to the precision that the plan
has the root in goes away. Under the all-FP32 plan every Cast stays.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import ONNX_TYPES
from mptune.graph.op_rules import FLOAT_TYPES
from mptune.graph.plan import Precision

_PRECISIONS = {code: precision for precision, code in ONNX_TYPES.items()}


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
    source_precision = FLOAT_TYPES.get(model.info(source).dtype)
    precision = next((_PRECISIONS.get(a.i) for a in node.proto.attribute if a.name == "to"), None)
    if (
        source_precision is None
        or precision is None
        or (source_precision is precision and precision is not Precision.FP32)
    ):
        return None
    return OwnCast(node.index, source, result, source_precision, precision)


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
        named: frozenset[str],
        constant_names: Container[str],
        own: Mapping[str, Precision],
        read: Container[str],
        computed: Mapping[str, Precision],
        casts: dict[str, set[Precision]],
        constants: dict[str, set[Precision]],
    ) -> None:
        """Start before the first node.

        ``own`` holds the reduced values that the model's own Casts read or make, ``read`` those that other nodes read,
        too. ``casts`` and ``constants`` are added to.
        """
        self._named = named
        self._constant_names = constant_names
        self._own = own
        self._read_by_nodes = read
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
            if root in self._constant_names:
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

    def finish(self, casts: tuple[OwnCast, ...]) -> Folds:
        """Decide which Casts stay, from the last to the first: a Cast that stays needs its input."""
        dropped: set[int] = set()
        either: dict[str, str] = {}
        folded: dict[str, tuple[str, Precision]] = {}
        adopted: dict[tuple[str, Precision], OwnCast] = {}
        renamed: dict[str, str] = {}
        for cast in reversed(casts):
            root = self._root[cast.result]
            stays = self._widening_stays(cast) if cast.widens else self._narrowing_stays(cast)
            if not cast.widens and not stays:
                folded[cast.result] = root, cast.to
            elif not stays:
                either[cast.result] = root
                if root in self._constant_names and cast.result in self._read_any:
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
            if root in self._constant_names:
                self._need_constant(root, Precision.FP32)
            elif root not in self._computed:
                self._read_wide.add(cast.source)
        return Folds(self._narrow, self._wide, either, folded, adopted, renamed, frozenset(dropped))

    def _form(self, value: str) -> Precision:
        """What a value is computed in, by the model itself or by the plan."""
        return self._computed.get(value) or self._own.get(value, Precision.FP32)

    def _need_cast(self, value: str, precision: Precision) -> None:
        self._casts.setdefault(value, set()).add(precision)

    def _need_constant(self, name: str, precision: Precision) -> None:
        self._constants.setdefault(name, set()).add(precision)

    def _is_cast(self, value: str, precision: Precision) -> bool:
        return precision in self._casts.get(value, ())

    def _may_adopt(self, cast: OwnCast) -> bool:
        """Whether the Cast's result is an output of the model and is the form of its root that the plan needs."""
        root = self._root[cast.result]
        if cast.result not in self._named or not self._is_cast(root, cast.to):
            return False
        return not cast.widens or (root in self._computed and root not in self._named)

    def _changes_nothing(self, cast: OwnCast) -> bool:
        """Whether the Cast only gives the name of a reduced output to what the plan computes in its precision."""
        root = self._root[cast.result]
        is_same = not cast.widens and self._computed.get(root) is cast.to
        return is_same and cast.result in self._named and root not in self._named

    def _widening_stays(self, cast: OwnCast) -> bool:
        name = cast.result
        return name in self._named or not (self._root[name] in self._computed or self._is_passed(name))

    def _is_passed(self, name: str) -> bool:
        """Whether all readers of a Cast's FP32 result read its root under the plan."""
        return name not in self._read_wide and name in self._passed

    def _is_read(self, name: str) -> bool:
        """Whether anything but Casts that go away reads a reduced value."""
        return name in self._read_by_nodes or name in self._read_by_casts

    def _narrowing_stays(self, cast: OwnCast) -> bool:
        root = self._root[cast.result]
        if cast.result in self._named:
            return True
        if self._computed.get(root) is cast.to or cast.to in self._constants.get(root, ()):
            return False
        if self._form(root) is cast.to:  # the model's own: folds where nothing else needs the FP32 form between them
            if cast.result in self._passed and not self._is_read(cast.result):
                return False
            return cast.source in self._named or not self._is_passed(cast.source)
        return not self._is_cast(root, cast.to)
