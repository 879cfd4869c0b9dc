"""Findings about a model that is inspected, and how the table of hazards shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mptune.finding import Finding, by_severity
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.hazard import Hazard, hazard_findings
from mptune.graph.hazards.interface import interface_findings
from mptune.graph.hazards.masked_rows import masked_row_findings
from mptune.inspection.observing import KnownValues
from mptune.targets.unsearched.already_mixed import already_mixed_findings
from mptune.targets.unsearched.out_of_reach import out_of_reach_findings
from mptune.targets.unsearched.quantised import quantised_findings
from mptune.tuning.reasons.reference import training_findings, without_repetition


@dataclass(frozen=True)
class ModelFindings:
    """Findings about the whole model, by what they are about.

    Attributes:
        training: operators that behave as in training.
        data: the calibration samples.
        reference: the model's outputs in FP32.
        masked_rows: rows of attention masks that let nothing through.
        mixed: layers that are FP16 or BF16 already.
        quantised: layers that are INT8 or FP8 already.
        unreached: layers that no plan can change, as their types are not known.
        interface: outputs whose shape depends on values, and outputs that are fed back as state.
    """

    training: Sequence[Finding]
    data: Sequence[Finding]
    reference: Sequence[Finding]
    masked_rows: Sequence[Finding]
    mixed: Sequence[Finding]
    quantised: Sequence[Finding]
    unreached: Sequence[Finding]
    interface: Sequence[Finding]

    def with_hazards(self, hazards: Sequence[Hazard]) -> tuple[Finding, ...]:
        """All of them and the hazards that are findings, the most severe first."""
        every = (
            *self.training,
            *self.data,
            *self.reference,
            *self.masked_rows,
            *self.mixed,
            *self.quantised,
            *self.unreached,
            *self.interface,
            *hazard_findings(hazards, "inspect"),
        )
        return by_severity(without_repetition(every))

    def as_hazards(self) -> Iterator[Hazard]:
        """As the table of hazards shows them."""
        yield from map(_input_hazard, self.data)
        for finding in self.quantised:
            # Quantised parts are pinned.
            yield replace(_as_hazard("quantised", finding, "flops_share"), severity="info")
        yield from (_as_hazard("types", finding, "flops_share") for finding in self.unreached)
        yield from (_as_hazard("mixed", finding, "flops_share") for finding in self.mixed)
        yield from map(_interface_hazard, self.interface)
        yield from (_as_hazard("mask", finding, "masked_rows") for finding in self.masked_rows)
        yield from map(_reference_hazard, without_repetition((*self.training, *self.reference)))


def model_findings(grouped: GroupedModel, values: KnownValues) -> ModelFindings:
    """What is found about the model, of what is known of its values."""
    samples, shapes = values.samples, values.shapes
    masked = {name: seen.masked for name, seen in values.ranges.items() if seen.masked is not None}
    return ModelFindings(
        training=training_findings(grouped.model, "inspect", is_run=samples is not None),
        data=[] if samples is None else [replace(finding, origin="inspect") for finding in samples.findings],
        reference=values.findings,
        masked_rows=masked_row_findings(grouped, masked, "inspect", known=values.findings),
        mixed=already_mixed_findings(grouped, shapes, "inspect"),
        quantised=quantised_findings(grouped, shapes, "inspect"),
        unreached=out_of_reach_findings(grouped, shapes, "inspect"),
        interface=interface_findings(grouped.model, "inspect"),
    )


def _input_hazard(finding: Finding) -> Hazard:
    """A finding about the data as the table of hazards shows it: at the first input, or at all samples."""
    tensor = finding.where.inputs[0] if finding.where.inputs else "samples"
    value = next((float(x) for x in finding.evidence.values() if isinstance(x, float)), 0.0)
    return Hazard(finding.severity, "input", None, None, tensor, value, finding.text, finding.cure, finding.code)


def _as_hazard(kind: str, finding: Finding, number: str) -> Hazard:
    """A finding about the model as the table of hazards shows it; ``number`` names the evidence that is its value."""
    return Hazard(
        finding.severity,
        kind,
        None,
        None,
        "the model",
        float(finding.evidence[number]),
        finding.text,
        finding.cure,
        finding.code,
        finding.evidence,
    )


def _reference_hazard(finding: Finding) -> Hazard:
    """A finding about the model in FP32 as the table of hazards shows it; it pins no group."""
    where = finding.where
    node = where.nodes[0] if where.nodes else None
    outputs = [output.name for output in where.outputs]
    tensor = next(iter((*where.tensors, *outputs)), "the model")
    value = next((float(x) for x in finding.evidence.values() if isinstance(x, (int, float))), 0.0)
    place = ("reference", None, node, tensor, value)
    return Hazard(finding.severity, *place, finding.text, finding.cure, finding.code, finding.evidence)


def _interface_hazard(finding: Finding) -> Hazard:
    where = finding.where
    tensor = ", ".join([output.name for output in where.outputs[:1]] or ["the model"])
    node = where.nodes[0] if where.nodes else None
    value = float(len(where.outputs))
    return Hazard(finding.severity, "output", None, node, tensor, value, finding.text, finding.cure, finding.code)
