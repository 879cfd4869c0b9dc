"""The hazards of a small model on data, as a search observes it, in one session of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.hazards.hazard import Hazard
from mptune.graph.hazards.probes import facts_on, range_of
from mptune.graph.hazards.seen import NodeFacts, Seen, TensorRange
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.observe import observed_parts, write_with_outputs
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import run


def seen_at(magnitudes: Mapping[str, float]) -> Seen:
    """Values of which nothing but the largest magnitudes is known."""
    return Seen({tensor: TensorRange(absmax) for tensor, absmax in magnitudes.items()})


def ranges_on(
    model: Model,
    feed: Mapping[str, np.ndarray],
    path: Path,
    bank: WeightBank | None = None,
    precisions: tuple[Precision, ...] = DEFAULT_PRECISIONS,
) -> dict[str, TensorRange]:
    """What the values of a model are on one sample; ``path``: of the observing model."""
    ranges: dict[str, TensorRange] = {}
    for part in observed_parts(model, {}):
        write_with_outputs(model, bank, path, part.outputs)
        values = run(path, feed)
        facts: dict[str, list[NodeFacts]] = {}
        for precision in precisions[1:]:
            for probed in part.nodes:
                numbers = {name: (number,) for name, number in facts_on(probed, values, precision).items()}
                facts.setdefault(probed.key, []).append(NodeFacts(probed.node.name, numbers, precision))
        for name, axes in part.rows.items():
            ranges[name] = TensorRange.over_samples([range_of(values[name], axes)], facts.get(name, ()))
    return ranges


def hazards_on(proto: onnx.ModelProto, feed: Mapping[str, np.ndarray], folder: Path) -> tuple[Hazard, ...]:
    """Hazards of a model on one sample."""
    model = load_model(models.save(proto, folder))
    seen = Seen(ranges_on(model, feed, folder / "observe.onnx"))
    return find_hazards(GroupedModel(model, find_groups(model)), seen)
