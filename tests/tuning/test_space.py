"""Search-space files, pins, patterns and seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.errors import SpaceError
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.hazard import Hazard, HazardPlace
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Origin
from mptune.tuning.space import NamedSpace, SearchSpace, list_spaces, load_space, make_space, match
from tests.graph.test_corpus import CORPUS


@pytest.fixture(scope="module")
def mlp(mlp_path: Path) -> tuple[Model, tuple[LayerGroup, ...]]:
    model = load_model(mlp_path)
    return model, find_groups(model)


def write_space(folder: Path, text: str) -> NamedSpace:
    path = folder / "mine.toml"
    path.write_text("format = 1\n" + text)
    return load_space(str(path))


@pytest.fixture
def make(tmp_path: Path, mlp: tuple[Model, tuple[LayerGroup, ...]]) -> Callable[..., SearchSpace]:
    """The space of the MLP with a file of this text."""
    return lambda text="", *args, **options: make_space(
        GroupedModel(*mlp), write_space(tmp_path, text), *args, **options
    )


Make = Callable[..., SearchSpace]
EVIDENCE, WORDS = ("step", "base", "spacing", "share"), dict.fromkeys(("operator", "moved", "unchanged"), "Add")


def make_hazard(group: str, severity: str) -> Hazard:
    evidence = {"absmax": 1e6, "fp16_max": 65504.0}
    words = {"in_samples": "in 1 of 4 samples"}
    place = HazardPlace(None, group, "t")
    return Hazard("overflow", place, evidence, wording="seen", severity=severity, value=1e6, words=words)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", list_spaces(), ids=lambda named: named.name)
def test_every_space_of_mptune_fits_a_model(named: NamedSpace, mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    space = make_space(GroupedModel(*mlp), named)
    assert named.file.description
    assert space.seeds[0].origin == ORIGIN_FP32
    assert space.seeds[1].origin == ORIGIN_FP16
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


def test_patterns(mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    _, groups = mlp
    by_id = {g.id: g for g in groups}
    assert {by_id[i].kind for i in match("kind:norm", groups)} == {"norm"}
    assert all("Softmax" in by_id[i].ops for i in match("op:Softmax", groups))
    assert len(match("op:Softmax", groups)) == 1
    assert match("block0/*", groups)
    assert all(any(n.startswith("block0/") for n in by_id[i].nodes) for i in match("block0/*", groups))
    assert match("*", groups) == tuple(by_id)
    assert match("head/Gemm", groups) == match(match("head/Gemm", groups)[0], groups)
    assert match("nothing*", groups) == ()


def test_pins_and_their_reasons(make: Make, mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    _, groups = mlp
    space = make("[pin]\nfp32 = ['kind:norm']\nfp16 = ['head/*']")
    norms, head = set(match("kind:norm", groups)), set(match("head/*", groups))
    assert set(space.pinned) == norms | head
    assert all(space.pinned[g].precision is Precision.FP32 for g in norms)
    assert all(space.pinned[g].precision is Precision.FP16 for g in head)
    assert "'kind:norm'" in space.pinned[min(norms)].reason
    assert set(space.free) == {g.id for g in groups} - norms - head
    fp32, fp16 = space.seeds[:2]
    assert fp32.plan.fp16_groups == ()
    assert set(fp16.plan.fp32_groups) == norms
    assert not space.holds(fp32.plan)
    assert space.holds(fp16.plan)
    assert space.plan(space.choices(fp16.plan)) == fp16.plan
    assert space.size == 2 ** len(space.free)


def test_an_error_of_a_hazard_wins_over_an_fp16_pin(make: Make, mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    groups = mlp[1]
    (head,) = match("head/*", groups)
    space = make("[pin]\nfp16 = ['head/*']", [make_hazard(head, "error"), make_hazard(groups[0].id, "warning")])
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
    seed = next(s for s in make("", hazards).seeds if s.origin == Origin("seed", "groups with findings in FP32"))
    assert seed.plan.fp32_groups == (free[1],)


def test_a_group_that_cannot_be_fp16_says_why(tmp_path: Path, mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    model, groups = mlp
    first = LayerGroup(groups[0].id, groups[0].name, groups[0].kind, groups[0].nodes, groups[0].ops, "no such kernel")
    space = make_space(GroupedModel(model, (first, *groups[1:])), write_space(tmp_path, ""))
    assert space.pinned[first.id].reason == "no such kernel"


def test_with_three_precisions_what_leaves_fp16s_range_may_be_bf16(mlp: tuple[Model, tuple[LayerGroup, ...]]) -> None:
    model, groups = mlp
    over, lost, lacking = [group.id for group in groups][:3]
    hazards = [
        replace(make_hazard(over, "error"), value=1e5),
        replace(make_hazard(lost, "error"), code="stagnation", evidence=dict.fromkeys(EVIDENCE, 1.0), words=WORDS),
        replace(make_hazard(lacking, "error"), value=1e9),
    ]
    named = load_space("default")
    both = make_space(GroupedModel(model, groups), named, hazards)
    assert {over, lost, lacking} <= both.pinned.keys()
    assert set(both.reduced.values()) == {Precision.FP16}
    no_kernel = {Precision.BF16: {lacking: "no kernel"}}
    all_three = make_space(GroupedModel(model, groups), named, hazards, no_kernel, ("fp32", "fp16", "bf16"))
    assert all_three.reduced_of(over) is Precision.BF16
    assert all_three.options[over] == ("fp32", "bf16")
    assert all_three.pinned.keys() == both.pinned.keys() - {over}
    assert "reached 1e+06" in all_three.pinned[lacking].reason
    assert all(all_three.reduced_of(g) is Precision.FP16 for g in all_three.free if g != over)
    assert [(seed.origin, seed.plan) for seed in all_three.seeds] == [(seed.origin, seed.plan) for seed in both.seeds]
    alone = make_space(GroupedModel(model, groups), named, hazards, no_kernel, ("fp32", "bf16"))
    assert set(alone.reduced.values()) == {Precision.BF16}
    assert alone.seeds[1].plan.bf16_groups == alone.free
    assert alone.pinned[lacking].reason == "no kernel" or "reached 1e+06" in alone.pinned[lacking].reason


def test_pins_to_bf16(make: Make) -> None:
    text = "[pin]\nbf16 = ['head/*']"
    space, without = make(text, precisions=("fp32", "fp16", "bf16")), make(text)
    (head,) = match("head/*", space.groups)
    assert space.pinned[head].precision is Precision.BF16
    assert not space.warnings
    assert head in without.free
    assert "which --precisions leaves out" in without.warnings[0]


def test_groups_that_are_not_emulated_are_measured_alone() -> None:
    model = load_model(CORPUS[0].parent / "lstm.onnx")
    groups = find_groups(model)
    (lstm,) = (group for group in groups if "LSTM" in group.ops)
    space = make_space(GroupedModel(model, groups), load_space("default"), not_emulated=("GRU", "LSTM"))
    assert space.not_emulated == (lstm.id,)
    assert str(space.seeds[2].origin) == f"seed: {lstm.name} alone"
    assert space.seeds[2].plan.fp16_groups == (lstm.id,)
    assert make_space(GroupedModel(model, groups), load_space("default")).not_emulated == ()
