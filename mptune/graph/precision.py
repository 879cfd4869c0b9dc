"""The table of precisions: what each can represent, how it is stored, and what a target needs to have for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from mptune.errors import SettingsError
from mptune.json_form import TextForm


@dataclass(frozen=True, eq=False, repr=False)
class Precision(str, TextForm):
    """The floating-point type that a layer group computes in: a row of the table, and its name as text (``"fp16"``).

    There is one object of each, also in a worker process, so that ``is`` compares them. A precision may be stored as
    another one's ONNX type: TF32 has FP32's range and storage, and FP16's mantissa.

    Attributes:
        value: its name in files and options, such as ``fp16``.
        dtype: name of the ONNX element type that holds its values, such as ``float16``.
        mantissa_bits: stored ones; a significand has one more.
        exponents: least and largest exponent of normal values.
        nbytes: of a stored value.
        throughput: the field of ``Target`` with the peak of its matrix products; None on targets that lack it.
        since: first compute capability whose tensor cores have it.
        largest: finite value (IEEE 754-2008, table 3.5), 65504 of FP16.
        overflows_at: smallest value that rounds to infinity, half a spacing above the largest one (4.3.1).
        smallest_normal: below it, values lose digits.
        smallest: value above zero (subnormal); half of it rounds to zero.
        exact_integers: it holds every whole number up to here, 2048 of FP16: a sum of ones stops there.
    """

    FP32: ClassVar[Precision]
    FP16: ClassVar[Precision]
    BF16: ClassVar[Precision]

    value: str
    dtype: str
    mantissa_bits: int
    exponents: tuple[int, int]
    nbytes: int
    throughput: str
    since: tuple[int, int] = (5, 3)
    largest: float = field(init=False)
    overflows_at: float = field(init=False)
    smallest_normal: float = field(init=False)
    smallest: float = field(init=False)
    exact_integers: float = field(init=False)

    def __new__(cls, value: str, *row: Any) -> Precision:
        """The text is the name."""
        return str.__new__(cls, value)

    def __post_init__(self) -> None:
        """Compute what follows from digits and exponents."""
        (least, most), digits = self.exponents, self.mantissa_bits
        vars(self).update(
            largest=(2 - 2.0**-digits) * 2.0**most,
            overflows_at=(2 - 2.0 ** -(digits + 1)) * 2.0**most,
            smallest_normal=2.0**least,
            smallest=2.0 ** (least - digits),
            exact_integers=2.0 ** (digits + 1),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the whole row: a worker process knows those of mptune only."""
        return add_precision, tuple(getattr(self, row.name) for row in fields(self) if row.init)

    @classmethod
    def named(cls, name: str) -> Precision:
        """The row of a name.

        Raises:
            ValueError: there is none.
        """
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
        """The precision whose ONNX type holds its values: itself, where ONNX has its type."""
        return next(row for row in PRECISIONS if row.dtype == self.dtype)

    @cached_property
    def onnx_type(self) -> int:
        """ONNX's element type that holds its values."""
        import onnx  # Slow to import, and a command that only prints needs none.

        return int(onnx.TensorProto.DataType.Value(self.dtype.upper()))

    @property
    def is_rounded_by_casts(self) -> bool:
        """Whether a Cast to its ONNX type and back rounds as it does; else emulation splits mantissas."""
        return self.stored is self


PRECISIONS: list[Precision] = []
"""The table: FP32 first, then the reduced precisions in the order in which they are preferred."""

REDUCED: list[Precision] = []
"""The rows but FP32: the precisions that a plan may lower a group to."""


def add_precision(*row: Any) -> Precision:
    """Add a row with these fields, or find the one of that name; the precisions of a search prefer earlier rows."""
    added = Precision(*row)
    if added not in PRECISIONS:
        PRECISIONS.append(added)
        REDUCED[:] = PRECISIONS[1:]
    return Precision.named(added)


def remove_precision(precision: Precision) -> None:
    """Take a row out of the table again."""
    PRECISIONS.remove(precision)
    REDUCED.remove(precision)


Precision.FP32 = add_precision("fp32", "float", 23, (-126, 127), 4, "fp32_tflops")
Precision.FP16 = add_precision("fp16", "float16", 10, (-14, 15), 2, "fp16_tflops")
Precision.BF16 = add_precision("bf16", "bfloat16", 7, (-126, 127), 2, "bf16_tflops", (8, 0))


def precision_set(names: Sequence[str]) -> tuple[Precision, ...]:
    """The rows that a search chooses among: FP32 first, then at least one reduced precision, in their order.

    Raises:
        SettingsError: it cannot.
    """
    reduced = [precision for precision in REDUCED if precision in names]
    if not reduced or list(names) != [Precision.FP32, *reduced]:
        cure = f"give fp32, then at least one of {', '.join(REDUCED)}, in this order"
        raise SettingsError(f"is {','.join(names)}", cure, setting="precisions")
    return (Precision.FP32, *reduced)


DEFAULT_PRECISIONS: tuple[Precision, ...] = (Precision.FP32, Precision.FP16)
"""Those that are used where nobody asks for others."""
