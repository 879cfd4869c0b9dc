"""Progress on stderr: plain lines without a terminal, a few live lines in one."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mptune.engines.base import Failure, FailureKind, Progress, Stage
from mptune.reporting.terminal.progress import TerminalListener
from mptune.tuning.bench import Listener, count_down, passed_on
from mptune.tuning.evaluation import Origin
from tests.fakes import Diary
from tests.reporting.conftest import Bench

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")

Opened = tuple[io.TextIOWrapper, Callable[[], str]]
TIMEOUT = Failure(Stage.BUILD, FailureKind.TIMEOUT, "no answer after 1800 s", Path("logs/3.log"))


def feed(listener: Listener, bench: Bench) -> None:
    """The life of a short search."""
    listener.stage("reference")
    listener.warning("the calibration data are random")
    listener.evaluated(bench.evaluation(0, 2.0, 0.0, origin=Origin("seed", "all-fp32")), 1, 5)
    listener.evaluated(bench.evaluation(6, 0.9, 2.4e-2, origin=Origin("seed", "all-fp16")), 2, 5)
    listener.failed(bench.plan(3), "sampler", TIMEOUT, 3, 5)
    listener.failed(bench.plan(4), "sampler", "3 values are not finite", 4, 5)
    listener.evaluated(bench.evaluation(2, 1.2, 2e-3), 5, 5)
    listener.warning("the calibration data are random")


def test_plain_lines_where_there_is_no_terminal(bench: Bench) -> None:
    stream = io.StringIO()
    with TerminalListener(stream) as listener:
        feed(listener, bench)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == [
        *("reference", "warning: the calibration data are random"),
        "[1/5] 2.000 ms  1.00x  error 0  0/8 FP16/FP32  all-FP32",
    ]
    assert lines[4].startswith("[3/5] failed: build, timeout: no answer after 1800 s; log: logs/3.log (plan ")
    assert "3 values are not finite" in lines[5]
    assert len(lines) == 7, "a warning is shown once"
    assert "\x1b" not in stream.getvalue()
    listener.building(Progress("Building engine", 3, 6))
    assert len(stream.getvalue().splitlines()) == 7, "a build is no line of its own"
    listener.evaluated(bench.evaluation(1, 1.5, 1e-3, source="predicted", error_source="emulated"), 1, 2)
    assert "1.500 ms predicted  1.33x  error 1.0e-03 emulated" in stream.getvalue()


def test_a_log_says_when_groups_are_begun_and_done(bench: Bench) -> None:
    stream = io.StringIO()
    with TerminalListener(stream) as listener:
        for text in ("0 of 57 groups", "8 of 57 groups", "57 of 57 groups", "57 of 57 groups, now on samples 2 to 3"):
            listener.stage(f"one-group errors: {text}")
        listener.evaluated(bench.evaluation(0, 2.0, 0.0, origin=Origin("seed", "all-fp32")), 1, 5)
        listener.stage("one-group errors: 57 of 57 groups, now on samples 4 to 7")
        listener.stage("round 1 of 2")
        listener.stage("round 2 of 2")
    first, last, evaluated, *rounds = stream.getvalue().splitlines()
    assert (first, evaluated[:5]) == ("one-group errors: 0 of 57 groups", "[1/5]")
    assert last == "one-group errors: 57 of 57 groups", "no log ends with 0 of 57"
    assert rounds == ["round 1 of 2", "round 2 of 2"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """A real pseudo-terminal of 100 columns: its stream, and what has been written on it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)

    def read() -> str:
        stream.flush()
        text = b""
        with suppress(OSError):  # nothing more is there
            while part := os.read(ours, 65536):
                text += part
        return text.decode()

    with os.fdopen(theirs, "w") as stream:
        yield stream, read
    os.close(ours)


def test_live_lines_in_a_terminal(bench: Bench, terminal: Opened) -> None:
    stream, read = terminal
    with suppress(KeyboardInterrupt), TerminalListener(stream, max_error=1e-2) as listener:
        feed(listener, bench)
        listener.stage("confirming 3 plans")
        assert listener._live is not None
        listener._live.refresh()
        shown = read()
        raise KeyboardInterrupt
    assert "warning: the calibration data are random" in shown
    last = shown[shown.rindex("mptune") :]
    for text in ("5/5", "confirming 3 plans", "best, error <= 0.01", "1.200 ms", "used", "failures"):
        assert text in last
    assert "3 values are not finite" in last
    assert "\x1b[?25h" in read(), "the cursor comes back, after an error, too"


def test_no_color_is_honoured(bench: Bench, terminal: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream, read = terminal
    with TerminalListener(stream) as listener:
        feed(listener, bench)
    assert re.findall(r"\x1b\[(?:3[0-7]|38;5;\d+)m", read()) == []


def test_says_how_far_a_build_is(bench: Bench, terminal: Opened) -> None:
    stream, read = terminal
    with TerminalListener(stream) as listener:
        listener.evaluated(bench.evaluation(0, 2.0, 0.0), 1, 5)
        listener.building(Progress("Building engine", 3, 6))
        assert listener._live is not None
        listener._live.refresh()
        assert "evaluating plan 2: building engine, 3 of 6" in read()
        listener.evaluated(bench.evaluation(1, 1.5, 0.1), 2, 5)
        listener._live.refresh()
        shown = read()
        assert "building engine" not in shown[shown.rindex("mptune") :]


def test_the_best_so_far_follows_the_limit(bench: Bench) -> None:
    bests = [({}, 1.2), ({"max_error": 1e-1}, 0.9), ({"max_latency_ms": 1.5}, 1.2), ({"max_latency_ms": 1.0}, 0.9)]
    for limits, best_ms in bests:
        listener = TerminalListener(io.StringIO(), **limits)
        feed(listener, bench)
        assert listener._best is not None
        assert listener._best.latency.median_ms == best_ms


def test_the_time_that_is_left_counts_measurements_of_this_session(bench: Bench) -> None:
    listener = TerminalListener(io.StringIO())
    task = listener._bar.tasks[0]
    for done in range(31, 35):
        listener.evaluated(bench.evaluation(1, 1.5, 1e-3), done, 50)
    assert (task.completed, task.total) == (34, 50)
    assert sum(sample.completed for sample in task._progress) == 4, "30 plans were evaluated earlier"
    listener.remaining(34, 28)
    assert (task.completed, task.total) == (34, 62), "those that confirm the front are counted in"


def test_a_listener_need_not_count_down() -> None:
    count_down(Diary(), 1, 2)
    listener = TerminalListener(io.StringIO())
    listeners = passed_on(Diary(), listener)
    for done in range(1, 5):
        count_down(listeners, done, 10 - done)
    assert listener._bar.tasks[0].completed == 4
