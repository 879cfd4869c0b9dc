"""The time that is left follows the last plans."""

from __future__ import annotations

from mptune.reporting.terminal.progress import RemainingTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def finish(remaining: RemainingTime, clock: Clock, first: int, durations_s: list[float]) -> None:
    for number, duration_s in enumerate(durations_s, first):
        clock.now_s += duration_s
        remaining.add(number)


def test_nothing_is_said_before_two_plans_were_timed() -> None:
    clock = Clock()
    remaining = RemainingTime(clock)
    finish(remaining, clock, 40, [500.0, 10.0])
    assert remaining.seconds(5) is None
    finish(remaining, clock, 42, [10.0])
    assert remaining.seconds(5) == 50.0


def test_it_learns_from_the_last_plans() -> None:
    clock = Clock()
    remaining = RemainingTime(clock)
    finish(remaining, clock, 1, [60.0] * 40)
    assert remaining.seconds(10) == 600.0
    finish(remaining, clock, 41, [6.0] * 20)
    assert remaining.seconds(10) == 60.0


def test_a_plan_that_hangs_does_not_count_for_the_next() -> None:
    clock = Clock()
    remaining = RemainingTime(clock)
    finish(remaining, clock, 1, [10.0] * 6 + [1800.0] + [10.0] * 3)
    assert remaining.seconds(4) == 40.0


def test_it_counts_down_while_a_plan_is_built() -> None:
    clock = Clock()
    remaining = RemainingTime(clock)
    finish(remaining, clock, 1, [10.0] * 4)
    clock.now_s += 4.0
    assert remaining.seconds(2) == 16.0
    clock.now_s += 40.0
    assert remaining.seconds(2) == 0.0
