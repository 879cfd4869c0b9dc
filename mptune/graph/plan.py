"""Precision plans: one precision for every layer group, and their JSON form, plan.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mptune.errors import PlanError
from mptune.files import parse_json

PLAN_FORMAT = 1


class Precision(str, Enum):
    """The floating-point type that a layer group computes in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value


REDUCED: tuple[Precision, ...] = tuple(precision for precision in Precision if precision is not Precision.FP32)
"""The precisions that a plan may lower a group to."""

DEFAULT_PRECISIONS: tuple[Precision, ...] = (Precision.FP32, Precision.FP16)
"""Those that are used where nobody asks for others."""

LARGEST: Mapping[Precision, float] = {
    Precision.FP32: (2 - 2**-23) * 2.0**127,
    Precision.FP16: (2 - 2**-10) * 2.0**15,
    Precision.BF16: (2 - 2**-7) * 2.0**127,
}
"""The largest finite value of each precision: 3.4028e38, 65504 and 3.3895e38 (IEEE 754-2008, table 3.5)."""

# A study of a thousand plans names a precision a hundred thousand times: a look-up takes a tenth of the enumeration's.
_BY_NAME: Mapping[str, Precision] = {precision.value: precision for precision in Precision}
_NAMES: Mapping[Precision, str] = {precision: precision.value for precision in Precision}


def _named(name: Any) -> Precision:
    """The precision of a name; ValueError where there is none."""
    precision = _BY_NAME.get(name) if isinstance(name, str) else None
    return Precision(name) if precision is None else precision


@dataclass(frozen=True)
class PrecisionPlan:
    """An immutable assignment of a precision to every layer group of one model.

    Attributes:
        model_sha256: hash of the model that the group ids belong to.
        precision: group id -> precision, for every group (pinned ones too), in the order of the groups.
    """

    model_sha256: str
    precision: Mapping[str, Precision]
    _fingerprint: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        """Freeze the mapping and take the fingerprint once."""
        frozen = {group: _named(p) for group, p in self.precision.items()}
        object.__setattr__(self, "precision", frozen)
        text = self.model_sha256 + "".join([f"\n{g} {_NAMES[p]}" for g, p in sorted(frozen.items())])
        object.__setattr__(self, "_fingerprint", hashlib.sha256(text.encode()).hexdigest()[:12])

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    @classmethod
    def uniform(cls, model_sha256: str, groups: Iterable[str], precision: Precision) -> PrecisionPlan:
        """Give every group the same precision."""
        return cls(model_sha256, dict.fromkeys(groups, precision))

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits that are equal exactly when model and precisions are equal."""
        return self._fingerprint

    def groups_in(self, precision: Precision) -> tuple[str, ...]:
        """The ids of the groups in one precision, in the order of the groups."""
        return tuple(g for g, p in self.precision.items() if p is precision)

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

    def replace(self, changes: Mapping[str, Precision]) -> PrecisionPlan:
        """Return the plan with some groups changed.

        Raises:
            PlanError: a changed group is not in the plan.
        """
        unknown = [group for group in changes if group not in self.precision]
        if unknown:
            raise PlanError(f"the plan has no group {unknown[0]!r}", "chosen/plan.json of a run lists the groups")
        return PrecisionPlan(self.model_sha256, {**self.precision, **changes})

    def to_json(self, nodes: Mapping[str, Precision] | None = None, opset: int | None = None) -> dict[str, Any]:
        """The content of plan.json.

        Args:
            nodes: the realised precision of each node by name.
            opset: that the model was raised to before its groups were found; None where it is as its file has it.
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
        """Read the content of plan.json.

        Args:
            document: parsed JSON, or its text.
            source: what the document is called in error messages.

        Raises:
            PlanError: not a plan, or of a newer format.
        """
        hint = "plans are written by `mptune search` as chosen/plan.json"
        if isinstance(document, str):
            try:
                document = parse_json(document)
            except ValueError as error:
                raise PlanError(f"{source} is not JSON: {error}", hint) from None
        if not isinstance(document, dict) or not isinstance(document.get("precision"), dict):
            raise PlanError(f"{source} has no 'precision' object", hint)
        if document.get("format") != PLAN_FORMAT:
            raise PlanError(f"{source} has format {document.get('format')!r}, this mptune reads {PLAN_FORMAT}", hint)
        try:
            precision = {str(g): _named(p) for g, p in document["precision"].items()}
        except ValueError as error:
            raise PlanError(f"{source}: {error}", f"a precision is one of: {', '.join(Precision)}") from None
        return cls(str(document.get("model_sha256", "")), precision)
