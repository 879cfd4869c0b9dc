"""Damaged ONNX files through ``mptune inspect`` and ``mptune apply``: a result or one clear error each.

    python -m benchmarks.fuzz --count 500

What must hold of each is in ``tests/graph/mutate.py``. Batches run in processes of their own, so that a crash in native
code is a row of the table and not the end of it, and that what native code says past the commands is seen.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.common import save
from tests.graph.mutate import mutant, outcome, write_companions

BATCH = 50
TIMEOUT_S = 120


def run_batch(first: int, last: int) -> None:
    """Try the seeds one after the other; print one line each, before and after."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.onnx"
        write_companions(path.parent)
        for seed in range(first, last):
            print(f"seed {seed}", flush=True)
            path.write_bytes(mutant(seed))
            try:
                kind = "result" if outcome(path, seed) == "result" else "error"
            except Exception as error:
                kind = f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"is {kind}", flush=True)


def outcomes(first: int, last: int) -> Counter[str]:
    """Kind of outcome -> how often, over a range of seeds."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--batch", str(first), str(last)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        text, how = done.stdout, f"exit status {done.returncode}"
        past_commands = done.stderr.splitlines() if done.returncode == 0 else []
    except subprocess.TimeoutExpired as expired:
        text, how, past_commands = (expired.stdout or b"").decode(), f"more than {TIMEOUT_S} s", []
    lines = text.splitlines()
    found = Counter(line.removeprefix("is ") for line in lines if line.startswith("is "))
    tried = sum(line.startswith("seed ") for line in lines)
    if found.total() < tried:
        found[f"seed {first + tried - 1}: {how}"] += 1
    if past_commands:
        found[f"seeds {first} to {last - 1}: on stderr, past the commands: {past_commands[0]}"] += 1
    if first + tried < last:
        found += outcomes(first + tried, last) if tried else Counter({f"batch {first}: {how}": last - first})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--batch", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.batch:
        run_batch(*options.batch)
        return
    found: Counter[str] = Counter()
    end = options.first + options.count
    for first in range(options.first, end, BATCH):
        found += outcomes(first, min(first + BATCH, end))
    for kind, count in found.most_common():
        print(f"{count:>6}  {kind}")
    save(options.json, {"count": options.count, "first": options.first, "outcomes": dict(found)})
    if set(found) - {"result", "error"}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
