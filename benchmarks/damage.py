"""Damaged run directories: random bytes, types, sizes, links and pipes in every file, and every command on them.

    python -m benchmarks.damage --runs 400
    python -m benchmarks.damage --first 200 --runs 100 --json results/damage.json

One small search is made; each run damages files of a copy of it, all drawn from the number of the run, and starts every
command on it, of those that measure one, in a process of its own, forked from one that has imported mptune. Wanted:
nothing but messages.

    hangs        processes that had not ended after five minutes, in which a search of five plans ends on a busy machine
    unexpected   commands that end with "unexpected ...: this is a bug", a traceback, a signal, or an exit code that the
                 help does not have
    outside      files beside the run that were opened: planted there, and named by links, run.json and the journal
    memory       most resident memory of a process, with its children
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]

import mptune.api.comparing
import mptune.api.deploying
import mptune.api.joining
import mptune.api.run
import mptune.api.searching
import mptune.reporting.terminal.explanation
import mptune.reporting.terminal.front
import mptune.reporting.terminal.progress  # noqa: F401  # what commands import is here before they are forked
from benchmarks.common import save
from mptune import cli
from tests.conftest import save_mlp

HANG_S = 300.0
MOST_BYTES = 1 << 30
_EXIT_CODES = (0, 1, 2, 3, 4)
COMMANDS = (
    ["report", "{run}"],
    ["report", "{run}", "--json"],
    ["report", "{run}", "--explain"],
    ["report", "{run}", "--layers"],
    ["pick", "{run}", "--knee"],
    ["export", "{run}", "-o", "packed.tar.gz", "--force"],
    ["export", "{run}", "--for", "tensorrt-8", "--force"],
    ["confirm", "{run}", "--target", "cpu"],
    ["worker", "{run}", "--wait", "1s"],
    ["search", "model.onnx", "--data", "data.npz", "--target", "./mine.toml", "--budget", "5", "--out", "{run}"],
    ["report", "{run}", "--repair"],
)
SLOW = ("confirm", "worker", "search")
"""Commands that measure: a run starts one of them."""

_AUDIT = """
import os, sys
_outside = os.environ.get("MPTUNE_OUTSIDE", "\\0")
def _hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        if os.fsdecode(arguments[0]).startswith(_outside):
            with_fd = os.open(os.environ["MPTUNE_OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(with_fd, os.fsencode(arguments[0]) + b"\\n")
            os.close(with_fd)
sys.addaudithook(_hook)
"""

_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**400, 10**12, "", "text", "nan", [], {}, [1], {"a": 1}, "\udc80"),
    *(float("inf"), float("nan"), "../../outside/secret", [[]], "/dev/zero"),
)


def make_run(folder: Path) -> None:
    """A search of three plans of a small network on the CPU, and its confirmation."""
    import numpy as np

    save_mlp(folder / "model.onnx")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32))
    shutil.copy(Path(__file__).parents[1] / "search_spaces/targets/cpu.toml", folder / "mine.toml")
    search = ["search", "model.onnx", "--data", "data.npz", "--budget", "4", "--target", "./mine.toml"]
    for command in ([*search, "--out", "model.mptune"], ["confirm", "model.mptune", "--target", "cpu"]):
        subprocess.run([sys.executable, "-m", "mptune", *command], cwd=folder, check=True, capture_output=True)


def damage(run: Path, outside: Path, draw: random.Random) -> list[str]:
    """Damage one to three files; what was done, in words."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        path = draw.choice(files)
        kinds = _KINDS + ((_change_value,) * 6 if path.suffix in (".json", ".journal") else ())
        kind = draw.choice(kinds)
        kind(path, outside, draw)
        done.append(f"{path.relative_to(run)}: {kind.__name__.strip('_')}")
    return done


def _flip_bytes(path: Path, outside: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 3, 30))):
        if content:
            content[draw.randrange(len(content))] = draw.randrange(256)
    _replace(path).write_bytes(content)


def _random_bytes(path: Path, outside: Path, draw: random.Random) -> None:
    _replace(path).write_bytes(draw.randbytes(draw.choice((0, 1, 100, 100_000))))


def _cut(path: Path, outside: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    _replace(path).write_bytes(content[: draw.randrange(len(content) + 1)])


def _enlarge(path: Path, outside: Path, draw: random.Random) -> None:
    """Sparse: 3 GB of zeros behind the content."""
    content = path.read_bytes()
    _replace(path).write_bytes(content)
    os.truncate(path, 3 << 30)


def _nest(path: Path, outside: Path, draw: random.Random) -> None:
    depth = draw.choice((200, 900, 100_000))
    text = (
        "a=" + "[" * depth + "]" * depth
        if path.suffix == ".toml"
        else '{"op_code":' + "[" * depth + "]" * depth + "}\n"
    )
    _replace(path).write_text(text)


def _delete(path: Path, outside: Path, draw: random.Random) -> None:
    path.unlink()


def _directory(path: Path, outside: Path, draw: random.Random) -> None:
    _replace(path).mkdir()


def _pipe(path: Path, outside: Path, draw: random.Random) -> None:
    os.mkfifo(_replace(path))


def _link_outside(path: Path, outside: Path, draw: random.Random) -> None:
    shutil.copy(path, outside / "secret")
    _replace(path).symlink_to(outside / "secret")


def _link_to_itself(path: Path, outside: Path, draw: random.Random) -> None:
    _replace(path).symlink_to(path.name)


def _unreadable(path: Path, outside: Path, draw: random.Random) -> None:
    path.chmod(0)


def _huge_header(path: Path, outside: Path, draw: random.Random) -> None:
    """Declare 10^12 samples, and seal that."""
    import numpy as np

    from mptune.tuning.runs.seals import seal

    if path.name not in ("search.npz", "held_out.npz", "search_reference.npz", "held_out_reference.npz"):
        return _change_value(path, outside, draw) if path.suffix in (".json", ".journal") else None
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].tobytes())
    header["samples"] = draw.choice((10**12, 10**7, -1, "8", None))
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(_replace(path), **arrays)
    seal(path.parent)
    return None


def _change_value(path: Path, outside: Path, draw: random.Random) -> None:
    """Replace a value of JSON, or delete its key."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".journal" else [text]
    if not lines:
        return
    index = draw.randrange(len(lines))
    document = json.loads(lines[index])
    places = list(_places(document))
    if not places:
        return
    parent, key = draw.choice(places)
    if draw.random() < 0.2:
        del parent[key]
    else:
        parent[key] = draw.choice((*_VALUES, str(outside / "secret")))
    lines[index] = json.dumps(document)
    _replace(path).write_text("\n".join(lines) + "\n")


def _places(document: Any) -> list[tuple[Any, Any]]:
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [place for key, value in list(entries) for place in ((document, key), *_places(value))]


_KINDS: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(_flip_bytes, _random_bytes, _cut, _enlarge, _nest, _delete, _directory, _pipe, _link_outside, _link_to_itself),
    *(_huge_header, _huge_header),
)


def _replace(path: Path) -> Path:
    path.unlink()
    return path


def start(command: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end; its exit code (None for a hang), what it printed on stderr, and its memory."""
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            _run(command, folder, variables, errors.fileno())
        until_s, most_bytes, code = time.monotonic() + HANG_S, 0, None
        watched = psutil.Process(pid)
        while code is None and time.monotonic() < until_s:
            with suppress(psutil.Error):
                most_bytes = max(most_bytes, sum(map(_own_bytes, (watched, *watched.children(recursive=True)))))
            time.sleep(0.02)
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)
        errors.seek(0)
        return {"code": code, "stderr": errors.read().decode(errors="replace"), "memory_bytes": most_bytes}


def _run(command: list[str], folder: Path, variables: dict[str, str], errors: int) -> NoReturn:
    """In the forked process: run the command as ``python -m mptune`` would."""
    code = 70
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream, number in enumerate((nothing, nothing, errors)):
            os.dup2(number, stream)
        os.chdir(folder)
        os.environ.update(variables)
        exec(_AUDIT, {})  # its own processes import it as sitecustomize
        code = cli.main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _own_bytes(process: psutil.Process) -> int:
    """Memory of its own: pages of mapped files do not count."""
    try:
        facts = process.memory_info()
        return int(facts.rss - facts.shared)
    except psutil.Error:
        return 0


def attack(number: int, base: Path) -> dict[str, Any]:
    """One run: what was damaged, and what went wrong."""
    draw = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="mptune-damage-") as place:
        folder, outside = Path(place, "work"), Path(place, "outside")
        shutil.copytree(base, folder, symlinks=True)
        outside.mkdir()
        hook = Path(place, "hook")
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(_AUDIT)
        opened = Path(place, "opened")
        variables = {
            "MPTUNE_OUTSIDE": str(outside),
            "MPTUNE_OPENED": str(opened),
            "PYTHONPATH": os.pathsep.join((str(hook), os.environ.get("PYTHONPATH", ""))),
        }
        (outside / "secret").write_text("secret")
        done = damage(folder / "model.mptune", outside, draw)
        faults, most_bytes = [], 0
        where = ["model.mptune", next((str(p) for p in (folder / "model.mptune/confirmed").glob("*")), "model.mptune")]
        slow = draw.choice(SLOW)
        for command in draw.sample(COMMANDS, len(COMMANDS)):
            if command[0] in SLOW and command[0] != slow:
                continue
            run = where[draw.random() < 0.15]
            words = [word.format(run=run) for word in command]
            answer = start(words, folder, variables)
            most_bytes = max(most_bytes, answer["memory_bytes"])
            text = answer["stderr"]
            lines = text.strip().splitlines()
            if answer["code"] is None:
                faults.append(["hang", *words])
            elif "this is a bug" in text or "Traceback" in text or answer["code"] not in _EXIT_CODES:
                faults.append(["unexpected", *words, answer["code"], *lines[-3:]])
            elif answer["code"] == 1 and not any(line.startswith("hint: ") for line in lines):
                faults.append(["no hint", *words, *lines[-3:]])
            if answer["memory_bytes"] > MOST_BYTES:
                faults.append(["memory", *words, answer["memory_bytes"] >> 20])
        if opened.exists():
            faults.append(["outside", *sorted(set(opened.read_text(errors="replace").splitlines()))[:3]])
        return {"run": number, "damage": done, "faults": faults, "memory_bytes": most_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="mptune-base-") as base:
        make_run(Path(base))
        for number in range(arguments.first, arguments.first + arguments.runs):
            results.append(attack(number, Path(base)))
            if results[-1]["faults"]:
                print(json.dumps(results[-1]), flush=True)
            print(f"{len(results)} of {arguments.runs}", end="\r", file=sys.stderr, flush=True)
    counts = {
        name: sum(fault[0] == name for result in results for fault in result["faults"])
        for name in ("hang", "unexpected", "no hint", "outside", "memory")
    }
    most_mib = max((result["memory_bytes"] for result in results), default=0) >> 20
    print(f"{len(results)} runs: {counts}, at most {most_mib} MiB")
    if arguments.json is not None:
        save(arguments.json, {"counts": counts, "most_mib": most_mib, "runs": results})


if __name__ == "__main__":
    main()
