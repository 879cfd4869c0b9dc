"""The toolchain for a device that is not here: latency by its roofline, errors by emulation."""

from __future__ import annotations

from mptune.engines.base import ErrorSource, Failure, Measurement, SampleSet
from mptune.engines.timing.latency import Latency, LatencySource
from mptune.engines.toolchains.shared import BaseToolchain
from mptune.graph.plan import PrecisionPlan


class PredictedToolchain(BaseToolchain):
    """Predicts latency by the target's roofline and emulates FP16 rounding: needs no device of that kind."""

    name = "emulation"
    latency_source: LatencySource = "predicted"
    error_source: ErrorSource = "emulated"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        return self._with_memory(plan, predict(self, plan, which))


def predict(toolchain: BaseToolchain, plan: PrecisionPlan, which: SampleSet) -> Measurement | Failure:
    """The roofline's latency of a plan, and its emulated error on a set of samples."""
    terms = toolchain.latency_terms()
    if isinstance(terms, Failure):
        return terms
    errors = toolchain.emulation.errors([plan], which)
    if isinstance(errors, Failure):
        return errors
    return Measurement(
        latency=Latency.predicted(terms.predict(plan)),
        baseline=None,
        drift=1.0,
        error=errors[0],
        error_source="emulated",
        build_s=0.0,
    )
