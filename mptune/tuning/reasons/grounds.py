"""What explanations rest on beside the study and the sensitivity, as a file of the run's data directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mptune.files import parse_json, write_json
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.tuning.sampler.posterior import Prior
from mptune.tuning.space import Pin, SearchSpace

EXPLAIN_JSON = "explain.json"
"""Name of the file in the run's data directory."""


@dataclass(frozen=True)
class GroupFacts:
    """A layer group as far as explanations need it, and its pin."""

    id: str
    name: str
    kind: str
    pin: Pin | None = None
    reduced: Precision = Precision.FP16


@dataclass(frozen=True)
class Grounds(JsonForm):
    """All layer groups, in the order of the model; gains and boundary costs before any build, where they are known."""

    groups: tuple[GroupFacts, ...] = ()
    prior: Prior | None = None

    def __post_init__(self) -> None:
        """Check that the prior's terms are of its groups and boundaries."""
        prior = self.prior
        if prior is None:
            return
        of_groups = (len(terms) for terms in (prior.gains_ms, prior.operators, prior.precisions) if terms)
        costs = len(prior.boundary_costs_ms)
        if set(of_groups) != {len(prior.groups)} or costs != len(prior.boundaries):
            raise ValueError("the terms of the prior do not fit together")

    @property
    def free(self) -> tuple[str, ...]:
        """Ids of the groups that are searched."""
        return tuple(group.id for group in self.groups if group.pin is None)

    @classmethod
    def of(cls, space: SearchSpace, prior: Prior | None) -> Grounds:
        """The grounds of a space, without one-group errors, which belong to the sensitivity."""
        pins, reduced = space.pinned, space.reduced_of
        groups = tuple(GroupFacts(g.id, g.name, g.kind, pins.get(g.id), reduced(g.id)) for g in space.groups)
        if prior is None or prior.gains_ms is None:
            return cls(groups)
        preferred = prior.of_columns(
            np.setdiff1d(np.arange(len(prior.groups)), [column for _, column in prior.further])
        )
        return cls(groups, replace(preferred, log_square_errors=None, log_square_sds=None, part_shares=None))

    @classmethod
    def load(cls, path: Path) -> Grounds:
        """Read what ``keep_grounds`` wrote; empty where there is nothing that can be read."""
        try:
            return cls.from_json(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()


def keep_grounds(space: SearchSpace, prior: Prior | None, data_dir: Path) -> None:
    """Store what later explanations need; terms that are there already stay where ``prior`` brings none."""
    path = data_dir / EXPLAIN_JSON
    before, now = Grounds.load(path), Grounds.of(space, prior)
    if now.prior is None and before.free == now.free:
        now = Grounds(now.groups, before.prior)
    if now != before:
        write_json(path, now.to_json())
