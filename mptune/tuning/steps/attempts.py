"""Whose fault a failure is. A job that fails is tried once more in a fresh process.

After five faults in a row all-FP32, which ran before, is tried: where it fails too, no plan is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.engines.failures import describe, machine_error
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.listener import Listener

T = TypeVar("T")

TRIES = 2

NEEDED_TRIES = 3
"""Of jobs that a run cannot go on without: references, ranges, all-FP32."""

FAULTS_IN_A_ROW = 5
"""Failed processes in a row after which all-FP32 is tried."""


def may_be_the_machines(result: object) -> bool:
    """Whether a result is a failure that the machine may have caused, by a full disk or by killing the process."""
    return isinstance(result, Failure) and (result.is_machine_fault or result.is_inconclusive)


def begins_anew(result: object, toolchain: Toolchain, listener: Listener, what: str) -> bool:
    """Whether a job is worth another try; the process is ended then, so that the next job gets a fresh one."""
    if not isinstance(result, Failure) or not may_be_the_machines(result):
        return False
    listener.warning(f"{what} failed ({describe(result)}): trying again in a fresh process")
    toolchain.restart()
    return True


def run_job(
    job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str, tries: int = TRIES
) -> T | Failure:
    """Run a job, and again in a fresh process where its failure may be the machine's."""
    result = job()
    for _ in range(tries - 1):
        if not begins_anew(result, toolchain, listener, what):
            break
        result = job()
    return result


def run_needed_job(job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str) -> T | Failure:
    """As ``run_job``, for a job on which the whole run depends: a machine that fails each time is an error."""
    result = run_job(job, toolchain, listener, what, NEEDED_TRIES)
    if isinstance(result, Failure) and result.is_machine_fault:
        raise machine_error(result, NEEDED_TRIES)
    return result


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    Raises:
        RunError: the machine fails.
    """
    of_part = () if part is None else (part,)
    errors: list[OutputError | None] = []
    for batch in (plans, *([plan] for plan in plans if len(plans) > 1)):
        what = f"emulating {'plans' if len(batch) > 1 else f'plan {batch[0].fingerprint}'}"
        result = run_job(partial(toolchain.emulate, batch, *of_part), toolchain, listener, what)
        if not isinstance(result, Failure):
            errors += result
        elif result.is_machine_fault:
            raise machine_error(result, TRIES)
        elif len(batch) == 1:
            errors.append(None)
        if len(errors) == len(plans):
            break
    return errors


class Attempts:
    """Evaluates plans by this rule, and measures a doubtful one again: a process may go wrong.

    Attributes:
        faults: failed processes in a row, over all plans.
    """

    def __init__(self, toolchain: Toolchain, listener: Listener) -> None:
        self._toolchain, self._listener = toolchain, listener
        self.faults = 0
        self._has_doubts = True  # until a second measurement has confirmed a doubtful one

    def evaluate(
        self,
        plan: PrecisionPlan,
        which: SampleSet,
        fp32: Evaluation | None,
        doubt: Callable[[Measurement], str],
    ) -> Measurement | Failure:
        """Build, run and time a plan.

        Args:
            fp32: all-FP32, where it has run: the control.
            doubt: what speaks against a measurement, in words that a sound one in another process completes; else "".

        Raises:
            RunError: the control fails, too.
        """
        toolchain, listener = self._toolchain, self._listener
        is_profiled = which == "search" and toolchain.profiling == "along"
        tries = TRIES if plan.reduced_groups else NEEDED_TRIES
        result = toolchain.evaluate(plan, which, profile=is_profiled)
        for _ in range(tries - 1):
            if not begins_anew(result, toolchain, listener, f"plan {plan.fingerprint}"):
                break
            result = toolchain.evaluate(plan, which, profile=is_profiled)

        if isinstance(result, Failure):
            self.faults = self.faults + tries if may_be_the_machines(result) else 0
            if self.faults >= FAULTS_IN_A_ROW and fp32 is not None:
                toolchain.restart()
                control_job = partial(toolchain.evaluate, fp32.plan)
                control = run_job(control_job, toolchain, listener, "all-FP32, as a control,", NEEDED_TRIES)
                if isinstance(control, Failure) and may_be_the_machines(control):
                    tried = self.faults + NEEDED_TRIES
                    raise machine_error(control, tried, "all-FP32, which ran before, fails now too")
                self.faults = 0
            return result

        self.faults = 0
        if self._has_doubts and (why := doubt(result)):
            toolchain.restart()
            second = toolchain.evaluate(plan, which, profile=is_profiled)
            if isinstance(second, Failure) or doubt(second):
                self._has_doubts = False
            else:
                listener.warning(f"{why} in a fresh process: only the second measurement counts")
                return second
        return result
