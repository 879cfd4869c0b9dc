"""Whole networks, as both exporters of torch and other tools write them: inspect, apply and search."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnxruntime as ort
import pytest

import mptune
from mptune.cli import main
from mptune.engines.loading import load_typed_model
from mptune.errors import ModelError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, REDUCED, Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.targets.costs import group_costs
from mptune.targets.roofline import Kernels
from mptune.targets.target import load_target
from mptune.tuning.front import Front
from tests.graph import rtx
from tests.graph.helpers import plans, relative_l2, run
from tests.graph.test_three_precisions import ALL, OPSETS, computes_the_same, without_hazards
from tests.graph.verify import typed_graph, verify
from tests.networks.expected import NETWORKS, expected
from tests.networks.networks import FILES, filled, samples, shapes_of

pytestmark = pytest.mark.usefixtures("opened_here")

REFUSED = {"classifier": "holds maps, not tensors"}
STEMS = [stem for stem in FILES if stem not in REFUSED]
DEVICE = Path(__file__).parent / "device.toml"
EXPORTS = {
    name: [stem for stem in STEMS if stem.startswith((f"{name}_torchscript_", f"{name}_dynamo_"))] for name in NETWORKS
}
SEARCHED = [(exports or [name])[number % 2 - 1] for number, (name, exports) in enumerate(EXPORTS.items())]
"""One export of each network, of either exporter by turns."""
LONG = {
    *("swin_torchscript_14", "diffusion_unet_torchscript_15", "retinanet_quantised", "retinanet_half_quantised"),
    *("text_encoder_extended", "llama_torchscript_14", "shape_arithmetic_torchscript_12"),
    *(stem for number, stem in enumerate(SEARCHED) if number % 4),
}
"""Whose search takes longest, and three in four of the others: with what is marked ``slow``."""
CHOOSING = ("retinanet", "yolo", "two_stage")
"""Networks that choose among candidates: a rounding changes which."""


def test_every_network_has_its_expectations() -> None:
    assert {stem for name, exports in EXPORTS.items() for stem in exports or [name]} == set(STEMS)


def test_files_are_small() -> None:
    sizes = {stem: path.stat().st_size for stem, path in FILES.items()}
    assert max(sizes.values()) < 120_000, sizes


@pytest.mark.parametrize("stem", STEMS)
def test_inspect(stem: str, tmp_path: Path) -> None:
    found, wanted = mptune.inspect(filled(stem, tmp_path)), expected(stem)
    assert Counter(g.group.kind for g in found.groups) == dict(wanted.kinds)
    assert {f.code for f in found.findings} == wanted.findings
    assert found.warnings == ()
    pins = [(group.group.kind, group.pin) for group in found.groups if group.pin]
    assert Counter(kind for kind, _ in pins) == {kind: count for kind, (count, _) in wanted.pinned.items()}
    for kind, pin in pins:
        assert pin.precision is Precision.FP32
        assert wanted.pinned[kind][1] in pin.reason


@pytest.mark.parametrize("name", [name for name, exports in EXPORTS.items() if len(exports) == 2])
def test_both_exports_are_predicted_alike(name: str, tmp_path: Path) -> None:
    one, other = (predicted_ms(filled(stem, tmp_path)) for stem in EXPORTS[name])
    assert one == pytest.approx(other, rel=0.05)


def predicted_ms(path: Path) -> list[float]:
    """All layers in FP32, and in FP16, on the device that the searches are for; at the shapes of a sample."""
    model, target = load_model(path), load_target(str(DEVICE))
    costs = group_costs(GroupedModel(model, find_groups(model)), shapes_of(path, samples(model, 1)[0]))
    kernels = Kernels(target)
    return [sum(kernels.ms(cost, precision) for cost in costs.values()) for precision in PRECISIONS]


@pytest.mark.parametrize("stem", STEMS)
def test_apply(stem: str, tmp_path: Path) -> None:
    path = filled(stem, tmp_path)
    model = load_model(path)
    out = mptune.apply(path, None, tmp_path / "fp16.onnx")
    graph = typed_graph(out, model)
    assert list(graph.input) == list(model.proto.graph.input)
    assert [o.name for o in graph.output] == [o.name for o in model.proto.graph.output]
    assert any(n.op_type == "Cast" for n in graph.node) or set(expected(stem).kinds) == set(expected(stem).pinned)
    limit = expected(stem).closeness
    for feed in samples(model, 2):
        reference = run(path, feed)
        for name, y in run(out, feed).items():
            assert y.dtype == reference[name].dtype
            assert limit is None or relative_l2(y, reference[name]) < limit, name


@pytest.mark.parametrize("stem", [pytest.param(k, marks=[pytest.mark.slow] if k in LONG else []) for k in SEARCHED])
def test_search(stem: str, tmp_path: Path) -> None:
    path = filled(stem, tmp_path)
    given = {"data": samples(load_model(path)), "out": tmp_path / "run", "target": DEVICE, "progress": False}
    front = mptune.search(path, budget=6, **given)
    wanted = expected(stem)
    assert (front.evaluations, front.failures) == (wanted.evaluations, 0)
    # Which values lie near zero turns on a rounding in a network that is not trained, and is no warning.
    assert {f.code for f in front.findings} - {"near-zero"} == (
        wanted.findings - wanted.harmless_on_data | wanted.on_data | {"target-not-here"}
    )
    choices = {"fp16": ("all-fp16", "mixed"), "any": ("all-fp32", "all-fp16", "mixed")}
    assert choice(front) in choices.get(wanted.choice, (wanted.choice,))
    (feed,) = samples(load_model(path), 1)
    chosen, reference = (run(each, feed) for each in (tmp_path / "run" / "chosen" / "model.onnx", path))
    assert {name: y.dtype for name, y in chosen.items()} == {name: y.dtype for name, y in reference.items()}


def choice(front: Front) -> str:
    """Whether the chosen plan is all-FP32, all-FP16 but for what is pinned, or mixed."""
    assert front.chosen is not None
    plan = front.chosen.plan
    if Precision.FP16 not in plan.precision.values():
        return "all-fp32"
    return "all-fp16" if front.chosen.origin.name == "all-fp16" else "mixed"


@pytest.mark.parametrize("stem", REFUSED)
def test_what_is_no_network_is_refused_in_one_line(stem: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = filled(stem, tmp_path)
    for command, options in (("inspect", ""), ("apply", "--fp16-all -o out.onnx"), ("search", "--budget 6")):
        assert main([command, str(path), *options.split()]) == 1
        first, *hints = capsys.readouterr().err.strip().splitlines()
        assert REFUSED[stem] in first
        assert all(hint.startswith("hint:") for hint in hints)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("stem", STEMS)
def test_a_hundred_plans_of_three_precisions_are(stem: str, opset: int | None, tmp_path: Path) -> None:
    """Valid, with the same interface and the fewest Casts; of one in ten: what its emulation computes."""
    path = filled(stem, tmp_path)
    try:
        model = load_model(path, opset=opset)
    except ModelError as error:  # ONNX's converter knows not every operator
        if opset is None:
            raise
        pytest.skip(error.message)
    grouped, bank = GroupedModel(model, find_groups(model)), WeightBank.write(model, tmp_path, precisions=REDUCED)
    rewriter, emulator, feed = Rewriter(grouped, bank), Emulator(grouped, bank), samples(model, 1)[0]

    def runs(typed: Path) -> bool:
        try:
            return bool(run(typed, feed))
        except ort.capi.onnxruntime_pybind11_state.NotImplemented:  # the CPU provider has no kernel
            return False

    hazards = find_hazards(grouped)
    can_run = runs(rewriter.write(grouped.uniform(Precision.FP32), tmp_path / "exact.onnx"))
    for number, plan in enumerate(plans(model, grouped.groups, 100, precisions=ALL)):
        typed = rewriter.write(plan, tmp_path / "typed.onnx")
        verify(rewriter, plan, typed)
        if can_run and number % 10 == 0:
            safe = without_hazards(plan, hazards)
            emulated = run(emulator.write(safe, tmp_path / "emulated.onnx"), feed)
            typed = rewriter.write(safe, typed)
            runs(typed)
            computes_the_same(typed, emulated, feed, tmp_path, discontinuous=stem.startswith(CHOOSING))


@pytest.mark.tensorrt_rtx
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stem", STEMS)
def test_tensorrt_rtx_takes_random_plans(stem: str, tmp_path: Path) -> None:
    model = load_typed_model(filled(stem, tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    library, rewriter = rtx.library(), Rewriter(grouped, WeightBank.write(model, tmp_path))
    for plan in (grouped.uniform(Precision.FP32), *plans(model, grouped.groups, 3, seed=7)):
        said = rtx.refusal(library, rewriter.write(plan, tmp_path / "typed.onnx"))
        if expected(stem).not_in_tensorrt_rtx is not None:
            assert str(expected(stem).not_in_tensorrt_rtx) in str(said)
            return
        assert said is None, plan
