"""On TensorRT-RTX's own objects: the timing cache is kept and checked as TensorRT does, only nothing is put into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mptune.engines.tensorrt.builder import BuildObjects, attach_timing_cache, save_timing_cache
from mptune.engines.tensorrt.library import load_library, open_log
from tests.device.cuda import FakeCuda
from tests.device.tensorrt import make_module

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning"),
]


def attached(trt: Any, path: Path) -> tuple[Any, BuildObjects]:
    """The configuration of a build that has the cache of a file, and what lives as long as the build."""
    builder = trt.Builder(open_log(trt))
    objects = BuildObjects([builder, builder.create_builder_config()])
    attach_timing_cache(path, objects[1], objects)
    return objects[1], objects


def test_what_another_process_wrote_meanwhile_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    builds = {name: attached(make_module("10.16.2", FakeCuda()), path) for name in ("mine", "theirs")}
    for name, (config, _) in builds.items():
        config.get_timing_cache().tactics.add(name)
        save_timing_cache(path, config)
    assert json.loads(path.read_bytes()) == ["10.16.2", ["mine", "theirs"]]
    assert attached(make_module("10.16.2", FakeCuda()), path)[0].get_timing_cache().tactics == {"mine", "theirs"}
    save_timing_cache(path, attached(make_module("10.3.0", FakeCuda()), path)[0])
    assert json.loads(path.read_bytes())[0] == "10.3.0", "one of another version is replaced"


def test_a_damaged_file_is_replaced_and_one_that_cannot_be_written_costs_the_cache_only(tmp_path: Path) -> None:
    trt, path = load_library("tensorrt-rtx").trt, tmp_path / "engines" / "timing.cache"
    path.parent.mkdir()
    path.write_bytes(b"no cache at all")
    config, _objects = attached(trt, path)
    save_timing_cache(path, config)
    assert path.read_bytes() != b"no cache at all"
    assert {entry.name for entry in path.parent.iterdir()} <= {"timing.cache", "timing.cache.lock"}
    shutil.rmtree(path.parent)
    path.parent.write_text("a file is in the way")
    save_timing_cache(path, config)
    attached(trt, path)
