"""Put in front of ``PYTHONPATH`` by ``benchmarks.house``: every process logs the stacks of two calls of mptune.

They are the call that sends a job (``Worker.call``), and the first that takes a value of a latency (``value_ms``). A
row of the log has the time, whether it is the first of them, and of each frame the file, the line and the name.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any


def stack_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """The functions of mptune from the outermost to this one."""
    rows = []
    while frame is not None:
        code = frame.f_code
        if f"{os.sep}mptune{os.sep}" in code.co_filename and not code.co_name.startswith("<"):
            rows.append((code.co_filename, code.co_firstlineno, code.co_name))
        frame = frame.f_back
    return rows[::-1]


def hook(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    is_parent = code.co_name == "call" and code.co_filename.endswith("processes/parent.py")
    if event == "call" and (is_parent or (code.co_name == "value_ms" and "/engines/" in code.co_filename)):
        row = {"time": time.monotonic(), "is_parent": is_parent, "stack": stack_of(frame)}
        with Path(os.environ["HOUSE_LOG"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not is_parent:
            sys.setprofile(None)


sys.setprofile(hook)
threading.setprofile(hook)
