"""Precision plans: one precision for every layer group, and their JSON form, plan.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mptune.errors import PlanError
from mptune.files import parse_json
from mptune.graph.precision import DEFAULT_PRECISIONS, PRECISIONS, REDUCED, Precision

__all__ = ["DEFAULT_PRECISIONS", "PLAN_FORMAT", "PRECISIONS", "REDUCED", "Precision", "PrecisionPlan"]

PLAN_FORMAT = 1


@dataclass(frozen=True)
class PrecisionPlan:
    """An immutable assignment of a precision to every layer group of one model.

    Attributes:
        model_sha256: hash of the model that the group ids belong to.
        precision: group id -> precision, for every group (pinned ones too), in the order of the groups.
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
        counts = {precision: len(self.groups_in(precision)) for precision in REDUCED}
        return {precision: count for precision, count in counts.items() if count}

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
