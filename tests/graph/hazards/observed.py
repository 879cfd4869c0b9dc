"""The hazards of a small model on data, as a search observes it, in one session of ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import Hazard, NodeFacts, ObservedValues, TensorRange
from mptune.graph.hazards.probes import facts_on, range_of
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.variants import observed_parts, write_with_outputs
from mptune.graph.writing.weights import WeightBank
from mptune.settings import Granularity
from tests.graph import models
from tests.graph.helpers import run


def magnitudes_of(magnitudes: Mapping[str, float]) -> ObservedValues:
    """Values of which nothing but the largest magnitudes is known."""
    return ObservedValues({tensor: TensorRange(absmax) for tensor, absmax in magnitudes.items()})


def ranges_on(
    model: Model,
    feeds: Sequence[Mapping[str, np.ndarray]],
    folder: Path,
    bank: WeightBank | None = None,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
) -> dict[str, TensorRange]:
    """What the values of a model are on samples; ``folder``: of the observing model."""
    reduced = [Precision.named(name) for name in precisions if name != Precision.FP32]
    ranges: dict[str, TensorRange] = {}
    for part in observed_parts(model, {}):
        write_with_outputs(model, bank, folder / "observe.onnx", part.outputs)
        every = [run(folder / "observe.onnx", feed) for feed in feeds]
        facts: dict[str, list[NodeFacts]] = {}
        for probed, precision in itertools.product(part.nodes, reduced):
            each = [facts_on(probed, values, precision) for values in every]
            numbers = {name: tuple(one[name] for one in each) for name in each[0]}
            facts.setdefault(probed.key, []).append(NodeFacts(probed.node.name, numbers, precision))
        for name, axes in part.rows.items():
            on_each = [range_of(values[name], axes) for values in every]
            ranges[name] = TensorRange.over_samples(on_each, facts.get(name, ()))
    return ranges


def hazards_on(
    proto: onnx.ModelProto, feed: Mapping[str, np.ndarray], folder: Path, granularity: Granularity = "fusion"
) -> tuple[Hazard, ...]:
    """Hazards of a model on one sample."""
    model = load_model(models.save(proto, folder))
    seen = ObservedValues(ranges_on(model, [feed], folder))
    return find_hazards(GroupedModel(model, find_groups(model, granularity)), seen)
