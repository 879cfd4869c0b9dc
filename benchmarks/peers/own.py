"""What others make of a model, each at its best documented use: a plan of our layer groups, or a model file of theirs.

Converters run in a process of their own (``benchmarks.peers.converters``); where one crashes, its last words are the
result. They may be run where the GPU is, or before, and packed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.converters import CONVERTERS, EXCLUDING, label
from benchmarks.peers.models import PeerModel
from benchmarks.peers.packed import pack, unpack
from mptune.files import files_sha256, write_json

CONVERTER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Made:
    """What a peer came to.

    Attributes:
        peer: its name.
        plan: one 0 or 1 per layer group, or a model file.
        builds: engines that it built to get there.
        budget: builds that it was allowed, of a search; None where it takes none.
    """

    peer: str
    plan: str | Path
    builds: int = 0
    budget: int | None = None


@dataclass(frozen=True)
class Crashed:
    """A peer that came to nothing, with its words."""

    peer: str
    words: str


def convert(
    name: str,
    model: Path,
    data: Path,
    rows: int,
    work: Path,
    python: str = sys.executable,
    timeout_s: float = CONVERTER_TIMEOUT_S,
    excluded: Sequence[str] = (),
) -> Made | Crashed:
    """Run a converter in a process of its own; an earlier result in ``work`` is taken as it is.

    Args:
        name: of ``CONVERTERS``.
        model: ONNX file.
        data: its samples.
        rows: of the first sample.
        work: folder of the converted model and a note, with the words of a crash.
        python: interpreter that the converter is installed for.
        timeout_s: after so many seconds it is stopped, which counts as a crash.
        excluded: operators that it is told to leave in FP32.
    """
    peer = label(name, excluded)
    out = work / f"{file_stem(peer)}.onnx"
    note = out.with_suffix(".json")
    if not note.exists():
        _, package = CONVERTERS[name]
        if not _has(python, package):
            return Crashed(peer, f"not run: the package {package} is not installed here")
        work.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "benchmarks.peers.converters", name, str(model), str(data), str(rows), str(out)]
        words = _words([*command, *(["--exclude", *excluded] if excluded else [])], timeout_s)
        if words is not None:
            write_json(note, {"peer": peer, "words": words})
    figures = json.loads(note.read_text())
    if "words" in figures:
        return Crashed(peer, figures["words"])
    return Made(peer, out)


def calls(model: PeerModel, names: Sequence[str] = tuple(CONVERTERS)) -> list[tuple[str, tuple[str, ...]]]:
    """How converters are called: name and operators to leave in FP32.

    Each as its guide begins; and, where the device lacks FP16 kernels for operators of the model, told to leave those
    in FP32, if it can be told.
    """
    told = [(name, model.without_kernel) for name in names if name in EXCLUDING and model.without_kernel]
    return [*((name, ()) for name in names), *told]


def file_stem(name: str) -> str:
    """Of a converter's files."""
    return name.replace(" ", "_").replace(",", "")


def _words(command: Sequence[str], timeout_s: float) -> str | None:
    """Why a converter came to nothing; None where it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:g} s"
    if not done.returncode:
        return None
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return words[-1][:300] if words else f"exit status {done.returncode}"


def _has(python: str, package: str) -> bool:
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", script], check=False).returncode == 0


def convert_all(
    model: PeerModel,
    work: Path,
    packed: Path,
    names: Sequence[str],
    pythons: Sequence[str],
    timeout_s: float = CONVERTER_TIMEOUT_S,
) -> None:
    """Run converters, and pack what it wrote; prints a line about each.

    Args:
        model: which.
        work: folder of models.
        packed: folder with a folder for each model: the packed ones and the notes; written.
        names: of ``CONVERTERS``.
        pythons: interpreters, in order: a converter runs in the first that has its package.
        timeout_s: of each converter.
    """
    original, data = model.make(work)
    packed = packed / model.name
    packed.mkdir(parents=True, exist_ok=True)
    for name, excluded in calls(model, names):
        _, package = CONVERTERS[name]
        python = next((one for one in pythons if _has(one, package)), None)
        if python is None:
            print(f"{model.name}, {name}: no interpreter has the package {package}", flush=True)
            continue
        found = convert(name, original, data, model.first_rows, model.peers(work), python, timeout_s, excluded)
        peer = found.peer
        note, small = packed / f"{file_stem(peer)}.json", packed / f"{file_stem(peer)}.onnx.gz"
        if isinstance(found, Crashed):
            write_json(note, {"peer": peer, "words": found.words})
            print(f"{model.name}, {peer}: {found.words}", flush=True)
        else:
            assert isinstance(found.plan, Path)
            pack(original, found.plan, small)
            write_json(note, {"peer": peer, "model_sha256": files_sha256(original)})
            print(f"{model.name}, {peer}: {small.stat().st_size} bytes packed", flush=True)


def unpack_all(model: PeerModel, work: Path, packed: Path) -> None:
    """Put every packed model together where ``convert`` takes it as an earlier result."""
    original, _ = model.make(work)
    sha256 = files_sha256(original)
    folder = model.peers(work)
    for note in sorted((packed / model.name).glob("*.json")):
        small, out = note.with_suffix(".onnx.gz"), folder / f"{note.stem}.onnx"
        if out.with_suffix(".json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if small.exists():
            other = json.loads(note.read_text()).get("model_sha256", sha256)
            if other != sha256:
                print(f"{model.name}, {note.stem}: was made of the export {other[:12]}, here it is {sha256[:12]}")
            try:
                unpack(original, small, out)
            except ValueError as error:
                print(f"{model.name}, {note.stem}: {error}", flush=True)  # it is converted here, if that can be done
                continue
        out.with_suffix(".json").write_text(note.read_text())


def bisect(groups: Sequence[int], count: int, is_good: Callable[[str], bool], *, forward: bool) -> tuple[str, int]:
    """Polygraphy's idea (``debug precision --mode bisect``): the fewest leading or trailing groups to keep in FP32.

    Args:
        groups: positions of the groups that may be FP16, in the order of the graph.
        count: of all groups.
        is_good: whether a plan is within the tolerance; called once for each plan, which is then built.
        forward: keep groups from the front of the network in FP32, else from its end.

    Returns:
        The plan with the fewest FP32 groups that was seen to be good (all-FP32 where none was), and the builds.
    """

    def plan(kept: int) -> str:
        half = set(groups[kept:] if forward else groups[: len(groups) - kept])
        return "".join("01"[position in half] for position in range(count))

    low, high, builds = 0, len(groups), 0  # all of them in FP32 is taken to be good
    while low < high:
        middle = (low + high) // 2
        builds += 1
        low, high = (low, middle) if is_good(plan(middle)) else (middle + 1, high)
    return plan(high), builds
