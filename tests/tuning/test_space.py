"""Search-space files, pins, patterns and seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.errors import SpaceError
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.hazard import Hazard, HazardPlace
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Origin
from mptune.tuning.space import NamedSpace, SearchSpace, list_spaces, load_space, make_space, match
from tests.graph.test_corpus import CORPUS


@pytest.fixture(scope="module")
def mlp(mlp_path: Path) -> GroupedModel:
    model = load_model(mlp_path)
    return GroupedModel(model, find_groups(model))


@pytest.fixture
def groups(mlp: GroupedModel) -> tuple[LayerGroup, ...]:
    return mlp.groups


def write_space(folder: Path, text: str) -> NamedSpace:
    path = folder / "mine.toml"
    path.write_text("format = 1\n" + text)
    return load_space(str(path))


@pytest.fixture
def make(tmp_path: Path, mlp: GroupedModel) -> Callable[..., SearchSpace]:
    """The space of the MLP with a file of this text."""
    return lambda text="", *args, **options: make_space(mlp, write_space(tmp_path, text), *args, **options)


Make = Callable[..., SearchSpace]
Groups = tuple[LayerGroup, ...]
ALL_THREE = ("fp32", "fp16", "bf16")


def make_hazard(group: str, severity: str = "error", value: float = 1e6) -> Hazard:
    evidence, words = {"absmax": 1e6, "fp16_max": 65504.0}, {"in_samples": "in 1 of 4 samples"}
    place = HazardPlace(None, group, "t")
    return Hazard("overflow", place, evidence, wording="seen", severity=severity, value=value, words=words)


@pytest.mark.parametrize("named", list_spaces(), ids=lambda named: named.name)
def test_every_space_of_mptune_fits_a_model(named: NamedSpace, mlp: GroupedModel) -> None:
    space = make_space(mlp, named)
    assert named.file.description
    assert [seed.origin for seed in space.seeds[:2]] == [ORIGIN_FP32, ORIGIN_FP16]
    assert len({seed.plan.fingerprint for seed in space.seeds}) == len(space.seeds)
    assert space.warnings == ()


def test_an_unknown_space_has_close_matches() -> None:
    with pytest.raises(SpaceError, match="'transfomer'") as caught:
        load_space("transfomer")
    assert "transformer" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("granularity = 'atom'", "granularity"),
        ("[pin]\nfp8 = ['x']", "pin.fp8"),
        ("[[seed]]\nname = 'x'", "seed.0.fp32"),
        ("this is not TOML", "not TOML"),
    ],
)
def test_a_space_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        write_space(tmp_path, text)


def test_patterns(groups: Groups) -> None:
    by_id = {g.id: g for g in groups}
    assert {by_id[i].kind for i in match("kind:norm", groups)} == {"norm"}
    (softmax,) = match("op:Softmax", groups)
    assert "Softmax" in by_id[softmax].ops
    block = match("block0/*", groups)
    assert block
    assert all(any(n.startswith("block0/") for n in by_id[i].nodes) for i in block)
    assert match("*", groups) == tuple(by_id)
    assert match("head/Gemm", groups) == match(match("head/Gemm", groups)[0], groups)
    assert match("nothing*", groups) == ()


def test_pins_and_their_reasons(make: Make, groups: Groups) -> None:
    space = make("[pin]\nfp32 = ['kind:norm']\nfp16 = ['head/*']")
    norms, head = match("kind:norm", groups), match("head/*", groups)
    pinned = dict.fromkeys(norms, Precision.FP32) | dict.fromkeys(head, Precision.FP16)
    assert {group: pin.precision for group, pin in space.pinned.items()} == pinned
    assert "'kind:norm'" in space.pinned[norms[0]].reason
    assert set(space.free) == {g.id for g in groups} - {*pinned}
    fp32, fp16 = (seed.plan for seed in space.seeds[:2])
    assert fp32.fp16_groups == ()
    assert set(fp16.fp32_groups) == set(norms)
    assert not space.holds(fp32)
    assert space.holds(fp16)
    assert space.plan(space.choices(fp16)) == fp16
    assert space.size == 2 ** len(space.free)


def test_an_error_of_a_hazard_wins_over_an_fp16_pin(make: Make, groups: Groups) -> None:
    (head,) = match("head/*", groups)
    space = make("[pin]\nfp16 = ['head/*']", [make_hazard(head), make_hazard(groups[0].id, "warning")])
    assert space.pinned[head].precision is Precision.FP32
    assert "reached 1e+06" in space.pinned[head].reason
    assert "reached 1e+06" in space.warnings[0]
    assert groups[0].id in space.free


def test_a_pattern_that_matches_nothing_is_a_warning(make: Make) -> None:
    space = make("[pin]\nfp32 = ['op:Conv']\n[[seed]]\nname = 's'\nfp32 = ['op:LSTM', 'blokc*']")
    assert [w.split("'")[1] for w in space.warnings] == ["op:Conv", "blokc*"], "a seed's classes may be absent"


def test_groups_with_findings_make_a_seed(make: Make) -> None:
    free = make().free
    hazards = [make_hazard(free[1], "warning"), make_hazard(free[3], "info")]
    (seed,) = (s for s in make("", hazards).seeds if s.origin == Origin("seed", "groups with findings in FP32"))
    assert seed.plan.fp32_groups == (free[1],)


def test_a_group_that_cannot_be_fp16_says_why(tmp_path: Path, mlp: GroupedModel) -> None:
    first = replace(mlp.groups[0], pinned="no such kernel")
    space = make_space(GroupedModel(mlp.model, (first, *mlp.groups[1:])), write_space(tmp_path, ""))
    assert space.pinned[first.id].reason == "no such kernel"


def test_with_three_precisions_what_leaves_fp16s_range_may_be_bf16(make: Make, groups: Groups) -> None:
    over, lost, lacking = [group.id for group in groups][:3]
    evidence, words = dict.fromkeys(("step", "base", "spacing", "share"), 1.0), ("operator", "moved", "unchanged")
    stagnation = {"code": "stagnation", "evidence": evidence, "words": dict.fromkeys(words, "Add")}
    hazards = [make_hazard(over, value=1e5), replace(make_hazard(lost), **stagnation), make_hazard(lacking, value=1e9)]
    no_kernel = {Precision.BF16: {lacking: "no kernel"}}
    both, all_three, alone = (
        make("", hazards, lacking=lacking_of, precisions=precisions)
        for lacking_of, precisions in (({}, ALL_THREE[:2]), (no_kernel, ALL_THREE), (no_kernel, ("fp32", "bf16")))
    )
    assert {over, lost, lacking} <= both.pinned.keys()
    assert set(both.reduced.values()) == {Precision.FP16}
    assert all_three.reduced_of(over) is Precision.BF16
    assert all_three.options[over] == ("fp32", "bf16")
    assert all_three.pinned.keys() == both.pinned.keys() - {over}
    assert "reached 1e+06" in all_three.pinned[lacking].reason
    assert all(all_three.reduced_of(g) is Precision.FP16 for g in all_three.free if g != over)
    assert [(seed.origin, seed.plan) for seed in all_three.seeds] == [(seed.origin, seed.plan) for seed in both.seeds]
    assert set(alone.reduced.values()) == {Precision.BF16}
    assert alone.seeds[1].plan.bf16_groups == alone.free
    assert alone.pinned[lacking].reason == "no kernel" or "reached 1e+06" in alone.pinned[lacking].reason


def test_pins_to_bf16(make: Make) -> None:
    text = "[pin]\nbf16 = ['head/*']"
    space, without = make(text, precisions=ALL_THREE), make(text)
    (head,) = match("head/*", space.groups)
    assert space.pinned[head].precision is Precision.BF16
    assert not space.warnings
    assert head in without.free
    assert "which --precisions leaves out" in without.warnings[0]


def test_groups_that_are_not_emulated_are_measured_alone() -> None:
    model = load_model(CORPUS[0].parent / "lstm.onnx")
    grouped, default = GroupedModel(model, find_groups(model)), load_space("default")
    (lstm,) = (group for group in grouped.groups if "LSTM" in group.ops)
    space = make_space(grouped, default, not_emulated=("GRU", "LSTM"))
    assert space.not_emulated == (lstm.id,)
    assert str(space.seeds[2].origin) == f"seed: {lstm.name} alone"
    assert space.seeds[2].plan.fp16_groups == (lstm.id,)
    assert make_space(grouped, default).not_emulated == ()
