"""SearchSpace: which groups are free, which are pinned and why, and which plans are tried first."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from mptune import resources
from mptune.errors import SpaceError
from mptune.files import files_sha256
from mptune.finding import BREAKING_CODES
from mptune.graph.plan import DEFAULT_PRECISIONS, PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.settings import Granularity
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Origin

if TYPE_CHECKING:
    from mptune.graph.groups import GroupedModel, LayerGroup
    from mptune.graph.hazards.hazard import Hazard

MOST_ALONE = 8
"""Groups that are measured alone, each of which takes a build, at most."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class SeedPatterns(_Strict):
    """A ``[[seed]]`` table: a plan to try first, everything in FP16 but these patterns."""

    name: str
    fp32: tuple[str, ...]


class SpaceFile(_Strict):
    """The content of a search-space file.

    A pattern is ``op:Softmax`` (groups that hold such a node), ``kind:norm`` (groups of that kind), or else a glob on
    the names of groups and of their nodes, such as ``*/attn/*``. The ``[pin]`` table has for each precision the
    patterns of groups that have it, and are not searched.
    """

    format: Literal[1]
    description: str = ""
    granularity: Granularity = "fusion"
    pin: dict[Annotated[str, pydantic.AfterValidator(Precision.named)], tuple[str, ...]] = {}
    seed: tuple[SeedPatterns, ...] = ()


@dataclass(frozen=True)
class NamedSpace:
    """A search-space file that was read, by name or path; the hash of its bytes shows a resumed run another content."""

    name: str
    path: Path
    sha256: str
    file: SpaceFile


@dataclass(frozen=True)
class Pin:
    """A group whose precision is not searched, why, one line, and the code of the finding that says so, if one does."""

    precision: Precision
    reason: str
    finding: str | None = None


@dataclass(frozen=True)
class Seed:
    """A plan to evaluate before the sampler proposes any."""

    origin: Origin
    plan: PrecisionPlan


@dataclass(frozen=True)
class SearchSpace:
    """What the search may vary: groups in topological order, and the seeds, all-FP32 first."""

    model_sha256: str
    groups: tuple[LayerGroup, ...]
    free: tuple[str, ...]
    pinned: Mapping[str, Pin]
    seeds: tuple[Seed, ...]
    warnings: tuple[str, ...] = ()
    reduced: Mapping[str, Precision] = field(default_factory=dict)
    """Free group -> what it is where it is not FP32: the first precision that can be right there. FP16 if missing."""
    not_emulated: tuple[str, ...] = ()
    """Free groups whose errors emulation does not give: seeds have them alone, so that they are measured."""

    def reduced_of(self, group: str) -> Precision:
        """What a free group is where it is not FP32."""
        return self.reduced.get(group, Precision.FP16)

    @property
    def options(self) -> dict[str, tuple[str, str]]:
        """What every free group may be, as text: FP32 first."""
        return {group: (str(Precision.FP32), str(self.reduced_of(group))) for group in self.free}

    @property
    def size(self) -> int:
        """How many plans there are."""
        return int(2 ** len(self.free))

    def plan(self, choices: Mapping[str, Precision | str]) -> PrecisionPlan:
        """The whole plan for a choice of every free group; pinned groups as they are pinned."""
        return PrecisionPlan(
            self.model_sha256,
            {
                g.id: self.pinned[g.id].precision if g.id in self.pinned else Precision.named(choices[g.id])
                for g in self.groups
            },
        )

    def alone(self, group: str) -> PrecisionPlan:
        """The plan with no free group but this one reduced."""
        return self.plan({**dict.fromkeys(self.free, Precision.FP32), group: self.reduced_of(group)})

    def mixed(self, fp32: Iterable[str]) -> PrecisionPlan:
        """The plan with these groups in FP32, all others in the best precision, or FP32 where they may not have it."""
        possible = {self.reduced_of(group) for group in self.free}
        best = next((precision for precision in REDUCED if precision in possible), Precision.FP32)
        in_fp32 = {*fp32, *(group for group in self.free if self.reduced_of(group) is not best)}
        return self.plan({g: Precision.FP32 if g in in_fp32 else best for g in self.free})

    @property
    def all_fp32(self) -> PrecisionPlan:
        """All-FP32, whatever is pinned."""
        return PrecisionPlan.uniform(self.model_sha256, [group.id for group in self.groups], Precision.FP32)

    @property
    def all_fp16(self) -> PrecisionPlan:
        """All-FP16, as it is searched, shown and compared with: FP16 wherever it is possible on the samples."""
        return self.mixed(())

    @property
    def unpinned_fp16(self) -> PrecisionPlan | None:
        """All-FP16 with FP16 also where a finding pins FP32, as plain conversions make it; None where none does."""
        broken = {group: Precision.FP16 for group, pin in self.pinned.items() if pin.finding in BREAKING_CODES}
        return self.all_fp16.replace(broken) if broken else None

    def choices(self, plan: PrecisionPlan) -> dict[str, str]:
        """The precision of every free group of a plan, as text: what Optuna calls the parameters."""
        return {group: str(plan.precision[group]) for group in self.free}

    def holds(self, plan: PrecisionPlan) -> bool:
        """Whether the plan obeys the pins (all-FP32 need not, where the user pins groups to FP16)."""
        return all(plan.precision[group] is pin.precision for group, pin in self.pinned.items())


def load_space(name_or_path: str) -> NamedSpace:
    """Read a search-space file by name (``default``) or path.

    Raises:
        SpaceError: unknown, not TOML, or with keys or values that are not known.
    """
    path = resources.locate("spaces", name_or_path, SpaceError)
    file = resources.read_toml(path, SpaceFile, SpaceError, "start from one of the files in search_spaces/")
    return NamedSpace(name_or_path, path, files_sha256(path), file)


def list_spaces() -> tuple[NamedSpace, ...]:
    """The search spaces that come with mptune, sorted by name."""
    return tuple(load_space(name) for name in resources.names("spaces"))


def match(pattern: str, groups: Iterable[LayerGroup]) -> tuple[str, ...]:
    """The ids of the groups that a pattern of a search-space file means."""
    prefix, _, rest = pattern.partition(":")

    def is_meant(group: LayerGroup) -> bool:
        if prefix in ("op", "kind"):
            return rest in group.ops if prefix == "op" else rest == group.kind
        return group.id == pattern or any(fnmatchcase(name, pattern) for name in (group.name, *group.nodes))

    return tuple(group.id for group in groups if is_meant(group))


def close_patterns(pattern: str, groups: Sequence[LayerGroup]) -> str:
    """A hint for a pattern that means no group: what it may have meant, and where the names stand."""
    names = {name for g in groups for name in (g.name, *g.nodes, f"kind:{g.kind}", *(f"op:{op}" for op in g.ops))}
    meant = "".join(f"did you mean {close}? " for close in difflib.get_close_matches(pattern, sorted(names), 1))
    return f"{meant}`mptune inspect MODEL` lists the names; op:NAME and kind:NAME mean operators and kinds"


def make_space(
    grouped: GroupedModel,
    named: NamedSpace,
    hazards: Sequence[Hazard] = (),
    lacking: Mapping[Precision, Mapping[str, str]] = MappingProxyType({}),
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    not_emulated: Collection[str] = (),
) -> SearchSpace:
    """Put together what the groups, their hazards, the engine and the search-space file say.

    FP32 is pinned where FP16 cannot be right: a group that says so itself, a hazard of severity ``error``, an operator
    without an FP16 kernel, a pattern of the file. Those win over the file's FP16 pins.

    ``lacking`` has, for each precision, the groups for which the engine does not have it, and why. ``not_emulated`` are
    operators whose errors are to be measured, one group at a time. With several reduced precisions a group has the
    first, in the order of the table, that can be right there: BF16 where the range of FP16 does not hold its values.
    """
    from mptune.graph.hazards.find import pinning_hazards  # not imported where a run is read
    from mptune.graph.patterns import QUANTISED

    groups, warnings = grouped.groups, list[str]()
    codes = {QUANTISED: "quantised-parts"}

    def pins(by_group: Mapping[str, Hazard]) -> dict[str, Pin]:
        return {g: Pin(Precision.FP32, f"{h.place.tensor}: {h.reason}", h.code) for g, h in by_group.items()}

    def matched(patterns: Iterable[str], *, is_seed: bool = False) -> dict[str, str]:
        """Group id -> the first pattern that means it; patterns that mean nothing are warnings."""
        by_group: dict[str, str] = {}
        for pattern in patterns:
            ids = match(pattern, groups)
            # A seed lists the usual suspects, and a model without softmax lacks nothing.
            if not ids and not (is_seed and pattern.startswith(("op:", "kind:"))):
                text = f"pattern {pattern!r} of search space {named.name} matches no group of this model"
                warnings.append(f"{text}; `mptune inspect MODEL` lists the groups")
            by_group |= {group: pattern for group in ids if group not in by_group}
        return by_group

    beyond = pins(pinning_hazards(hazards))
    ruled_out = {
        p: {g: Pin(Precision.FP32, why, f"no-{p}-kernel") for g, why in lacking.get(p, {}).items()}
        | pins(pinning_hazards(hazards, p, is_measured=True))
        for p in REDUCED
    }
    allowed = [precision for precision in REDUCED if precision in precisions]
    wanted = {p: matched(named.file.pin.get(p, ())) for p in PRECISIONS}
    for precision in REDUCED:
        if wanted[precision] and precision not in allowed:
            pattern = next(iter(wanted.pop(precision).values()))
            warnings.append(f"{pattern!r} pins groups to {precision.name}, which --precisions leaves out")

    pinned: dict[str, Pin] = {}
    reduced: dict[str, Precision] = {}
    for group in groups:
        asked = {precision: by_group[group.id] for precision, by_group in wanted.items() if group.id in by_group}
        excluded = {p: ruled_out[p][group.id] for p in REDUCED if group.id in ruled_out[p]}
        possible = next((precision for precision in allowed if precision not in excluded), None)
        obeyed = next((precision for precision in asked if precision not in excluded), None)
        if group.pinned is not None:
            pin = beyond.get(group.id) or Pin(Precision.FP32, group.pinned, codes.get(group.kind))
        elif possible is None:
            pin = excluded[allowed[0]]
        elif obeyed is not None:
            pin = Pin(obeyed, f"pinned to {obeyed} by {asked[obeyed]!r} of {named.name}")
        elif asked:  # it may be the other one, which nobody asked for
            pin = excluded[next(iter(asked))]
        else:
            reduced[group.id] = possible
            continue
        pinned[group.id] = pin
        for precision, pattern in asked.items():
            if pin.precision is Precision.FP32 and precision is not Precision.FP32:
                text = f"{group.name} stays in FP32 although {pattern!r} pins it to {precision.name}"
                warnings.append(f"{text}: {pin.reason}")
    alone = tuple(g.id for g in groups if g.id in reduced and not g.ops.keys().isdisjoint(not_emulated))
    space = SearchSpace(grouped.model.sha256, groups, tuple(reduced), pinned, (), reduced=reduced, not_emulated=alone)

    # The baseline is all-FP32 whatever is pinned: speedups and errors are relative to it.
    names = {group.id: group.name for group in groups}
    seeds = [Seed(ORIGIN_FP32, space.all_fp32), Seed(ORIGIN_FP16, space.all_fp16)]
    seeds += [Seed(Origin("seed", f"{names[group]} alone"), space.alone(group)) for group in alone[:MOST_ALONE]]
    # All others are as in two precisions: BF16's error is eight times FP16's, and decides that of a plan which has it
    # wherever it can be. Where it pays the sampler knows better: simulated, such a seed cost a build for nothing.
    mixed = [(seed.name, list(matched(seed.fp32, is_seed=True))) for seed in named.file.seed]
    warned = [h.place.group for h in hazards if h.severity != "info" and not h.is_note]
    if named_by_findings := [group for group in warned if group in reduced]:
        mixed.append(("groups with findings in FP32", named_by_findings))
    seeds += [Seed(Origin("seed", name), space.mixed(fp32)) for name, fp32 in mixed]
    unique: dict[str, Seed] = {}
    for seed in seeds:
        unique.setdefault(seed.plan.fingerprint, seed)
    return replace(space, seeds=tuple(unique.values()), warnings=tuple(warnings))
