"""The table of precisions, and plans: one precision for every layer group, with their JSON form, plan.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from mptune.errors import PlanError, SettingsError
from mptune.files import parse_json
from mptune.json_form import TextForm

PLAN_FORMAT = 1


@dataclass(frozen=True, eq=False, repr=False)
class Precision(str, TextForm):
    """The floating-point type that a layer group computes in: a row of the table, and its name as text (``"fp16"``).

    There is one object of each, also in a worker process, so that ``is`` compares them. A precision may be stored as
    another one's ONNX type: TF32 has FP32's range and storage, and FP16's mantissa.
    """

    FP32: ClassVar[Precision]
    FP16: ClassVar[Precision]
    BF16: ClassVar[Precision]

    value: str  # its name in files and options, such as ``fp16``
    dtype: str  # name of the ONNX element type that holds its values, such as ``float16``
    mantissa_bits: int  # stored ones; a significand has one more
    exponents: tuple[int, int]  # least and largest exponent of normal values
    nbytes: int  # of a stored value
    throughput: str  # the field of ``Target`` with the peak of its matrix products; None on targets that lack it
    since: tuple[int, int] = (5, 3)  # first compute capability whose tensor cores have it
    largest: float = field(init=False)  # finite value (IEEE 754-2008, table 3.5), 65504 of FP16
    smallest_normal: float = field(init=False)  # below it, values lose digits
    smallest: float = field(init=False)  # value above zero (subnormal); half of it rounds to zero
    exact_integers: float = field(init=False)  # every whole number up to here, 2048 of FP16: a sum of ones stops there

    def __new__(cls, value: str, *row: Any) -> Precision:
        """The text is the name."""
        return str.__new__(cls, value)

    def __post_init__(self) -> None:
        """Compute what follows from digits and exponents."""
        (least, most), digits = self.exponents, self.mantissa_bits
        vars(self).update(
            largest=(2 - 2.0**-digits) * 2.0**most,
            smallest_normal=2.0**least,
            smallest=2.0 ** (least - digits),
            exact_integers=2.0 ** (digits + 1),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the whole row: a worker process knows those of mptune only."""
        return add_precision, tuple(getattr(self, row.name) for row in fields(self) if row.init)

    @classmethod
    def named(cls, name: str) -> Precision:
        """The row of a name; ``ValueError`` where there is none."""
        for precision in PRECISIONS:
            if precision == name:
                return precision
        raise ValueError(f"{name!r} is not a valid Precision")

    from_json = named

    @property
    def name(self) -> str:
        """Its name in texts, such as ``FP16``."""
        return self.upper()

    @property
    def stored(self) -> Precision:
        """The precision of its ONNX type: itself where Casts to it round alike, else emulation splits mantissas."""
        return next(row for row in PRECISIONS if row.dtype == self.dtype)

    @cached_property
    def onnx_type(self) -> int:
        """ONNX's element type that holds its values."""
        import onnx  # Slow to import, and a command that only prints needs none.

        return int(onnx.TensorProto.DataType.Value(self.dtype.upper()))


PRECISIONS: list[Precision] = []
"""The table: FP32 first, then the reduced precisions in the order in which they are preferred."""

REDUCED: list[Precision] = []  # the rows but FP32: the precisions that a plan may lower a group to


def add_precision(*row: Any) -> Precision:
    """Add a row with these fields, or find the one of that name; the precisions of a search prefer earlier rows."""
    added = Precision(*row)
    if added not in PRECISIONS:
        PRECISIONS.append(added)
        REDUCED[:] = PRECISIONS[1:]
    return Precision.named(added)


Precision.FP32 = add_precision("fp32", "float", 23, (-126, 127), 4, "fp32_tflops")
Precision.FP16 = add_precision("fp16", "float16", 10, (-14, 15), 2, "fp16_tflops")
Precision.BF16 = add_precision("bf16", "bfloat16", 7, (-126, 127), 2, "bf16_tflops", (8, 0))


def precision_set(names: Sequence[str]) -> tuple[Precision, ...]:
    """The rows of these names; ``SettingsError`` where they are not FP32 and then reduced ones in the table's order."""
    reduced = [precision for precision in REDUCED if precision in names]
    if not reduced or list(names) != [Precision.FP32, *reduced]:
        cure = f"give fp32, then at least one of {', '.join(REDUCED)}, in this order"
        raise SettingsError(f"is {','.join(names)}", cure, setting="precisions")
    return (Precision.FP32, *reduced)


DEFAULT_PRECISIONS: tuple[Precision, ...] = (Precision.FP32, Precision.FP16)
"""Those that are used where nobody asks for others."""


@dataclass(frozen=True)
class PrecisionPlan:
    """An immutable assignment of a precision to every layer group of one model.

    ``precision``: group id -> precision, for every group (pinned ones too), in the order of the groups.
    ``model_sha256``: hash of the model that the ids belong to.
    """

    model_sha256: str
    precision: Mapping[str, Precision]

    def __post_init__(self) -> None:
        """Copy the mapping, with rows of the table in place of their names."""
        rows = {p: Precision.named(p) for p in {*self.precision.values()}}
        object.__setattr__(self, "precision", {group: rows[p] for group, p in self.precision.items()})

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @classmethod
    def uniform(cls, model_sha256: str, groups: Iterable[str], precision: Precision) -> PrecisionPlan:
        """Give every group the same precision."""
        return cls(model_sha256, dict.fromkeys(groups, precision))

    @cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits that are equal exactly when model and precisions are equal."""
        text = self.model_sha256 + "".join([f"\n{g} {p}" for g, p in sorted(self.precision.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def groups_in(self, precision: Precision) -> tuple[str, ...]:
        """The ids of the groups in one precision, in the order of the groups."""
        return tuple(g for g, p in self.precision.items() if p is precision)

    @property
    def reduced_counts(self) -> dict[Precision, int]:
        """How many groups have each reduced precision, of those that some have, the preferred one first."""
        return {precision: len(groups) for precision in REDUCED if (groups := self.groups_in(precision))}

    @property
    def fp16_groups(self) -> tuple[str, ...]:
        """The ids of the groups in FP16, in the order of the groups."""
        return self.groups_in(Precision.FP16)

    @property
    def bf16_groups(self) -> tuple[str, ...]:
        """The ids of the groups in BF16, in the order of the groups."""
        return self.groups_in(Precision.BF16)

    @property
    def reduced_groups(self) -> tuple[str, ...]:
        """The ids of the groups in less than FP32, in the order of the groups."""
        return tuple(g for g, p in self.precision.items() if p is not Precision.FP32)

    @property
    def fp32_groups(self) -> tuple[str, ...]:
        """The ids of the groups in FP32, in the order of the groups."""
        return self.groups_in(Precision.FP32)

    @property
    def stored(self) -> PrecisionPlan:
        """The plan as an ONNX model holds it: each group in the precision whose ONNX type stores its values."""
        others = {p for p in {*self.precision.values()} if p.stored is not p}
        return self.replace({g: p.stored for g, p in self.precision.items() if p in others}) if others else self

    def replace(self, changes: Mapping[str, Precision]) -> PrecisionPlan:
        """The plan with some groups changed; ``PlanError`` where it lacks one of them."""
        unknown = [group for group in changes if group not in self.precision]
        if unknown:
            raise PlanError(f"the plan has no group {unknown[0]!r}", "chosen/plan.json of a run lists the groups")
        return PrecisionPlan(self.model_sha256, {**self.precision, **changes})

    def to_json(self, nodes: Mapping[str, Precision] | None = None, opset: int | None = None) -> dict[str, Any]:
        """The content of plan.json.

        With the realised precision of each node by name, and the opset that the model was raised to, if it was.
        """
        return {
            "format": PLAN_FORMAT,
            "model_sha256": self.model_sha256,
            **({} if opset is None else {"opset": opset}),
            "precision": {group: str(p) for group, p in self.precision.items()},
            "nodes": {name: str(p) for name, p in (nodes or {}).items()},
        }

    @classmethod
    def from_json(cls, document: Any, source: str = "plan.json") -> PrecisionPlan:
        """Read the content of plan.json, parsed or as text, which error messages call ``source``.

        Raises:
            PlanError: not a plan, or of a newer format.
        """
        hint = "plans are written by `mptune search` as chosen/plan.json"
        try:
            document = parse_json(document) if isinstance(document, str) else document
        except ValueError as error:
            raise PlanError(f"{source} is not JSON: {error}", hint) from None
        if not isinstance(document, dict) or not isinstance(document.get("precision"), dict):
            raise PlanError(f"{source} has no 'precision' object", hint)
        if document.get("format") != PLAN_FORMAT:
            raise PlanError(f"{source} has format {document.get('format')!r}, this mptune reads {PLAN_FORMAT}", hint)
        try:
            precision = {str(g): Precision.named(p) for g, p in document["precision"].items()}
        except ValueError as error:
            raise PlanError(f"{source}: {error}", f"a precision is one of: {', '.join(PRECISIONS)}") from None
        return cls(str(document.get("model_sha256", "")), precision)
