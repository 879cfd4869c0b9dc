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
from mptune.graph.hazards.seen import ProbeRecord, Seen
from mptune.graph.loading.model import load_model
from mptune.graph.writing.observe import write_observing_model
from tests.graph import models
from tests.graph.helpers import run


def hazards_on(proto: onnx.ModelProto, feed: Mapping[str, np.ndarray], folder: Path) -> tuple[Hazard, ...]:
    """Hazards of a model on one sample."""
    model = load_model(models.save(proto, folder))
    taps = write_observing_model(model, None, folder / "observe.onnx")
    out = run(folder / "observe.onnx", dict(feed))
    records = [
        ProbeRecord(
            p.kind,
            p.node,
            {fact: (float(out[name]),) for fact, name in p.outputs.items()},
            {fact: tuple(out[name].tolist()) for fact, name in p.vectors.items()},
        )
        for tap in taps
        for p in tap.probes
    ]
    ranges = {tap.tensor: max(float(out[tap.highest]), -float(out[tap.lowest])) for tap in taps}
    return find_hazards(GroupedModel(model, find_groups(model)), ranges, seen=Seen(records=tuple(records)))
