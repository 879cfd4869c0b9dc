"""The progress of a search on stderr, with the time that is left; plain lines where there is no terminal."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

import rich.progress
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mptune.choice import Choice
from mptune.engines.base import Failure, Progress
from mptune.graph.plan import PrecisionPlan
from mptune.printable import printable
from mptune.reporting.terminal.console import make_console
from mptune.reporting.text import origin_name
from mptune.tuning.bench import failure_text
from mptune.tuning.choosing import choose
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.texts import format_error, format_speedup, group_counts, latency_text

_RECENT_FAILURES = 3
_LOG_EVERY_S = 60.0
"""Interval at which a log gets a line with how far a long step is."""
_ESTIMATE_OVER_S = 3600.0
"""The time that is left follows the plans of the last hour: builds grow faster with a timing cache."""
_COUNT = re.compile(r"\b(\d+) of (?!\1 )(?=\d+ groups)|, now on samples \d+ to \d+|(?<= groups)$")
"""What changes in a step that counts groups; that all of them are done is a step of its own."""


class TerminalListener:
    """Shows a search while it runs; the ``Listener`` of ``mptune.tuning.bench``.

    In a terminal a few lines are redrawn at the bottom, and warnings and failures stay above them. Elsewhere (a pipe,
    a log file, CI) there is one plain line per event. Use it as a context manager, so that the terminal is left clean.
    Where the stream (stderr by default) goes away, such as a terminal that is closed or a pipe without a reader, the
    rest is silent: a search does not end for that. The limits are those of the best plan so far.
    With ``quiet`` only warnings are shown.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        max_error: float | None = None,
        max_latency_ms: float | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self._console = make_console(sys.stderr if stream is None else stream)
        self._quiet = quiet
        self._limits = Choice(max_error=max_error, max_latency_ms=max_latency_ms)
        self._stage, self._detail = "starting", ""
        columns = (
            TextColumn("mptune"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("used,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = rich.progress.Progress(*columns, console=self._console, speed_estimate_period=_ESTIMATE_OVER_S)
        self._task = self._bar.add_task("search", total=None)
        self._counts_down = False
        self._logged_s: dict[str, float] = {}
        self._evaluations: list[Evaluation] = []
        self._best: Evaluation | None = None
        self._failures: list[str] = []
        self._warned: set[str] = set()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal and not quiet:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> TerminalListener:
        if self._live is not None:
            with self._while_there():
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with self._while_there():
                self._live.stop()
            self._live = None

    def stage(self, text: str) -> None:
        """Show the current step; in a log, one that counts groups is shown at first, now and then, and at its end."""
        self._stage, self._detail = text, ""
        now_s, step = time.monotonic(), _COUNT.sub("", text)
        is_due = not _COUNT.search(text) or now_s - self._logged_s.get(step, -math.inf) >= _LOG_EVERY_S
        if self._live is None and is_due:
            self._logged_s[step] = now_s
            self._print(text)

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """Show a plan that was built, run and timed."""
        self._evaluations.append(evaluation)
        choice = choose(self._evaluations, self._limits, (evaluation.metric,))
        best = choice.chosen if choice.unmet is None else None
        self._best = next((e for e in self._evaluations if e.plan.fingerprint == best), None)
        self._advance(_figures(evaluation), done, budget)

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """Show a plan without a result, with the reason and the path of the log."""
        self._failures.append(failure_text(plan, origin, failure))
        self._advance(self._failures[-1], done, budget)

    def building(self, progress: Progress) -> None:
        """Show the progress of a build, where lines are redrawn."""
        self._detail = f": {progress.phase.lower()}, {progress.done} of {progress.steps}"

    def remaining(self, done: int, left: int) -> None:
        """Show how many measurements are done and left, those that confirm the front counted in."""
        self._counts_down = True
        self._advance_bar(done, done + left)

    def warning(self, text: str) -> None:
        """Show a warning once; it stays visible."""
        if text not in self._warned:
            self._warned.add(text)
            self._print(f"warning: {text}", style="yellow", always=True)

    @property
    def warned(self) -> frozenset[str]:
        """The warnings that were shown."""
        return frozenset(self._warned)

    def _print(self, text: str, style: str = "", *, always: bool = False) -> None:
        if self._quiet and not always:
            return
        with self._while_there():
            self._console.print(Text(printable(text), style=style), soft_wrap=self._live is None)

    @contextlib.contextmanager
    def _while_there(self) -> Iterator[None]:
        """Write; the first time that fails is the last time that it is tried."""
        try:
            yield
        except (OSError, ValueError):  # a stream that was closed in this process raises ValueError
            self._console.quiet = True

    def _advance(self, line: str, done: int, budget: int) -> None:
        if not self._counts_down:
            self._advance_bar(done, budget)
        self._detail = ""
        if done < budget:
            self._stage = f"evaluating plan {done + 1}"
        if self._live is None:
            self._print(f"[{done:>{len(str(budget))}}/{budget}] {line}")

    def _advance_bar(self, done: int, whole: int) -> None:
        if self._bar.tasks[0].total is None:  # plans of earlier sessions do not count
            self._bar.reset(self._task, completed=max(0, done - 1), total=whole)
        self._bar.update(self._task, completed=done, total=whole)

    def _render(self) -> RenderableType:
        """The lines that are redrawn at the bottom of the terminal."""
        limits = self._limits
        best = "best" if limits.max_error is None else f"best, error <= {limits.max_error:g}"
        best += "" if limits.max_latency_ms is None else f", <= {limits.max_latency_ms:g} ms"
        rows = [("now", self._stage + self._detail, "")]
        if self._evaluations or self._failures:
            rows.append((best, "none yet" if self._best is None else _figures(self._best), "green"))
        if self._evaluations:
            rows.append(("last", _figures(self._evaluations[-1]), ""))
        recent = self._failures[-_RECENT_FAILURES:]
        rows += [(f"{len(self._failures)} failures" if k == 0 else "", text, "red") for k, text in enumerate(recent)]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=len(best))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for name, text, style in rows:
            grid.add_row(name, Text(printable(text), style=style))
        return Group(self._bar.get_renderable(), grid)


def _figures(evaluation: Evaluation) -> str:
    """The figures of a plan, the most important first."""
    latency, plan = evaluation.latency, evaluation.plan
    predicted = "" if latency.source == "measured" else " predicted"
    emulated = "" if evaluation.error_source == "measured" else " emulated"
    parts = (
        f"{latency_text(evaluation)} ms{predicted}",
        format_speedup(evaluation.speedup),
        f"error {format_error(evaluation.error_value)}{emulated}",
        f"{group_counts(plan)} {'FP16+BF16/FP32' if plan.bf16_groups else 'FP16/FP32'}",
        origin_name(evaluation),
    )
    return "  ".join(parts)
