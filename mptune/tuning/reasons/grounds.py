"""What explanations rest on beside the study and the sensitivity, as a file of the run's data directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mptune.files import parse_json, write_json
from mptune.graph.plan import Precision
from mptune.tuning.sampler.cuts.boundaries import Boundary, End
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
class Grounds:
    """What explanations rest on beside the study and the sensitivity; kept in the run's data directory.

    Attributes:
        groups: all layer groups, in the order of the model.
        prior: gains and boundary costs before any build; None where the search asked for none.
    """

    groups: tuple[GroupFacts, ...] = ()
    prior: Prior | None = None

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

    def save(self, path: Path) -> None:
        """Write the JSON file that ``load`` reads.

        Raises:
            RunError: the disk is full, or the place cannot be written.
        """
        groups = [
            {
                "id": group.id,
                "name": group.name,
                "kind": group.kind,
                "pin": None if group.pin is None else [str(group.pin.precision), group.pin.reason],
                **({} if group.reduced is Precision.FP16 else {"reduced": str(group.reduced)}),
            }
            for group in self.groups
        ]
        write_json(path, {"groups": groups, "terms": None if self.prior is None else _terms_to_json(self.prior)})

    @classmethod
    def load(cls, path: Path) -> Grounds:
        """Read what ``save`` wrote; empty where there is nothing that can be read."""
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
            groups = tuple(
                GroupFacts(
                    _text(g["id"]),
                    _text(g["name"]),
                    _text(g["kind"]),
                    None if g["pin"] is None else _pin(*g["pin"]),
                    Precision(g.get("reduced", Precision.FP16)),
                )
                for g in document["groups"]
            )
            terms = document["terms"]
            return cls(groups, None if terms is None else _terms_from_json(terms))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()


def keep_grounds(space: SearchSpace, prior: Prior | None, data_dir: Path) -> None:
    """Store what later explanations need; terms that are there already stay where ``prior`` brings none.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    path = data_dir / EXPLAIN_JSON
    before, now = Grounds.load(path), Grounds.of(space, prior)
    if now.prior is None and before.free == now.free:
        now = Grounds(now.groups, before.prior)
    if now != before:
        now.save(path)


def _pin(precision: str, reason: str) -> Pin:
    return Pin(Precision(precision), reason)


def _terms_to_json(prior: Prior) -> dict[str, Any]:
    return {
        "groups": list(prior.groups),
        "gains_ms": list(prior.gains_ms or ()),
        "precisions": list(prior.precisions),
        "ties": [[boundary.producer, *boundary.readers] for boundary in prior.boundaries],
        "tie_costs_ms": list(prior.boundary_costs_ms),
        "fixed_gain_ms": prior.fixed_gain_ms,
        "exact": prior.exact,
        "operators": [sorted(own) for own in prior.operators],
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _terms_from_json(document: Mapping[str, Any]) -> Prior:
    gains = {_text(group): float(ms) for group, ms in zip(document["groups"], document["gains_ms"], strict=True)}
    ties = list(zip(document["ties"], document["tie_costs_ms"], strict=True))
    return Prior(
        groups=tuple(gains),
        gains_ms=tuple(gains.values()),
        boundaries=tuple(Boundary(_end(producer), tuple(map(_end, readers))) for (producer, *readers), _ in ties),
        boundary_costs_ms=tuple(float(ms) for _, ms in ties),
        fixed_gain_ms=float(document["fixed_gain_ms"]),
        exact=bool(document["exact"]),
        operators=tuple(frozenset(map(_text, names)) for names in document.get("operators", ())),
        precisions=tuple(map(_text, document["precisions"])),
    )


def _end(value: Any) -> End:
    return value if isinstance(value, str) else tuple(map(int, value))
