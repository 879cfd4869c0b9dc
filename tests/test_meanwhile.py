"""A call beside what the caller does."""

from __future__ import annotations

import threading

import pytest

from mptune.meanwhile import meanwhile


def test_it_runs_beside_the_caller_and_gives_what_the_call_gave() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work(value: int) -> tuple[int, str]:
        begun.set()
        assert may_end.wait(10.0)
        return value, threading.current_thread().name

    result = meanwhile(work, 3)
    assert begun.wait(10.0), "the call runs while the caller does not wait for it"
    assert not result.done()
    may_end.set()
    value, thread = result.result()
    assert (value, thread != threading.current_thread().name) == (3, True)


def test_what_the_call_raised_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        meanwhile(fail).result()
