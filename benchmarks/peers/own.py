"""What converters make of a model, each at its best documented use; run where they are installed, and packed.

Each runs in a process of its own (``benchmarks.peers.converters``); where one crashes, its last words are the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import error_line
from benchmarks.packed import pack, unpack
from benchmarks.peers.converters import CONVERTERS
from benchmarks.peers.models import PeerModel
from mptune.files import files_sha256, write_json


def convert_all(model: PeerModel, options: argparse.Namespace) -> None:
    """Run converters, and write a note and a packed model of each into the model's folder in ``options.packed``.

    Each as its guide begins; and, where the device lacks FP16 kernels for operators of the model, with the order to
    leave those in FP32, if it takes one. What is there already is not converted again.
    """
    original, data = model.make(options.work)
    packed, work = options.packed / model.name, options.work / f"{model.name}.peers"
    for folder in (packed, work):
        folder.mkdir(parents=True, exist_ok=True)
    for excluded, name in product(dict.fromkeys(((), model.without_kernel)), options.converters):
        if excluded and name == "onnxconverter-common auto":
            continue
        peer = f"{name}, {' and '.join(excluded)} in FP32" if excluded else name
        stem = peer.replace(" ", "_").replace(",", "")
        note, out = packed / f"{stem}.json", work / f"{stem}.onnx"
        if note.exists():
            continue
        package = CONVERTERS[name][1]
        python = next((python for python in options.pythons if _has(python, package)), None)
        if python is None:
            print(f"{model.name}, {name}: no interpreter has the package {package}", flush=True)
            continue
        rows = model.rows if model.rows > 1 else model.batch
        command = [python, "-m", "benchmarks.peers.converters", name, str(original), str(data), str(rows), str(out)]
        words = last_words([*command, *(["--exclude", *excluded] if excluded else [])], options.timeout)
        if words is None:
            pack(original, out, note.with_suffix(".onnx.gz"))
            write_json(note, {"peer": peer, "model_sha256": files_sha256(original)})
        else:
            write_json(note, {"peer": peer, "words": words})
        print(f"{model.name}, {peer}: {words or 'packed'}", flush=True)


def last_words(command: Sequence[str], timeout_s: float, **options: Any) -> str | None:
    """Why a command did not end well; None where it did. ``options`` are those of ``subprocess.run``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:g} s"
    return error_line(done.stderr, done.returncode) if done.returncode else None


def _has(python: str, package: str) -> bool:
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", script], check=False).returncode == 0


def converted(model: PeerModel, work: Path, packed: Path) -> Iterator[tuple[str, Path | str]]:
    """Each converter's name, with the model that it made, put together, or else with its last words."""
    original, _ = model.make(work)
    sha256, folder = files_sha256(original), work / f"{model.name}.peers"
    folder.mkdir(parents=True, exist_ok=True)
    for note in sorted((packed / model.name).glob("*.json")):
        document, out = json.loads(note.read_text()), folder / f"{note.stem}.onnx"
        if "words" in document:
            yield document["peer"], document["words"]
            continue
        if document["model_sha256"] != sha256:
            exports = f"{document['model_sha256'][:12]}, here it is {sha256[:12]}"
            print(f"{model.name}, {note.stem}: was made of the export {exports}")
        try:
            unpack(original, note.with_suffix(".onnx.gz"), out)
            yield document["peer"], out
        except ValueError as error:
            yield document["peer"], str(error)
