"""What ``mptune inspect`` found in a model, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mptune.finding import Finding, by_severity
from mptune.graph.groups import LayerGroup
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.loading.model import Model
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import Granularity
from mptune.targets.costs import GroupCost, MemoryNeed
from mptune.tuning.space import Pin


@dataclass(frozen=True)
class InspectedGroup:
    """One layer group.

    Attributes:
        pin: its precision and the reason, where it is not searched.
        repeats: how many groups of the model have its structure, itself included.
        no_bf16: why it cannot be BF16; None where it could be.
        only_bf16: it is pinned to FP32 because FP16 cannot be right, and BF16 could be.
    """

    group: LayerGroup
    cost: GroupCost
    pin: Pin | None
    repeats: int
    no_bf16: str | None = None
    only_bf16: bool = False

    def to_json(self) -> dict[str, Any]:
        """The group in ``mptune inspect --json``."""
        group, pin = self.group, self.pin
        return {
            "id": group.id,
            "name": group.name,
            "kind": group.kind,
            "ops": dict(group.ops),
            "nodes": list(group.nodes),
            "pattern": group.pattern,
            "repeats": self.repeats,
            **_cost(self.cost),
            "pinned": None if pin is None else {"precision": str(pin.precision), "reason": pin.reason},
            "no_bf16": self.no_bf16,
            "only_bf16": self.only_bf16,
        }


@dataclass(frozen=True)
class OperatorSummary:
    """All nodes of one operator.

    Attributes:
        name: with the domain where that is not ONNX's own.
        grouped: how many of them have a precision.
        fixed: why the others have none; "" where nothing is FP32 about them.
    """

    name: str
    count: int
    grouped: int
    flops: float
    fixed: str


@dataclass(frozen=True)
class Inspection:
    """What ``inspect`` found in a model: groups, operators, costs, hazards.

    Attributes:
        parameters: how many floating-point constants there are, ``weight_bytes`` in how many bytes.
        memory: what all-FP32 and all-FP16 need of it at once.
        space: name of the search space whose pins count.
        groups: in topological order.
        operators: by FLOPs, the most first.
        rest: what nodes without a precision compute and move together.
        hazards: the most severe first.
        assumed: symbolic dimension -> the size that FLOPs and bytes are counted for; empty where shapes were observed.
        unknown_shapes: how many FP32 values have no known shape, and count as one element per unknown dimension.
        observed: what the samples are called whose values and shapes were observed; None where none were.
        samples: how many; ``available`` are as many as a search would run.
        warnings: that have no code, one line each.
        about: findings about the model as a whole, and about the data.
    """

    model: Model
    parameters: int
    weight_bytes: int
    memory: MemoryNeed
    granularity: Granularity
    space: str
    groups: tuple[InspectedGroup, ...]
    operators: tuple[OperatorSummary, ...]
    rest: GroupCost
    hazards: tuple[Hazard, ...]
    assumed: Mapping[str, int]
    unknown_shapes: int
    observed: str | None
    samples: int
    available: int
    warnings: tuple[str, ...]
    about: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those about the model, and the hazards that have a code, the most severe first."""
        return by_severity((*self.about, *hazard_findings(self.hazards, "inspect")))

    @property
    def flops(self) -> float:
        """Floating-point operations of one inference of the whole model, a multiply-add counted as two."""
        return self.rest.flops + sum(g.cost.flops for g in self.groups)

    def to_json(self) -> dict[str, Any]:
        """What ``mptune inspect --json`` prints."""
        model = self.model
        return {
            "model": {
                "path": str(model.path),
                "sha256": model.sha256,
                "opset": model.opset,
                "nodes": len(model.nodes),
                "parameters": self.parameters,
                "weight_bytes": self.weight_bytes,
                "inputs": [_value(info) for info in model.inputs],
                "outputs": [_value(info) for info in model.outputs],
            },
            "memory_bytes": asdict(self.memory),
            "granularity": self.granularity,
            "space": self.space,
            "shapes": {"assumed": dict(self.assumed), "observed": self.observed, "unknown": self.unknown_shapes},
            "samples": self.samples,
            "samples_available": self.available,
            "groups": [group.to_json() for group in self.groups],
            "operators": [
                {"name": o.name, "nodes": o.count, "with_precision": o.grouped, "flops": o.flops, "fixed": o.fixed}
                for o in self.operators
            ],
            "rest": _cost(self.rest),
            "hazards": [hazard.to_json() for hazard in self.hazards],
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": list(self.warnings),
        }


def _cost(cost: GroupCost) -> dict[str, float]:
    return {"flops": cost.flops, "fp32_bytes": cost.fp32_bytes, "fp16_bytes": cost.fp16_bytes}


def _value(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "dtype": info.dtype, "shape": None if info.shape is None else list(info.shape)}
