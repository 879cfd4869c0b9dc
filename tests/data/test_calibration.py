"""Calibration data: cut as documented, refused with the cure, split by seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.errors import DataError
from mptune.graph.loading.model import TensorInfo
from mptune.settings import DataSettings

SETTINGS = DataSettings()
IMAGE = TensorInfo("image", "float", ("batch", 3, 4, 5))
STATIC = TensorInfo("image", "float", (2, 3))


def images(count: int, dtype: type = np.float32) -> np.ndarray:
    return np.arange(count * 60, dtype=dtype).reshape(count, 3, 4, 5)


def load(path: Path | None, *inputs: TensorInfo, batch: int = 1, **settings) -> CalibrationSet:
    return load_calibration(path, inputs, replace(SETTINGS, batch=batch, **settings), seed=0)


def refused(path: Path | None, *inputs: TensorInfo, match: str, hint: str, batch: int = 1, **settings) -> DataError:
    with pytest.raises(DataError, match=match) as caught:
        load(path, *inputs, batch=batch, **settings)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def npz(tmp_path: Path):
    def write(**arrays: np.ndarray) -> Path:
        np.savez(tmp_path / "calib.npz", **arrays)
        return tmp_path / "calib.npz"

    return write


class TestCutting:
    def test_dynamic_batch_takes_the_batch_that_was_asked_for(self, npz) -> None:
        path = npz(image=images(6))
        one, three = load(path, IMAGE), load(path, IMAGE, batch=3)
        assert [s["image"].shape for s in one.samples] == [(1, 3, 4, 5)] * 6
        assert [s["image"].shape for s in three.samples] == [(3, 3, 4, 5)] * 2
        np.testing.assert_array_equal(three.samples[1]["image"], images(6)[3:])
        assert one.source == "calib.npz"
        assert not one.is_random
        assert one.warnings == ()

    def test_static_batch_takes_its_own_rows(self, npz) -> None:
        got = load(npz(image=np.arange(18, dtype=np.float32).reshape(6, 3)), STATIC, batch=5)
        assert [s["image"].shape for s in got.samples] == [(2, 3)] * 3

    def test_rest_of_a_dynamic_batch_names_what_divides(self, npz) -> None:
        refused(npz(image=images(6)), IMAGE, batch=4, match="'image' has 6 rows.*--batch 4", hint="--batch 1, 2, 3, 6")

    def test_several_inputs_advance_together(self, npz) -> None:
        mask = TensorInfo("mask", "int64", ("batch", "seq"))
        got = load(npz(image=images(4), mask=np.arange(28).reshape(4, 7)), IMAGE, mask, batch=2)
        assert len(got.samples) == 2
        np.testing.assert_array_equal(got.samples[1]["mask"], [list(range(14, 21)), list(range(21, 28))])

    def test_unknown_rank_counts_as_a_dynamic_batch(self, npz) -> None:
        got = load(npz(x=np.zeros((4, 2), np.float32)), TensorInfo("x", "float", None), batch=2)
        assert [s["x"].shape for s in got.samples] == [(2, 2)] * 2

    def test_byte_order_and_memory_order_are_normalised(self, npz) -> None:
        got = load(npz(image=np.asfortranarray(images(2).astype(">f4"))), IMAGE).samples[1]["image"]
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, images(2)[1:])


class TestRepeating:
    def test_an_input_without_a_batch_axis_repeats(self, npz) -> None:
        got = load(npz(image=images(4), k=np.eye(3, dtype=np.float32)), IMAGE, K)
        assert len(got.samples) == 4
        assert all((s["k"] == np.eye(3)).all() for s in got.samples)
        assert got.warnings == ()

    def test_it_may_also_differ_from_sample_to_sample(self, npz) -> None:
        ks = np.arange(36, dtype=np.float32).reshape(12, 3)
        got = load(npz(image=images(4), k=ks), IMAGE, K)
        np.testing.assert_array_equal(got.samples[3]["k"], ks[9:])

    def test_a_scalar_repeats(self, npz) -> None:
        got = load(npz(image=images(2), t=np.float32(0.5)), IMAGE, T)
        assert [s["t"].shape for s in got.samples] == [(), ()]

    def test_a_vector_gives_a_scalar_input_one_value_per_sample(self, npz) -> None:
        got = load(npz(image=images(2), t=np.array([0.5, 0.7], np.float32)), IMAGE, T)
        assert [(s["t"].shape, s["t"].dtype, float(s["t"])) for s in got.samples] == [
            ((), np.float32, 0.5),
            ((), np.float32, pytest.approx(0.7)),
        ]

    def test_one_sample_of_what_looks_batched_is_repeated_with_a_warning(self, npz) -> None:
        second = replace(IMAGE, name="second")
        got = load(npz(image=images(3), second=images(1)), IMAGE, second)
        assert len(got.samples) == 3
        assert got.warnings == ("calib.npz: input 'second' has one sample, which is repeated for all 3",)

    def test_an_input_of_size_zero_repeats(self, npz) -> None:
        empty = TensorInfo("roi", "float", (0,))
        got = load(npz(image=images(2), roi=np.zeros(0, np.float32)), IMAGE, empty)
        assert got.samples[1]["roi"].shape == (0,)

    def test_a_cache_is_empty_at_its_start(self, npz) -> None:
        past = TensorInfo("past", "float", ("batch", 2, "length", 4))
        got = load(npz(image=images(3), past=np.zeros((3, 2, 0, 4), np.float32)), IMAGE, past)
        assert [sample["past"].shape for sample in got.samples] == [(1, 2, 0, 4)] * 3


K, T = TensorInfo("k", "float", (3, 3)), TensorInfo("t", "float", ())
MASK = TensorInfo("mask", "int64", ("batch", 2))
PAST = TensorInfo("past", "float", ("batch", 2, 5, 4))
A, B = (TensorInfo(name, "float", ("n", "seq")) for name in "ab")


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


class TestRefused:
    @pytest.mark.parametrize(
        ("inputs", "arrays", "match", "hint"),
        [
            ([STATIC], {"image": zeros(5, 3)}, "'image' has 5 rows.* batch is 2", "4 or 6"),
            ([STATIC], {"image": zeros(1, 3)}, "'image' has 1 rows", "give 2 or 4"),
            (
                [IMAGE, MASK],
                {"image": images(4), "mask": zeros(3, 2, dtype=np.int64)},
                "'mask' has 3 samples",
                "same number",
            ),
            ([A, B], {"a": zeros(2, 7), "b": zeros(2, 9)}, "'seq' is 7 in input 'a' and 9 in input 'b'", "same size"),
            ([IMAGE, PAST], {"image": images(3), "past": zeros(3, 2, 0, 4)}, "'past' is empty", "at least one"),
            ([IMAGE], {"a": zeros(1), "b": zeros(1)}, r"calib\.npz has no array for input 'image'", "'a', 'b'"),
            ([IMAGE, K], {"images": images(1), "k": zeros(1)}, "no array for input 'image'", "rename 'images'"),
            ([IMAGE], {"image": images(1), "label": zeros(1)}, "'label' that is no input", "'image'"),
            ([IMAGE], {"image": images(1)[0]}, r"expected shape \(N x 1, 3, 4, 5\), got \(3, 4, 5\)", "array[None]"),
            ([IMAGE], {"image": images(4)[:, None]}, r"got \(4, 1, 3, 4, 5\)", "array.reshape(-1"),
            ([IMAGE], {"image": images(2).transpose(0, 2, 3, 1)}, r"got \(2, 4, 5, 3\)", "array.transpose(0, 3, 1, 2)"),
            ([IMAGE], {"image": zeros(2, 3, 8, 8)}, r"got \(2, 3, 8, 8\)", "preprocess"),
            ([IMAGE], {"image": images(0)}, r"'image' is empty, its shape is \(0, 3, 4, 5\)", "at least one"),
        ],
    )
    def test_what_does_not_fit(self, npz, inputs: list[TensorInfo], arrays, match: str, hint: str) -> None:
        refused(npz(**arrays), *inputs, match=match, hint=hint)

    @pytest.mark.parametrize(
        ("declared", "given_", "hint"),
        [
            ("float", "float64", "array.astype(np.float32)"),
            ("float", "float16", "array.astype(np.float32)"),
            ("float", "int64", "array.astype(np.float32)"),
            ("float", "uint8", "array.astype(np.float32)"),
            ("int64", "int32", "array.astype(np.int64)"),
            ("int32", "int64", "array.astype(np.int32)"),
            ("bool", "uint8", "array.astype(np.bool"),
        ],
    )
    def test_never_a_silent_cast(self, npz, declared: str, given_: str, hint: str) -> None:
        info = TensorInfo("x", declared, ("n", 2))
        refused(npz(x=np.ones((2, 2), given_)), info, match=f"'x': expected .*got {given_}", hint=hint)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_not_finite(self, npz, bad: float) -> None:
        array = images(2)
        array[1, 0, 2, 3] = bad
        refused(
            npz(image=array), IMAGE, match=r"'image' holds 1 NaN or infinite.*first at \(1, 0, 2, 3\)", hint="clean"
        )

    def test_no_such_file(self, tmp_path: Path) -> None:
        refused(tmp_path / "none.npz", IMAGE, match="no such file", hint="check the path")
        refused(tmp_path / "none", IMAGE, match="no such file", hint=".npz")

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_text("1,2")
        refused(path, IMAGE, match=r"x\.csv is no calibration data", hint=".npz, .npy, a folder")

    def test_strings(self, npz) -> None:
        refused(None, TensorInfo("text", "string", (1,)), match="'text' is of type string", hint="numeric")


class TestOneInput:
    def test_npz_with_one_array_of_another_name(self, npz) -> None:
        got = load(npz(arr_0=images(2)), IMAGE)
        assert len(got.samples) == 2
        assert got.warnings == ("calib.npz: array 'arr_0' is taken for the model's only input 'image'",)

    def test_npy(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", images(4))
        assert [s["image"].shape[0] for s in load(tmp_path / "x.npy", IMAGE, batch=2).samples] == [2, 2]

    def test_npy_for_several_inputs(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", images(4))
        refused(tmp_path / "x.npy", IMAGE, K, match="the model has 2 inputs", hint="image=..., k=...")


class TestFolder:
    def test_npy_files_in_natural_order(self, tmp_path: Path) -> None:
        for k in (10, 9, 1, 2):
            np.save(tmp_path / f"s{k}.npy", np.full((1, 3, 4, 5), k, np.float32))
        (tmp_path / "readme.txt").write_text("hello")
        (tmp_path / "._s1.npy").write_bytes(b"")
        got = load(tmp_path, IMAGE)
        assert [int(s["image"].flat[0]) for s in got.samples] == [1, 2, 9, 10]
        assert got.source == tmp_path.name
        assert got.names == ("s1.npy", "s2.npy", "s9.npy", "s10.npy")
        search, held_out = got.split(0, 0.5, None)
        for part in (search, held_out):
            assert [f"s{int(sample['image'].flat[0])}.npy" for sample in part.samples] == list(part.names)

    def test_shapes_may_differ_from_file_to_file(self, tmp_path: Path) -> None:
        ids, mask = TensorInfo("ids", "int64", ("n", "s")), TensorInfo("mask", "bool", ("n", "s"))
        for k in (3, 8):
            np.savez(tmp_path / f"{k}.npz", ids=np.zeros((1, k), np.int64), mask=np.ones((1, k), np.bool_))
        assert [s["ids"].shape for s in load(tmp_path, ids, mask).samples] == [(1, 3), (1, 8)]

    def test_a_misfit_names_the_file(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", image=images(1))
        np.savez(tmp_path / "b.npz", image=images(1)[0])
        refused(tmp_path, IMAGE, match=r"b\.npz: input 'image': expected shape \(batch, 3, 4, 5\)", hint="array[None]")

    def test_the_warning_about_a_name_comes_once(self, tmp_path: Path) -> None:
        for k in range(3):
            np.savez(tmp_path / f"{k}.npz", x=images(1))
        assert load(tmp_path, IMAGE).warnings == ("0.npz: array 'x' is taken for the model's only input 'image'",)

    def test_batch_that_the_files_do_not_have(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", images(1))
        refused(tmp_path, IMAGE, batch=8, match="'image' has 1 rows, --batch is 8", hint="leave --batch out")

    def test_batch_that_the_files_have(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", images(2))
        assert load(tmp_path, IMAGE, batch=2).samples[0]["image"].shape == (2, 3, 4, 5)

    def test_empty_folder(self, tmp_path: Path) -> None:
        refused(tmp_path, IMAGE, match="holds no .npz or .npy", hint="mptune reads")

    def test_folder_of_images(self, tmp_path: Path) -> None:
        (tmp_path / "cat.jpg").write_bytes(b"")
        refused(tmp_path, IMAGE, match=r"no preprocess\.toml", hint="size = ")
        (tmp_path / "cat.jpg").rename(tmp_path / "cat.csv")
        refused(tmp_path, IMAGE, match="holds no .npz or .npy", hint="it holds .csv")

    def test_both_kinds(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", images(1))
        np.savez(tmp_path / "b.npz", image=images(1))
        refused(tmp_path, IMAGE, match="both .npz and .npy", hint="one kind")


class TestRandom:
    INPUTS = (
        TensorInfo("x", "float", ("n", 3)),
        TensorInfo("h", "float16", (2,)),
        TensorInfo("ids", "int32", ("n", 4)),
        TensorInfo("on", "bool", (64,)),
        TensorInfo("pair", "float", (1, "n")),
    )

    def test_types_shapes_and_a_warning_that_stays(self) -> None:
        got = load(None, *self.INPUTS, batch=5, random_samples=3)
        assert len(got.samples) == 3
        first = got.samples[0]
        assert {n: (a.shape, str(a.dtype)) for n, a in first.items()} == {
            "x": ((5, 3), "float32"),
            "h": ((2,), "float16"),
            "ids": ((5, 4), "int32"),
            "on": ((64,), "bool"),
            "pair": ((1, 5), "float32"),
        }
        assert all(((s["ids"] >= 0) & (s["ids"] < 2)).all() for s in got.samples)
        assert 0 < first["on"].sum() < 64
        assert got.is_random
        assert got.source == "random inputs"
        (finding,) = got.findings
        assert (finding.code, finding.severity) == ("random-data", "warning")
        assert finding.where.inputs == ("x", "h", "ids", "on", "pair")
        assert finding.message.startswith("random inputs: ")
        search, held_out = got.split(0, 0.25, None)
        assert got.findings[0] in search.findings
        assert got.findings[0] in held_out.findings

    def test_the_seed_decides(self) -> None:
        a, b = load(None, *self.INPUTS), load(None, *self.INPUTS)
        np.testing.assert_array_equal(a.samples[7]["x"], b.samples[7]["x"])
        other = load_calibration(None, self.INPUTS, SETTINGS, seed=1)
        assert (other.samples[0]["x"] != a.samples[0]["x"]).any()
        assert (a.samples[1]["x"] != a.samples[0]["x"]).any()

    def test_sizes_that_nobody_knows(self) -> None:
        info = TensorInfo("ids", "int64", ("n", "seq", None))
        refused(None, info, match=r"'ids' of shape \(n, seq, \?\)", hint="--data")

    def test_unknown_rank(self) -> None:
        refused(None, TensorInfo("x", "float", None), match="'x' of unknown rank", hint="--data")

    def test_other_types(self) -> None:
        refused(None, TensorInfo("z", "complex64", (2,)), match="'z' of type complex64", hint="--data")
        refused(None, TensorInfo("q", "int4", (2,)), match="'q' of type int4", hint="--data")


class TestSplit:
    @staticmethod
    def numbered(count: int) -> CalibrationSet:
        return CalibrationSet(tuple({"x": np.array(k)} for k in range(count)), "s", False, ("w",))

    @given(
        count=st.integers(2, 40),
        seed=st.integers(0, 5),
        fraction=st.floats(0, 1),
        cap=st.none() | st.integers(1, 50),
    )
    @pytest.mark.smoke
    def test_disjoint_not_empty_capped_and_repeatable(self, count, seed, fraction, cap) -> None:
        whole = self.numbered(count)
        parts = [[int(s["x"]) for s in part.samples] for part in whole.split(seed, fraction, cap)]
        assert parts == [[int(s["x"]) for s in part.samples] for part in whole.split(seed, fraction, cap)]
        search, held_out = parts
        assert search
        assert held_out
        assert not set(search) & set(held_out)
        assert search == sorted(set(search))
        assert held_out == sorted(set(held_out))
        assert cap is None or max(len(search), len(held_out)) <= cap
        assert cap is not None or len(search) + len(held_out) == count

    def test_the_fraction_is_held_out(self) -> None:
        search, held_out = self.numbered(16).split(0, 0.25, None)
        assert (len(search.samples), len(held_out.samples)) == (12, 4)
        assert search.source == "s"
        assert search.warnings == ("w",)

    def test_seeds_part_differently(self) -> None:
        parts = {tuple(int(s["x"]) for s in self.numbered(16).split(seed, 0.25, None)[1].samples) for seed in range(5)}
        assert len(parts) > 1

    def test_a_single_sample_is_both_with_a_warning(self) -> None:
        search, held_out = self.numbered(1).split(0, 0.25, 64)
        assert search.samples == held_out.samples
        assert len(search.samples) == 1
        assert search.findings == held_out.findings
        assert search.findings[-1].code == "too-few-samples"
        assert search.findings[-1].message.startswith("one sample only")

    def test_two_samples_are_enough_to_hold_one_out(self) -> None:
        search, held_out = self.numbered(2).split(0, 0.25, 64)
        assert search.samples != held_out.samples
        assert search.findings == held_out.findings == ()
