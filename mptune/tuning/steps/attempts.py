"""Whose fault a failure is. A job that fails is tried once more in a fresh process.

After five faults in a row all-FP32, which ran before, is tried: where it fails too, no plan is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from mptune.engines.base import Failure, Measurement
from mptune.engines.failures import describe, machine_error
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation
from mptune.tuning.listener import Listener
from mptune.tuning.steps.baseline import check_baseline

T = TypeVar("T")

FAULTS_IN_A_ROW = 5
"""Failed processes in a row after which all-FP32 is tried."""


def may_be_the_machines(result: object) -> bool:
    """Whether a result is a failure that the machine may have caused, by a full disk or by killing the process."""
    return isinstance(result, Failure) and (result.is_machine_fault or result.is_inconclusive)


def try_twice(job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str) -> T | Failure:
    """Run a job, and once more in a fresh process where its failure may be the machine's."""
    result = job()
    if isinstance(result, Failure) and may_be_the_machines(result):
        listener.warning(f"{what} failed ({describe(result)}): trying again in a fresh process")
        toolchain.restart()
        result = job()
    return result


def in_fresh_processes(
    job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str
) -> T | Failure:
    """As ``try_twice``, for a job that no other one can replace: a machine that fails twice is an error."""
    result = try_twice(job, toolchain, listener, what)
    if isinstance(result, Failure) and result.is_machine_fault:
        raise machine_error(result, 2)
    return result


def check_machine(
    all_fp32: Callable[[], object | Failure], toolchain: Toolchain, listener: Listener, faults: int
) -> None:
    """Try all-FP32, in a fresh process, after so many faults in a row; an error where it fails, too."""
    toolchain.restart()
    control = try_twice(all_fp32, toolchain, listener, "all-FP32, as a control,")
    if isinstance(control, Failure) and may_be_the_machines(control):
        raise machine_error(control, faults + 2, "all-FP32, which ran before, fails now too")


def doubt(evaluation: Evaluation, *, tf32: bool) -> str:
    """What speaks against a measurement, in words that a sound one in another process completes; else empty."""
    if evaluation.origin == ORIGIN_FP32:
        wrong = any(finding.severity == "error" for finding in check_baseline(evaluation.error, tf32=tf32, skip=True))
        return "the all-FP32 engine was off against the reference, and agrees with it" if wrong else ""
    plan = f"plan {evaluation.plan.fingerprint}"
    if evaluation.disagrees:
        return f"the measured and emulated errors of {plan} disagreed, and agree"
    if evaluation.is_finite or evaluation.emulated == math.inf:
        return ""
    return f"{plan} gave NaN or Inf, and gives none"


def once_more(
    job: Callable[[], Measurement | Failure],
    first: Measurement,
    doubt_of: Callable[[Measurement], str],
    toolchain: Toolchain,
    listener: Listener,
) -> Measurement:
    """A doubtful measurement, or one in a fresh process where that is sound: a process may go wrong."""
    toolchain.restart()
    second = job()
    if isinstance(second, Failure) or doubt_of(second):
        return first
    listener.warning(f"{doubt_of(first)} in a fresh process: only the second measurement counts")
    return second
