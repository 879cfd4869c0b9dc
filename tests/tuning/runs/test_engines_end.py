"""The toolchain of a run ends as soon as nothing is measured any more, beside what follows."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import mptune
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from tests.conftest import save_mlp
from tests.fakes import FAST, FakeToolchain, Law


class SlowToEnd(FakeToolchain):
    """Notes whether the run's files were written when it began to end, and when it had ended."""

    written: tuple[bool, ...] = ()

    def close(self) -> None:
        before = Path("run/front.json").exists()
        until_s = time.monotonic() + 10.0
        while not Path("run/front.json").exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        self.written = before, Path("run/front.json").exists()
        super().close()


def test_it_ends_beside_the_writing_of_the_files_and_is_waited_for(
    tmp_path: Path, mlp_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_mlp(tmp_path / "model.onnx")
    shutil.copy(mlp_data, tmp_path / "data.npz")
    toolchain = SlowToEnd(Law([group.id for group in find_groups(load_model("model.onnx"))]))
    mptune.search("model.onnx", data="data.npz", budget=4, out="run", latency=FAST, open_toolchain=toolchain.open)
    assert toolchain.written == (False, True)
    assert (toolchain.opened, toolchain.closed) == (1, 1)
