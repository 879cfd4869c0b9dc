"""What the steps of a call share (``Bench``), who is told of it (``Listener``), and what ends it early (``Limits``).

Whose fault a failure is: a job that fails is tried once more in a fresh process. After five faults in a row all-FP32,
which ran before, is tried: where it fails too, no plan is at fault.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, cast

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, Progress, SampleSet
from mptune.engines.failures import describe, machine_error
from mptune.errors import EndedEarlyError
from mptune.graph.plan import PrecisionPlan
from mptune.printable import printable
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import Evaluation, Origin

if TYPE_CHECKING:
    from mptune.engines.toolchains.toolchain import Toolchain
    from mptune.tuning.record.record import StudyRecord

T = TypeVar("T")

LOGGER = logging.getLogger("mptune")
LOGGER.addHandler(logging.NullHandler())  # else Python prints warnings of a program that configures no logging

TRIES = 2

NEEDED_TRIES = 3
"""Of jobs that a run cannot go on without: references, ranges, all-FP32."""

FAULTS_IN_A_ROW = 5
"""Failed processes in a row after which all-FP32 is tried."""

HOPELESS = 20
"""This many plans that fail, while none with FP16 in it ever ran, end the search: each may cost hours."""


class Listener(Protocol):
    """Is called at each step of a search or confirmation, from the thread that runs it; must return soon.

    It may have ``remaining(done, left)``, too: how many measurements are done, and how many are left, re-measuring
    counted in.
    """

    def stage(self, text: str) -> None:
        """A part of the work begins, such as ``reference`` or ``re-measuring 7 plans``."""
        return

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """A plan was evaluated and is finite; ``done`` of ``budget`` are spent."""
        return

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """A plan failed through its own fault, or (text) its outputs are not finite."""
        return

    def building(self, progress: Progress) -> None:
        """How far a long build is."""
        return

    def warning(self, text: str) -> None:
        """Something that a person should know, one line."""
        return


class Logged(Listener):
    """The listener of the standard logger ``mptune``: stages and plans are INFO, what fails or warns is WARNING."""

    def stage(self, text: str) -> None:
        """Counts within a stage are DEBUG."""
        LOGGER.log(logging.DEBUG if re.search(r"\d of \d", text) else logging.INFO, "%s", printable(text))

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """The plan with its latency and its error."""
        LOGGER.info("[%d/%d] %s", done, budget, printable(str(evaluation)))

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """The plan with the reason."""
        LOGGER.warning("[%d/%d] %s", done, budget, printable(failure_text(plan, origin, failure)))

    def warning(self, text: str) -> None:
        """A retry is one."""
        LOGGER.warning("%s", printable(text))


def failure_text(plan: PrecisionPlan, origin: Origin, failure: Failure | str) -> str:
    """What failed, why, and where its log is, one line."""
    reason = failure if isinstance(failure, str) else describe(failure)
    if isinstance(failure, Failure) and failure.log_path is not None:
        reason += f"; log: {failure.log_path}"
    return f"failed: {reason} (plan {plan.fingerprint}, {origin})"


def tell_outcome(
    listener: Listener, plan: PrecisionPlan, origin: Origin, outcome: Evaluation | Failure, done: int, budget: int
) -> None:
    """Tell a listener what came of a plan: evaluated where it is finite, else failed, and why."""
    if isinstance(outcome, Evaluation) and outcome.is_finite:
        listener.evaluated(outcome, done, budget)
    elif isinstance(outcome, Failure):
        listener.failed(plan, origin, outcome, done, budget)
    else:
        count = outcome.counted.non_finite
        why = f"{count} values are NaN or Inf where the reference has none"
        listener.failed(plan, origin, why if count else f"its {outcome.metric} is not finite", done, budget)


def count_down(listener: Listener, done: int, left: int) -> None:
    """Say how much is left, where the listener asks for it."""
    if hasattr(listener, "remaining"):
        listener.remaining(done, left)


def announce(listener: Listener, record: StudyRecord, settings: SearchSettings) -> None:
    """Say how much is left of a search: of its budget, and to re-measure a front as long as that of now."""
    left = min(settings.budget, record.space.size + 1) - record.spent  # all-FP32 may be outside of the space
    count_down(listener, record.spent, max(0, left) + min(record.spent, settings.confirm_points))


def passed_on(*listeners: Listener) -> Listener:
    """A listener that calls several: each warning once, and ``remaining`` of those that have it."""
    warned: set[str] = set()

    class Several:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> None:
                is_repeated = name == "warning" and arguments[0] in warned
                warned.update(arguments[:1] if name == "warning" else ())
                for listener in () if is_repeated else listeners:
                    if name != "remaining" or hasattr(listener, name):
                        getattr(listener, name)(*arguments)

            return call

    return cast("Listener", Several())


class Stop(str, Enum):
    """Why a search stopped."""

    BUDGET = "the budget is spent"
    TIMEOUT = "the time is over"
    DISK = "the run directory has reached --max-disk"
    CONVERGED = "no plan is expected to improve the front beyond the noise"
    FP16_IS_ENOUGH = "FP16 in all groups that may have it meets the limits, and no plan is expected to be faster"
    EXHAUSTED = "every plan of the search space has been evaluated"
    HOPELESS = f"{HOPELESS} plans failed, and no plan with FP16 in it has ever run"


class Limits:
    """What ends a call before its budget is spent: the time, or the size of its run directory.

    Asked before each evaluation and each measurement again.
    """

    def __init__(
        self,
        settings: SearchSettings,
        run_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
    ) -> None:
        self._timeout_s, self._max_bytes, self._run_dir = settings.timeout_s, settings.max_disk_bytes, run_dir
        self._clock, self._started_s = clock, clock() - max(0.0, elapsed_s)
        self._sizes_bytes: list[int] = []  # whenever it was asked

    @property
    def elapsed_s(self) -> float:
        """Seconds since the time began."""
        return self._clock() - self._started_s

    @property
    def start_s(self) -> float:
        """When the time began, in seconds since 1970, which other hosts know too."""
        return time.time() - self.elapsed_s

    def reached(self) -> Stop | None:
        """The limit that is reached; None where another evaluation may start."""
        if self._timeout_s is not None and self.elapsed_s >= self._timeout_s:
            return Stop.TIMEOUT
        if self._run_dir is None or self._max_bytes is None:
            return None
        self._sizes_bytes.append(size_of(self._run_dir))
        largest_plan = max((after - before for before, after in pairwise(self._sizes_bytes)), default=0)
        return Stop.DISK if self._sizes_bytes[-1] + max(largest_plan, 0) > self._max_bytes else None

    def baseline_of(self, record: StudyRecord) -> Evaluation:
        """The evaluation of all-FP32; an error where a limit was reached before: there is no front then."""
        if (fp32 := record.baseline()) is not None:
            return fp32
        stop = self.reached()
        raise EndedEarlyError(
            f"{'a limit was reached' if stop is None else stop.value}, and all-FP32 was not measured yet: there is no "
            "front, and no plan is chosen",
            f"what was computed is kept in {self._run_dir}: the same command resumes it; if it ends here again, "
            "raise --timeout or --max-disk",
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, each once however many names it has; links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may delete its temporary files meanwhile
                status = Path(parent, name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _may_be_the_machines(result: object) -> TypeGuard[Failure]:
    """Whether a result is a failure that the machine may have caused, by a full disk or by killing the process."""
    return isinstance(result, Failure) and (result.is_machine_fault or result.is_inconclusive)


def _begins_anew(result: object, toolchain: Toolchain, listener: Listener, what: str) -> bool:
    """Whether a job is worth another try; the process is ended then, so that the next job gets a fresh one."""
    if not _may_be_the_machines(result):
        return False
    listener.warning(f"{what} failed ({describe(result)}): trying again in a fresh process")
    toolchain.restart()
    return True


def run_job(
    job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str, tries: int = TRIES
) -> T | Failure:
    """Run a job, and again in a fresh process where its failure may be the machine's."""
    result = job()
    while (tries := tries - 1) and _begins_anew(result, toolchain, listener, what):
        result = job()
    return result


def run_needed_job(job: Callable[[], T | Failure], toolchain: Toolchain, listener: Listener, what: str) -> T | Failure:
    """As ``run_job``, for a job on which the whole run depends: a machine that fails each time is an error."""
    result = run_job(job, toolchain, listener, what, NEEDED_TRIES)
    if isinstance(result, Failure) and result.is_machine_fault:
        raise machine_error(result, NEEDED_TRIES)
    return result


@dataclass
class Bench:
    """Where plans are evaluated: the study that holds what came of them, and the toolchain.

    Attributes:
        faults: failed processes in a row, over all plans.
        has_doubts: until a second measurement has confirmed a doubtful one.
    """

    record: StudyRecord
    toolchain: Toolchain
    settings: SearchSettings
    listener: Listener
    limits: Limits
    faults: int = 0
    has_doubts: bool = True

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet, doubt: Callable[[Measurement], str]
    ) -> Measurement | Failure:
        """Build, run and time a plan, and measure it again where that is doubtful: a process may go wrong.

        Args:
            doubt: what speaks against a measurement, in words that a sound one in another process completes; else "".

        Raises:
            RunError: all-FP32, which ran before, fails, too.
        """
        toolchain, listener = self.toolchain, self.listener
        is_profiled = which == "search" and toolchain.profiling == "along"
        tries = left = TRIES if plan.reduced_groups else NEEDED_TRIES
        result = toolchain.evaluate(plan, which, profile=is_profiled)
        while (left := left - 1) and _begins_anew(result, toolchain, listener, f"plan {plan.fingerprint}"):
            result = toolchain.evaluate(plan, which, profile=is_profiled)

        if isinstance(result, Failure):
            self.faults = self.faults + tries if _may_be_the_machines(result) else 0
            if self.faults >= FAULTS_IN_A_ROW and (fp32 := self.record.baseline()) is not None:
                toolchain.restart()
                control_job = partial(toolchain.evaluate, fp32.plan)
                control = run_job(control_job, toolchain, listener, "all-FP32, as a control,", NEEDED_TRIES)
                if _may_be_the_machines(control):
                    tried = self.faults + NEEDED_TRIES
                    raise machine_error(control, tried, "all-FP32, which ran before, fails now too")
                self.faults = 0
            return result

        self.faults = 0
        if self.has_doubts and (why := doubt(result)):
            toolchain.turn_elsewhere(plan)
            second = toolchain.evaluate(plan, which, profile=is_profiled)
            if isinstance(second, Failure) or doubt(second):
                self.has_doubts = False
            else:
                listener.warning(f"{why} in another process: only the second measurement counts")
                return second
        return result

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> list[OutputError | None]:
        """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

        Raises:
            RunError: the machine fails.
        """
        of_part = () if part is None else (part,)
        errors: list[OutputError | None] = []
        for batch in (plans, *([plan] for plan in plans if len(plans) > 1)):
            what = f"emulating {'plans' if len(batch) > 1 else f'plan {batch[0].fingerprint}'}"
            job = partial(self.toolchain.emulate, batch, *of_part)
            result = run_job(job, self.toolchain, self.listener, what)
            if not isinstance(result, Failure):
                errors += result
            elif result.is_machine_fault:
                raise machine_error(result, TRIES)
            elif len(batch) == 1:
                errors.append(None)
            if len(errors) == len(plans):
                break
        return errors
