"""What every toolchain must do, run against each kind that can run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mptune.engines.base import Failure, Measurement
from mptune.engines.context import RunContext
from mptune.engines.spread import LEAST_VALUES
from mptune.engines.toolchains.choose import open_toolchain
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.plan import PrecisionPlan
from mptune.targets.detect import detect_gpus
from mptune.targets.target import load_target
from tests.device.machines import become

WITHOUT_GPU = pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU")
KINDS = [
    "cpu",
    "jetson-orin-nano-8gb",
    pytest.param("rtx-4500-ada", marks=[pytest.mark.tensorrt_rtx, WITHOUT_GPU]),
    pytest.param("ada", marks=[pytest.mark.tensorrt_rtx, WITHOUT_GPU]),
]


@pytest.fixture(params=KINDS)
def tools(request: pytest.FixtureRequest, mlp_context: RunContext, tmp_path: Path) -> Iterator[Toolchain]:
    """Measured on the CPU; predicted; predicted with engines built; measured by TensorRT on a device in host memory."""
    with ExitStack() as stack:
        target, context = request.param, mlp_context
        if target == "ada":
            here = stack.enter_context(become("ada", tmp_path / "machine", is_alone=True))
            stack.callback(lambda: here.broken() == [] or pytest.fail(str(here.broken())))
            target, context = here.machine.target, mlp_context.with_settings(engine="tensorrt")
        tools = stack.enter_context(open_toolchain(load_target(target), context))
        for which in ("search", "held_out"):
            assert not isinstance(tools.reference(which), Failure)
        yield tools


def measured(tools: Toolchain, plan: PrecisionPlan, which: str = "search") -> Measurement:
    found = tools.evaluate(plan, which)
    assert isinstance(found, Measurement), found
    assert (found.latency.source, found.error_source) == (tools.latency_source, tools.error_source)
    return found


def test_plans_are_built_run_and_timed_or_predicted(
    tools: Toolchain, fp32: PrecisionPlan, fp16: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_measured = tools.latency_source == "measured"
    assert tools.error_source == ("measured" if is_measured else "emulated")
    base, half, held_out = (measured(tools, *what) for what in ((fp32,), (fp16,), (fp16, "held_out")))
    assert base.error.value("relative_l2") < 1e-6 < half.error.value("relative_l2") < 1e-1
    assert held_out.error != half.error
    reopened = tools.reopen(fp16, 2)
    assert not isinstance(reopened, Failure)
    tools.start_ahead()
    assert tools.worker._ahead is None, "on a CPU it would take cores from what is timed"
    monkeypatch.setattr("mptune.engines.toolchains.toolchain.has_room_beside", lambda provider: True)
    tools.start_ahead()
    ahead = tools.worker._ahead
    tools.restart()
    again = measured(tools, fp16)
    assert tools.worker.pid == (ahead and ahead.popen.pid), "the device in memory runs its jobs in this process"
    assert again.error == half.error
    if is_measured:
        assert LEAST_VALUES <= len(half.latency.raw_ms) == len(half.baseline.raw_ms) <= 10
        assert (base.drift, half.power_mode) == (1.0, None)
        name = base.latency.session.baseline
        assert [session.baseline for session in reopened] == [name] * 2
        is_here = tools.worker.pid is None
        assert (again.latency.session.baseline == name) is is_here, "of another process"
    else:
        assert (reopened, base.baseline, base.error.value("relative_l2")) == ((), None, 0.0)
    if base.engine_path is not None:
        assert {path.parent for path in (base.engine_path, half.engine_path)} == {tools.context.engines_dir}
        assert (again.engine_path, again.build_s) == (half.engine_path, 0.0), "what was measured is what ships"
    tools.close()
    assert not list(tools.context.weights_dir.glob("*.onnx"))
    assert not list(tools.context.logs_dir.glob("*"))
