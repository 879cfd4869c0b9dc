"""The split, the identity, findings about samples, and outputs that are fed back over sequences of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.data.samples import CalibrationSet, Rollout, data_findings, outputs_of, size_findings
from mptune.errors import SettingsError
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import ShapeRange

RNG = np.random.default_rng(3)


def test_an_input_that_is_the_same_everywhere_is_constant() -> None:
    shape = (1, 32, 64)
    grey, image = np.full(shape, 0.5, np.float32), RNG.random(shape, np.float32)
    constant, duplicate = data_findings([{"image": grey}, {"image": grey}])
    assert (constant.code, constant.where.inputs) == ("constant-data", ("image",))
    assert constant.evidence == {"value": 0.5, "samples": 2}
    assert (duplicate.code, duplicate.where.samples) == ("duplicate-samples", (1,))
    assert data_findings([{"image": grey}, {"image": grey}], states=["image"]) == (duplicate,)
    assert data_findings([{"image": grey[0]}] * 2) == (duplicate,), "a matrix may be a mask"
    # A cache begins empty.
    caches = [RNG.laplace(size=(1, 4, length, 16)).astype(np.float32) for length in (0, 30, 31)]
    (finding,) = data_findings([{"past_key": np.full_like(cache, 0.5)} for cache in caches])
    assert (finding.code, finding.evidence["value"]) == ("constant-data", 0.5)
    for sound in (
        [{"past_key": cache} for cache in caches],
        [{"image": image}],
        [{"image": image, "state": 0 * grey}],
        [{"image": k * grey} for k in range(3)],
        [{"step": np.full((1,), 0.5, np.float32)}],
    ):
        assert data_findings(sound) == ()


def tensor(name: str, *shape: int | str | None) -> TensorInfo:
    return TensorInfo(name, "float", shape)


def fed(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_samples_of_one_size_leave_the_others_untried() -> None:
    image, mask = tensor("image", "n", 3, "h", None), tensor("mask", "n", "h")
    sample = fed(image=(1, 3, 8, 9), mask=(1, 8))
    (finding,) = size_findings([sample, sample], [image, mask])
    assert (finding.code, finding.evidence) == ("one-size-tried", {"size": "image 1x3x8x9, mask 1x8"})
    assert finding.where.inputs == ("image", "mask")
    other = fed(image=(1, 3, 16, 9), mask=(1, 16))
    assert size_findings([sample, other], [image, mask]) == ()


def test_a_batch_fixed_axes_and_shapes_that_allow_one_size_leave_nothing_untried() -> None:
    assert size_findings([fed(x=(4, 8)), fed(x=(2, 8))], [tensor("x", "n", 8)]) == ()
    assert size_findings([fed(x=(4, 4))], [tensor("x", "n", "n")]) == (), "the batch under its own name"
    rows = [fed(x=(4, 8), y=(4, 2)), fed(x=(2, 8), y=(2, 2))]
    assert len(size_findings(rows, [tensor("x", "n", "t"), tensor("y", "n", 2)])) == 1
    inputs, samples = [tensor("x", "n", "t"), tensor("mask", "n", "t")], [fed(x=(1, 8), mask=(1, 8))]
    for text, count in (("x:1x8", 0), ("x:1x4,1x8,1x16", 1)):
        assert len(size_findings(samples, inputs, [ShapeRange.parse(text)])) == count


def data_of(count: int) -> CalibrationSet:
    return CalibrationSet(tuple({"x": np.array(k)} for k in range(count)), "s", False, ("w",))


NUMBERS = st.integers


@given(NUMBERS(2, 40), NUMBERS(0, 5), st.floats(0, 1), st.none() | NUMBERS(1, 50), NUMBERS(1, 3))
@pytest.mark.smoke
def test_parts_are_disjoint_not_empty_capped_and_repeatable(count, seed, fraction, cap, steps) -> None:
    data = data_of(count * steps + steps - 1)
    parts = data.split(seed, fraction, cap, steps)
    search, held_out = ([int(s["x"]) for s in part.samples] for part in parts)
    assert [tuple(numbers) for numbers in (search, held_out)] == [part.indices for part in parts]
    assert [part.indices for part in data.split(seed, fraction, cap, steps)] == [part.indices for part in parts]
    assert sorted({*search, *held_out}) == sorted(search + held_out), "disjoint"
    for numbers in (search, held_out):
        assert all(first % steps == 0 for first in numbers[::steps])
        assert 0 < len(numbers) <= steps * (cap or count)
    assert cap is not None or len(search) + len(held_out) == count * steps
    assert (parts[0].source, parts[0].warnings, parts[0].findings) == ("s", ("w",), ())
    assert len({data_of(16).split(seed, 0.25, None)[1].indices for seed in range(5)}) > 1


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (5, 3)])
def test_a_single_sample_or_sequence_is_both_parts_with_a_warning(count: int, steps: int) -> None:
    search, held_out = data_of(count).split(0, 0.25, 64, steps)
    assert search == held_out
    assert (len(search.samples), search.findings[-1].code) == (steps, "too-few-samples")


def test_the_identity_is_of_names_types_shapes_and_values() -> None:
    sample = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(True)}
    identity = CalibrationSet([sample], "s").sha256()
    assert identity == "810ee5d7156066a553bb9785a601dc22cb6fb546caf0ace5074e95484da02ecf", "runs would not resume"
    assert CalibrationSet([dict(reversed(sample.items()))], "other").sha256() == identity
    for other in ({**sample, "a": sample["a"].reshape(3, 2)}, {**sample, "a": sample["a"].astype(np.float64)}):
        assert CalibrationSet([other], "s").sha256() != identity


NAMES = {"inputs": ["x", "state:0"], "outputs": ["y", "next:0"], "samples": 10}


def counted(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"next": feed["state"].astype(np.float64) + feed["x"], "y": feed["state"] * 2}


def test_each_sequence_starts_at_its_recorded_state_and_goes_on_by_itself() -> None:
    samples = [{"x": np.float32([1]), "state": np.float32([100 * k])} for k in range(11)]
    outputs = outputs_of(counted, samples, Rollout((("next", "state"),), 5))
    assert [each["next"].tolist() for each in outputs] == [[5.0], [505.0]], "the eleventh sample begins none"
    assert outputs[0]["next after 1 steps"].tolist() == [1.0]
    assert outputs[1]["next after 2 steps"].tolist() == [502.0]
    assert outputs[1]["y"].tolist() == [1008.0]
    assert len(outputs_of(counted, samples, None)) == 11
    assert Rollout.parse(["next:0:state:0"], None, **NAMES) == Rollout((("next:0", "state:0"),), 10), "of all samples"
    assert Rollout.parse([], None, **NAMES) is None


@pytest.mark.parametrize(
    ("texts", "steps", "words"),
    [
        (["next:0"], 5, "feedback= next:0: the model has no such OUTPUT:INPUT"),
        (["y:z"], 5, "no such OUTPUT:INPUT"),
        (["y:x", "next:0:x"], 5, "feeds input 'x' twice"),
        (["y:x"], 1, "the data hold 10 samples"),
        (["y:x"], 11, "the data hold 10 samples"),
        ([], 4, "steps= is 4, and nothing is fed back"),
    ],
)
def test_what_cannot_be_fed_back_is_said(texts: list[str], steps: int, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Rollout.parse(texts, steps, **NAMES)
    assert words in caught.value.message
    assert caught.value.hint
