"""On TensorRT-RTX's own objects: the timing cache is kept and checked as TensorRT does, only nothing is put into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mptune.engines.tensorrt.builder import RuntimeCache, TimingCache
from mptune.engines.tensorrt.library import load_library, open_log
from tests.device.cuda import FakeCuda
from tests.device.rtx_runtime import IRuntimeConfig
from tests.device.tensorrt import make_module

pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning")


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_library("tensorrt-rtx").trt


class Build:
    """What a build has at hand: a log and a configuration."""

    def __init__(self, trt: Any) -> None:
        self.log = open_log(trt)
        self.builder = trt.Builder(self.log)
        self.config = self.builder.create_builder_config()


@pytest.mark.tensorrt_rtx
def test_a_cache_is_written(trt: Any, tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    build = Build(trt)
    cache = TimingCache(path)
    assert cache.attach(build.config, build.log) == []
    assert cache.save(build.config) == []
    assert path.stat().st_size > 0
    assert {entry.name for entry in tmp_path.iterdir()} <= {"timing.cache", "timing.cache.lock"}


@pytest.mark.tensorrt_rtx
def test_what_another_process_wrote_meanwhile_is_merged(trt: Any, tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    mine, theirs = Build(trt), Build(trt)
    cache, other = TimingCache(path), TimingCache(path)
    assert cache.attach(mine.config, mine.log) == other.attach(theirs.config, theirs.log) == []
    assert other.save(theirs.config) == []
    assert cache.save(mine.config) == []
    assert path.stat().st_size > 0


@pytest.mark.tensorrt_rtx
def test_a_damaged_file_is_replaced_and_told(trt: Any, tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"no cache at all")
    build = Build(trt)
    cache = TimingCache(path)
    (warning,) = cache.attach(build.config, build.log)
    assert "the timing cache is damaged: it was replaced by an empty one" in warning
    assert cache.save(build.config) == []
    assert path.read_bytes() != b"no cache at all"


@pytest.mark.tensorrt_rtx
def test_a_cache_of_another_version_is_replaced_and_told(trt: Any, tmp_path: Path) -> None:
    told = []
    for version in ("10.3.0", "10.3.0", "10.16.2", "10.16.2"):
        build = Build(make_module(version, FakeCuda()))
        cache = TimingCache(tmp_path / "timing.cache")
        told.append(cache.attach(build.config, build.log))
        assert cache.save(build.config) == []
    assert [len(warnings) for warnings in told] == [0, 0, 1, 0]
    assert "was written by another version of TensorRT or on another GPU" in told[2][0]


@pytest.mark.tensorrt_rtx
def test_a_folder_that_vanished_costs_the_cache_only(trt: Any, tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    folder.mkdir()
    build = Build(trt)
    cache = TimingCache(folder / "timing.cache")
    cache.attach(build.config, build.log)
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
    (folder.parent / "engines").write_text("a file is in the way")
    (warning,) = cache.save(build.config)
    assert warning.startswith("the timing cache could not be written")
    other = Build(trt)
    (warning,) = TimingCache(folder / "timing.cache").attach(other.config, other.log)
    assert warning.startswith("no timing cache")


def test_the_baselines_old_copy_does_not_overwrite_the_candidates_kernels(tmp_path: Path) -> None:
    """The baseline is opened first and closed last."""

    def opened() -> tuple[set[str], RuntimeCache]:
        config = IRuntimeConfig()
        cache = RuntimeCache(tmp_path / "runtime.cache", config)
        assert config._cache is not None
        return config._cache._kernels, cache

    of_baseline, baseline = opened()
    of_baseline |= {"fp32-gemm"}
    baseline.save()
    for name in ("fp16-gemm", "fp16-conv"):
        of_candidate, candidate = opened()
        of_candidate |= {name}
        candidate.close()
    baseline.close()
    assert set((tmp_path / "runtime.cache").read_text().split()) == {"fp32-gemm", "fp16-gemm", "fp16-conv"}


def test_an_unreadable_cache_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "runtime.cache").mkdir()
    cache = RuntimeCache(tmp_path / "runtime.cache", IRuntimeConfig())
    cache.close()
