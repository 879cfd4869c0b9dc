"""Lines of an Optuna journal, read quickly: most of them set a parameter, as other lines did before.

A trial has a line for each of its parameters, and the same few ends of such lines (name, value, distribution) come
again with every trial. They are decoded once.
"""

from __future__ import annotations

import json
import re
from sys import intern
from typing import Any

from mptune.tuning.record.backends.folding import Operation, Parameter, Record

_SET_PARAMETER = int(Operation.SET_TRIAL_PARAM)

# As Optuna writes it. Characters that JSON would escape are left to the JSON decoder.
_PARAMETER = re.compile(
    rb'\{"op_code":%d,"worker_id":"([ !#-\[\]-~]*)","trial_id":(0|[1-9][0-9]{0,17}),("param_name":.*\})\n'
    % _SET_PARAMETER,
    re.DOTALL,
)

_LARGEST_MEMORY = 20_000
"""Ends of lines that are kept, at most: two for each group of a large model."""


class LineReader:
    """Reads lines into records; equal strings of parameters become one object."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._ends: dict[bytes, dict[str, Any]] = {}
        self._parameters: dict[bytes, Parameter] = {}  # of the ends that hold one, and nothing else
        self._start: tuple[bytes, dict[str, Any]] = (b"", {})  # of the last line that sets a parameter

    @property
    def head(self) -> Record:
        """What the last line that set a parameter has in common with others of its trial."""
        return self._start[1]

    def next_parameter(self, line: bytes) -> Parameter | None:
        """What a line adds to ``head``, where that is the rest of it and it is known; None for a line to be read."""
        start = self._start[0]
        return self._parameters.get(line[len(start) : -1]) if start and line.startswith(start) else None

    def read(self, line: bytes) -> Record:
        """The record of a whole line.

        Raises:
            ValueError: it is not JSON.
        """
        start, known_start = self._start
        if start and line.startswith(start):  # The parameters of a trial follow each other.
            known_end = self._ends.get(line[len(start) : -1])
            if known_end is not None:
                return {**known_start, **known_end}
        match = _PARAMETER.fullmatch(line)
        if match is None:
            record: Record = json.loads(line)
            return record
        worker, trial, end = match.groups()
        known = self._ends.get(end)
        if known is None:
            known = json.loads(b"{" + end)
            if len(self._ends) < _LARGEST_MEMORY:
                self._ends[end] = known
                if (parameter := _parameter(known)) is not None:
                    self._parameters[end] = parameter
        head = {"op_code": _SET_PARAMETER, "worker_id": worker.decode("ascii"), "trial_id": int(trial)}
        self._start = line[: match.start(3)], head
        return {**head, **known}


def _parameter(end: dict[str, Any]) -> Parameter | None:
    """What an end says where it is one of Optuna's, with one object for equal texts."""
    if end.keys() != {"param_name", "param_value_internal", "distribution"}:
        return None
    name, value, distribution = end["param_name"], end["param_value_internal"], end["distribution"]
    if not (isinstance(name, str) and isinstance(distribution, str) and isinstance(value, int | float)):
        return None
    return intern(name), value, intern(distribution)
