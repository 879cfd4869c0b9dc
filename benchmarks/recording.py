"""Forty calls of the command line, recorded and replayed: what a user sees must not change while the code is cut.

    python -m benchmarks.recording record calls.json                 # of one version
    python -m benchmarks.recording compare calls.json later.json     # the differences of another

Good, wrong and damaged input, on predicted targets, so that nothing depends on the machine. Of each call: exit code,
both streams (paths, times and rates as placeholders) and ``front.json`` where it wrote one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.models import overflowing

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "models"
RELATIVE = 1e-4
"""Numbers closer than this are equal: emulated errors differ in their last digits from one core to another."""

SEARCH = "mptune search digits.onnx --data digits.npz --out run --budget 12"

CALLS: tuple[tuple[str, str], ...] = (
    ("help", "mptune --help"),
    ("search-help", "mptune search --help"),
    ("version", "mptune --version"),
    ("targets", "mptune targets"),
    ("spaces", "mptune spaces"),
    ("inspect", "mptune inspect digits.onnx --data digits.npz"),
    ("inspect-json", "mptune inspect overflowing.onnx --data overflowing.npz --json"),
    ("inspect-strict", "mptune inspect overflowing.onnx --data nan.npz --strict"),
    ("search", SEARCH),
    ("search-again", SEARCH),
    ("search-larger", SEARCH.replace("12", "16") + " --max-error 1e-3"),
    ("search-unmet", SEARCH.replace("12", "16") + " --max-error 1e-9 --max-latency-ms 1e-3"),
    ("search-other-data", SEARCH.replace("--data digits.npz", "--data other.npz")),
    (
        "search-three",
        "mptune search overflowing.onnx --data overflowing.npz --out three --budget 10 --precisions fp32,fp16,bf16",
    ),
    (
        "search-rtx",
        "mptune search digits.onnx --data digits.npz --out rtx --budget 4 --target rtx-4090 --engine onnxruntime",
    ),
    ("search-nan", "mptune search digits.onnx --data nan.npz --out nan --budget 4"),
    ("search-timeout", "mptune search digits.onnx --data digits.npz --out late --budget 12 --timeout 1s"),
    ("search-metric", "mptune search digits.onnx --data digits.npz --out psnr --budget 6 --metric cosine"),
    ("report", "mptune report run"),
    ("report-explain", "mptune report run --explain"),
    ("report-all", "mptune report run --all"),
    ("report-csv", "mptune report run --csv"),
    ("report-json", "mptune report run --json"),
    ("pick-knee", "mptune pick run --knee"),
    ("pick-error", "mptune pick run --max-error 1e-2"),
    ("pick-unmet", "mptune pick run --max-error 1e-12 --max-latency-ms 1e-6"),
    ("export", "mptune export run -o run.tar.gz"),
    ("apply-rule", "mptune apply digits.onnx --keep-fp32 kind:norm -o mixed.onnx"),
    ("apply-plan", "mptune apply digits.onnx run/chosen/plan.json -o planned.onnx"),
    ("check-passes", "mptune check mixed.onnx --against digits.onnx --data digits.npz --max-error 1"),
    ("check-fails", "mptune check mixed.onnx --against digits.onnx --data digits.npz --max-error 1e-9"),
    ("compare-same", "mptune compare digits.onnx planned.onnx --data digits.npz"),
    ("compare-outputs", "mptune compare digits.onnx --data digits.npz --outputs shifted.npz"),
    ("compare-nothing", "mptune compare digits.onnx --data digits.npz"),
    ("missing-model", "mptune search nowhere.onnx"),
    ("truncated-model", "mptune inspect truncated.onnx"),
    ("not-a-model", "mptune inspect digits.npz"),
    ("wrong-key", "mptune inspect digits.onnx --data keys.npz"),
    ("wrong-target", "mptune search digits.onnx --target orin"),
    ("wrong-metric", "mptune search digits.onnx --metric nothing"),
    ("damaged-journal", "mptune report damaged"),
    ("damaged-run-json", "mptune report broken"),
    ("no-run", "mptune report nothing"),
)


def main() -> int:
    """Record, or compare two recordings; 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "record":
        arguments.files[0].write_text(json.dumps(record(), indent=1) + "\n")
        return 0
    before, after = (json.loads(path.read_text()) for path in arguments.files)
    count = 0
    for name in before.keys() | after.keys():
        for line in _differences(_parsed(before.get(name)), _parsed(after.get(name)), name):
            print(line)
            count += 1
    print(f"{count} differences in {len(before)} calls")
    return int(count > 0)


def _parsed(call: dict[str, Any] | None) -> dict[str, Any] | None:
    """A call with its output as JSON where it is JSON: the order of keys is no difference."""
    try:
        return call and {**call, "out": json.loads("\n".join(call["out"]))}
    except ValueError:
        return call


def record() -> dict[str, Any]:
    """All calls in their order, in one temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder))
        return {name: _call(command, Path(folder)) for name, command in CALLS}


def _prepare(folder: Path) -> None:
    shutil.copy(MODELS / "digits_vit.onnx", folder / "digits.onnx")
    shutil.copy(MODELS / "digits_calib.npz", folder / "digits.npz")
    command = [sys.executable, "-m", overflowing.__name__, "--out", str(folder / "overflowing")]
    subprocess.run(command, cwd=ROOT, check=True)
    with np.load(folder / "digits.npz") as file:
        arrays = dict(file)
    np.savez(folder / "other.npz", **{key: values[::-1] * 0.9 for key, values in arrays.items()})
    np.savez(folder / "keys.npz", **{f"{key}_other": values for key, values in arrays.items()})
    wrong = {
        key: np.where(np.arange(values.size).reshape(values.shape) == 7, np.nan, values)
        for key, values in arrays.items()
    }
    np.savez(folder / "nan.npz", **{key: values.astype(arrays[key].dtype) for key, values in wrong.items()})
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "digits.onnx", providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    rows = dict(zip(outputs, session.run(None, arrays), strict=True))
    np.savez(folder / "shifted.npz", **{key: np.roll(values, 1, axis=0) for key, values in rows.items()})
    (folder / "truncated.onnx").write_bytes((folder / "digits.onnx").read_bytes()[:10_000])
    assert onnx.load(folder / "digits.onnx").graph.node


def _call(command: str, folder: Path) -> dict[str, Any]:
    if "damaged" in command or "broken" in command:
        _damage(folder, command.split()[-1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "130", "NO_COLOR": "1"}
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    words = command.split()
    result: dict[str, Any] = {"command": command, "exit": done.returncode}
    result["out"], result["err"] = (_masked(text, folder).splitlines() for text in (done.stdout, done.stderr))
    if "--out" in words and (front := folder / words[words.index("--out") + 1] / "front.json").exists():
        result["front"] = json.loads(_masked(front.read_text(), folder))
    print(f"{done.returncode} {command}", file=sys.stderr)
    return result


def _damage(folder: Path, name: str) -> None:
    shutil.copytree(folder / "run", folder / name)
    if name == "damaged":
        journal = folder / name / "study.journal"
        journal.write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])
    else:
        (folder / name / "run.json").write_text("{")


_MASKS = (
    (re.compile(r"\b\d+(\.\d+)?\s?(ms|s|min|h)\b(?= (left|in all|for|used|of))|\b\d+(\.\d+)? (s|min)\b"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?"), "<date>"),
    (re.compile(r"\b(pid|process) \d+"), "<pid>"),
)


def _masked(text: str, folder: Path) -> str:
    text = text.replace(str(folder.resolve()), "<folder>").replace(str(ROOT), "<root>")
    for pattern, place in _MASKS:
        text = pattern.sub(place, text)
    return text


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def _differences(before: Any, after: Any, place: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _differences(before.get(key), after.get(key), f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            yield from _differences(left, right, f"{place}[{index}]")
    elif isinstance(before, str) and isinstance(after, str):
        if not _is_same_text(before, after):
            yield f"{place}\n  - {before}\n  + {after}"
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=RELATIVE):
            yield f"{place}: {before} -> {after}"
    elif before != after:
        yield f"{place}\n  - {json.dumps(before)[:2000]}\n  + {json.dumps(after)[:2000]}"


def _is_same_text(before: str, after: str) -> bool:
    if before == after:
        return True
    if _NUMBER.sub("#", before) != _NUMBER.sub("#", after):
        return False
    pairs = zip(_NUMBER.findall(before), _NUMBER.findall(after), strict=True)
    return all(math.isclose(float(left), float(right), rel_tol=RELATIVE) for left, right in pairs)


if __name__ == "__main__":
    raise SystemExit(main())
