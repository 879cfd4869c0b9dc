"""Runs of one name in one database: they share a study only where their identity is equal."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import mptune
from mptune.errors import RunError
from mptune.rundir import read_run
from mptune.settings import DataSettings, LatencySettings, TensorRtSettings
from mptune.tuning.front import Front
from mptune.tuning.result import read_record
from tests.conftest import save_mlp
from tests.test_joining import Opener

pytestmark = pytest.mark.usefixtures("opened_here")

SPACES = Path(mptune.__file__).parent.parent / "search_spaces"
ROWS = np.random.default_rng(3).normal(size=(12, 32)).astype(np.float32)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/x.db"


def search(tmp_path: Path, host: str, storage: str, **changed: Any) -> Front:
    """A search in HOST/run.mptune."""
    diaries = tmp_path / "diaries"
    diaries.mkdir(exist_ok=True)
    model = save_mlp(tmp_path / "model.onnx") if not (tmp_path / "model.onnx").exists() else tmp_path / "model.onnx"
    options = {"data": ROWS, "budget": 3, "confirm_rounds": 1, "open_toolchain": Opener(diaries, 0.0), **changed}
    return mptune.search(options.pop("model", model), out=tmp_path / host / "run.mptune", storage=storage, **options)


def study(tmp_path: Path, host: str) -> str:
    return read_run(tmp_path / host / "run.mptune")[1].study


def evaluated_in(place: Path, storage: str) -> list[str]:
    directory, file = read_run(place)
    with contextlib.closing(read_record(directory, file, storage)) as record:
        return [evaluation.plan.fingerprint for evaluation in record.evaluations()]


def check_two_hosts(tmp_path: Path, storage: str) -> None:
    """An equal search shares, another one is refused, and a fresh one leaves what is there alone."""
    search(tmp_path, "a", storage, budget=1)
    before = evaluated_in(tmp_path / "a" / "run.mptune", storage)
    search(tmp_path, "b", storage, budget=3, max_error=0.5, timeout_s=600.0)
    shared = evaluated_in(tmp_path / "b" / "run.mptune", storage)
    assert shared[:1] == before
    assert len(shared) == 3
    assert evaluated_in(tmp_path / "a" / "run.mptune", storage) == shared

    with pytest.raises(RunError, match="another version of the data") as refused:
        search(tmp_path, "c", storage, data=ROWS + 1)
    assert "\n" not in refused.value.message
    assert "the same version of the data" in refused.value.hint
    assert search(tmp_path, "c", storage, data=ROWS + 1, budget=1, fresh=True).evaluations == 1
    assert search(tmp_path, "c", storage, data=ROWS + 1, budget=2).evaluations == 2, "and goes on with it"

    search(tmp_path, "b", storage, budget=2, fresh=True)
    assert len(evaluated_in(tmp_path / "b" / "run.mptune", storage)) == 2
    for kept in ("a/run.mptune", "b/run.mptune.old-1"):
        assert evaluated_in(tmp_path / kept, storage) == shared
    assert mptune.report(tmp_path / "b" / "run.mptune.old-1", storage=storage).evaluations == 3
    search(tmp_path, "d", storage, budget=2)
    assert study(tmp_path, "d") == study(tmp_path, "a") == "run"
    assert study(tmp_path, "b").startswith("run 2"), "named with the time"


def test_two_hosts_with_one_database(tmp_path: Path, storage: str) -> None:
    check_two_hosts(tmp_path, storage)


@pytest.mark.slow
def test_each_part_of_the_identity_counts(tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text((SPACES / "default.toml").read_text() + "\n# another one\n")
    np.savez("labels.npz", label=np.arange(12))
    other = onnx.load(save_mlp(tmp_path / "model.onnx"))
    other.graph.node[0].name = "renamed"
    device = {"open_toolchain": Opener(tmp_path / "diaries", 0.0, device="Fake 2000")}
    changed: dict[str, dict[str, Any]] = {
        "model": {"model": other},
        "version of the data": {"data": ROWS[::-1]},
        "version of the labels": {"labels": "labels.npz"},
        "version of the space": {"space": "space.toml"},
        "--seed (0 there, 1 here)": {"seed": 1},
        "metric (worst_part there, max_abs here)": {"metric": "max_abs"},
        "--tf32 (off there, on here)": {"tf32": True},
        "--precisions (fp32 fp16 there, fp32 bf16 here)": {"precisions": ("fp32", "bf16")},
        "--batch (1 there, 2 here)": {"batch": 2},
        "latency warmup ms (200.0 there, 1.0 here)": {"latency": LatencySettings(warmup_ms=1.0)},
        "tensorrt workspace mb (none there, 8 here)": {"tensorrt": TensorRtSettings(workspace_mb=8)},
        "--shapes (none there, x:1x32,2x32,4x32 here)": {"shapes": {"x": ((1, 32), (2, 32), (4, 32))}},
        "held out fraction (0.25 there, 0.5 here)": {"data_settings": DataSettings(held_out_fraction=0.5)},
        "target (auto: fake on Fake 1000 there, auto: fake on Fake 2000 here)": device,
    }
    search(tmp_path, "a", storage, budget=1)
    for number, (named, settings) in enumerate(changed.items()):
        with pytest.raises(RunError) as refused:
            search(tmp_path, f"b{number}", storage, **settings)
        assert f"another {named}" in refused.value.message


def test_what_names_an_equal_search_space_does_not_count(tmp_path: Path, storage: str) -> None:
    shutil.copy(SPACES / "default.toml", tmp_path / "mine.toml")
    search(tmp_path, "a", storage, budget=1)
    with pytest.raises(RunError, match=r"another target .*Fake 1000 there.*Fake 2000 here") as refused:
        search(tmp_path, "b", storage, open_toolchain=Opener(tmp_path / "diaries", 0.0, device="Fake 2000"))
    assert "give this run another name" in refused.value.hint
    search(tmp_path, "b", storage, budget=4, space=tmp_path / "mine.toml")
    assert study(tmp_path, "a") == study(tmp_path, "b"), "nor does the budget, by which the granularity was fitted"


def test_a_fresh_search_that_was_interrupted_stays_a_new_one(tmp_path: Path, storage: str) -> None:
    search(tmp_path, "a", storage, budget=1)

    def stops(*_: object) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, "a", storage, fresh=True, open_toolchain=stops)
    search(tmp_path, "a", storage, budget=2)
    assert len(evaluated_in(tmp_path / "a" / "run.mptune", storage)) == 2
    assert len(evaluated_in(tmp_path / "a" / "run.mptune.old-1", storage)) == 1


def test_a_script_under_the_same_name_is_the_same_script(tmp_path: Path, storage: str) -> None:
    script = tmp_path / "score.py"
    script.write_text("def score(outputs, reference):\n    return 0.5\n")
    own, alone = f"{script}:score", {"data": ROWS, "target": "jetson-orin-nano-8gb", "out": tmp_path / "run.mptune"}
    metric = ["relative_l2", own]
    search(tmp_path, "a", storage, budget=1, metric=metric)
    mptune.search(tmp_path / "model.onnx", metric=own, budget=2, **alone)
    script.write_text("def score(outputs, reference):\n    return 0.25\n")
    for again in (
        lambda: search(tmp_path, "a", storage, budget=3, metric=metric),
        lambda: mptune.search(tmp_path / "model.onnx", metric=own, budget=3, **alone),
    ):
        with pytest.raises(RunError, match=r"the metric .*score.py:score is not what it was"):
            again()
    for named, words in ((None, "is not run unless you name it"), (own, "is not what it was")):
        with pytest.raises(RunError, match=words):
            mptune.worker(tmp_path / "a/run.mptune", metric=named, storage=storage, open_toolchain=Opener(tmp_path))


def test_a_profile_with_other_figures_is_another_target(tmp_path: Path, storage: str) -> None:
    profile = SPACES / "targets" / "jetson-orin-nano-8gb.toml"
    mine = {"model": save_mlp(tmp_path / "model.onnx"), "data": ROWS, "budget": 2, "target": tmp_path / "mine.toml"}
    (tmp_path / "mine.toml").write_text(profile.read_text())
    mptune.search(out=tmp_path / "run.mptune", **mine)
    bandwidth = next(line for line in profile.read_text().splitlines() if line.startswith("bandwidth_gbps"))
    (tmp_path / "mine.toml").write_text(profile.read_text().replace(bandwidth, "bandwidth_gbps = 33.0", 1))
    with pytest.raises(RunError, match="another version of the profile"):
        mptune.search(out=tmp_path / "run.mptune", **{**mine, "budget": 3})
