"""On TensorRT-RTX's own objects: the timing cache is kept and checked as TensorRT does, only nothing is put into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mptune.engines.tensorrt.builder import (
    BuildObjects,
    attach_timing_cache,
    open_runtime_cache,
    save_runtime_cache,
    save_timing_cache,
)
from mptune.engines.tensorrt.library import load_library, open_log
from tests.device.cuda import FakeCuda
from tests.device.rtx_runtime import IRuntimeCache, IRuntimeConfig
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
        self.objects = BuildObjects()

    def attach(self, path: Path) -> list[str]:
        return attach_timing_cache(path, self.config, self.log, self.objects)

    def save(self, path: Path) -> list[str]:
        return save_timing_cache(path, self.config)


@pytest.mark.tensorrt_rtx
def test_what_another_process_wrote_meanwhile_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    builds = {name: Build(make_module("10.16.2", FakeCuda())) for name in ("mine", "theirs")}
    for name, build in builds.items():
        assert build.attach(path) == []
        build.config.get_timing_cache()._tactics.add(name)
    for build in builds.values():
        assert build.save(path) == []
    assert json.loads(path.read_bytes()) == ["10.16.2", ["mine", "theirs"]]


@pytest.mark.tensorrt_rtx
def test_a_damaged_file_is_replaced_and_told(trt: Any, tmp_path: Path) -> None:
    path, build = tmp_path / "timing.cache", Build(trt)
    path.write_bytes(b"no cache at all")
    (warning,) = build.attach(path)
    assert "the timing cache is damaged: it was replaced by an empty one" in warning
    assert build.save(path) == []
    assert path.read_bytes() != b"no cache at all"


@pytest.mark.tensorrt_rtx
def test_a_cache_of_another_version_is_replaced_and_told(tmp_path: Path) -> None:
    told = []
    for version in ("10.3.0", "10.3.0", "10.16.2", "10.16.2"):
        build = Build(make_module(version, FakeCuda()))
        told.append(build.attach(tmp_path / "timing.cache"))
        assert build.save(tmp_path / "timing.cache") == []
    assert [len(warnings) for warnings in told] == [0, 0, 1, 0]
    assert "was written by another version of TensorRT or on another GPU" in told[2][0]


@pytest.mark.tensorrt_rtx
def test_a_folder_that_vanished_costs_the_cache_only(trt: Any, tmp_path: Path) -> None:
    path, build = tmp_path / "engines" / "timing.cache", Build(trt)
    path.parent.mkdir()
    build.attach(path)
    shutil.rmtree(path.parent)
    path.parent.write_text("a file is in the way")
    (warning,) = build.save(path)
    assert warning.startswith("the timing cache could not be written")
    (warning,) = Build(trt).attach(path)
    assert warning.startswith("no timing cache")


def test_the_baselines_old_copy_does_not_overwrite_the_candidates_kernels(tmp_path: Path) -> None:
    """The baseline is opened first and closed last."""
    path = tmp_path / "runtime.cache"
    baseline = open_runtime_cache(path, IRuntimeConfig())
    baseline._kernels |= {"fp32-gemm"}
    save_runtime_cache(path, baseline)
    for name in ("fp16-gemm", "fp16-conv"):
        candidate = open_runtime_cache(path, IRuntimeConfig())
        candidate._kernels |= {name}
        save_runtime_cache(path, candidate)
    save_runtime_cache(path, baseline)
    assert set(path.read_text().split()) == {"fp32-gemm", "fp16-gemm", "fp16-conv"}


def test_kernels_of_another_gpu_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runtime.cache"
    path.write_bytes(b"longer than all kernels here")
    monkeypatch.setattr(IRuntimeCache, "deserialize", lambda cache, content: False)
    cache = open_runtime_cache(path, IRuntimeConfig())
    cache._kernels |= {"gemm"}
    save_runtime_cache(path, cache)
    assert path.read_bytes() == b"gemm"
