"""Damage in the middle of a journal: which lines cannot be read, and a journal without them.

A line is one operation. Those on trials name the trial by its number, which is how many were created before it. So
where the line that is lost created a trial, an empty one takes its place: otherwise all later operations would be
taken for those of other trials.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mptune.data.numbers import decode_float
from mptune.engines.timing.session_timing import SessionTiming
from mptune.errors import RunError
from mptune.files import write_bytes, writing
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.record.backends.folding import Operation
from mptune.tuning.record.backends.replay import SharingReplay

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError)
"""What Optuna raises at an operation that cannot be carried out."""

_NUMBERS = frozenset(range(11))  # Optuna's operations


def decode_evaluation(document: Any, number: int, where: str) -> Evaluation:
    """The evaluation that a trial's attribute holds.

    Raises:
        RunError: it holds something else.
    """
    with _decoding(number, where):
        return Evaluation.from_json(document)


def decode_session(document: Any, number: int, where: str) -> tuple[SessionTiming | None, float]:
    """Of an evaluation's JSON form the timing of the session, None where it is not known, and seconds to build.

    Raises:
        RunError: the attribute holds something else.
    """
    with _decoding(number, where):
        session = document["latency"].get("session")
        timing = None if session is None else SessionTiming.from_json(session)
        return timing, decode_float(document["build_s"])


@contextmanager
def _decoding(number: int, where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"the evaluation of trial {number} in {where} cannot be read: {error!r}",
            "copy the run directory again, or start over with --fresh",
        ) from error


def refuse_damage(journal: Path) -> None:
    """Raise what is wrong with a journal that cannot be read.

    Raises:
        RunError: naming the first damaged line, and the command that sets the damaged lines aside.
    """
    lines = damaged_lines(journal)
    if not lines:
        raise RunError(f"{journal} cannot be read, though every line of it can", "copy the run directory again")
    more = f", and {len(lines) - 1} more are" if len(lines) > 1 else " is"
    raise RunError(
        f"line {lines[0]} of {journal}{more} damaged",
        f"`mptune report {journal.parent} --repair` sets damaged lines aside and keeps the rest",
    )


def damaged_lines(journal: Path) -> tuple[int, ...]:
    """The numbers of the lines, from 1, that hold no operation, or one that Optuna cannot carry out.

    A last line without an end is being written.

    Raises:
        RunError: the file cannot be read.
    """
    return tuple(number for number, _, record in _lines(journal) if record is None)


def set_damage_aside(journal: Path) -> Path | None:
    """Write a journal anew without its damaged lines. Only for the process that holds the run directory's lock.

    Returns:
        The copy of the untouched file that was kept, or None where nothing was damaged.

    Raises:
        RunError: the file cannot be read or written.
    """
    kept = _without_damage(journal)
    if kept is None:
        return None
    number = 1
    while (copy := journal.with_name(f"{journal.name}.damaged-{number}")).exists():
        number += 1
    with writing(copy):
        shutil.copyfile(journal, copy)
    write_bytes(journal, kept)
    return copy


def _without_damage(journal: Path) -> list[bytes] | None:
    """The lines that are sound, and those that keep the numbers of trials; None where nothing is damaged."""
    kept: list[bytes] = []
    created, gap, example, is_damaged = 0, 0, b"", False
    for _, line, record in _lines(journal):
        if record is None:
            is_damaged = True
            gap = len(kept)  # where a creation that turns out to be missing belongs
            continue
        if record["op_code"] == Operation.CREATE_TRIAL:
            created += 1
            example = example or _empty_trial(record)
        missing = record.get("trial_id", 0) - created + 1 if record["op_code"] > Operation.CREATE_TRIAL else 0
        if missing > 0 and example:
            kept[gap:gap] = [example] * missing
            created += missing
        kept.append(line)
    return kept if is_damaged else None


def _empty_trial(record: dict[str, Any]) -> bytes:
    """A line that creates a trial about which nothing is known."""
    whole = {"op_code", "worker_id", "study_id", "datetime_start"}
    empty = {name: value for name, value in record.items() if name in whole}
    return json.dumps(empty, separators=(",", ":")).encode() + b"\n"


def _lines(journal: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Number, line and operation, which is None where the line holds none that can be carried out."""
    replay = SharingReplay("")
    with writing(journal), journal.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                record = _operation(line)
                yield number, line, record if record is not None and _is_carried_out(record, replay) else None


def _is_carried_out(record: dict[str, Any], replay: SharingReplay) -> bool:
    try:
        replay.apply_logs([record])
    except UNREADABLE:
        return False
    return True


def _operation(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("op_code") not in _NUMBERS:
        return None
    code = record["op_code"]
    needed: dict[str, type] = {"worker_id": str}
    needed |= {"trial_id": int} if Operation.CREATE_TRIAL < code < 10 else {}
    needed |= {"study_id": int} if code in (Operation.CREATE_TRIAL, 2, 3) else {}
    needed |= {"study_name": str} if code == Operation.CREATE_STUDY else {}
    return record if all(isinstance(record.get(name), kind) for name, kind in needed.items()) else None
