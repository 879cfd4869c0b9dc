"""Runs of one session at the same time: how many there are, their order, and what happens when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mptune.engines.ort import side_by_side
from mptune.engines.ort.side_by_side import SideBySide

MIB = 1 << 20


@pytest.mark.parametrize(
    ("runs", "run_bytes", "threads", "expected"),
    [
        (12, MIB, 1, SideBySide(8, 1)),
        (3, MIB, 1, SideBySide(3, 2)),
        (12, 300 * MIB, 1, SideBySide(2, 4)),
        (12, MIB, 4, SideBySide(2, 4)),
        (12, 400 * MIB, 1, SideBySide()),
        (1, MIB, 1, SideBySide()),
        (12, None, 1, SideBySide()),
    ],
)
def test_cores_runs_and_memory_limit_what_goes_at_a_time(
    runs: int, run_bytes: int | None, threads: int, expected: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 8)
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 16 << 30)
    assert SideBySide.for_runs(runs, run_bytes, threads) == expected
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: 5 * MIB)
    assert SideBySide.for_runs(12, MIB) == SideBySide(2, 4)
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: None)
    assert SideBySide.for_runs(runs, run_bytes, threads) == SideBySide()


def test_results_come_in_order_from_runs_that_overlap() -> None:
    together = threading.Barrier(2, timeout=30.0)

    def call(number: int) -> Callable[[], int]:
        return lambda: (together.wait(), number)[1]

    assert SideBySide(2, 1).run([call(number) for number in range(6)]) == list(range(6))
    assert SideBySide().run([lambda: 1, lambda: 2]) == [1, 2]


def test_a_run_that_fails_ends_the_others() -> None:
    begun: list[int] = []

    def fail() -> None:
        raise ValueError("no memory")

    def call(number: int) -> Callable[[], None]:
        return lambda: begun.append(number)

    with pytest.raises(ValueError, match="no memory"):
        SideBySide(2, 1).run([fail, *(lambda: threading.Event().wait(0.2) for _ in range(2)), *map(call, range(50))])
    assert len(begun) < 50
