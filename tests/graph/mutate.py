"""ONNX files with something wrong in them, each the same for the same seed, and what must hold of all of them."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message

from mptune.cli import main
from tests.graph import models

_INTEGERS = (0, 1, -1, 2, 3, 7, 10, 11, 16, 17, 127, 255, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**62))
_FLOATS = (float("nan"), float("inf"), 0.0, -1.0, 1e30)
_TEXTS = ("", "x", "y", "é\u2028", "Relu", "If", "Loop", "Constant", "Resize", "ai.onnx.ml", "com.microsoft", "value")


@cache
def originals() -> dict[str, bytes]:
    """Name -> an ONNX file that is whole."""
    paths = [p for folder in ("corpus", "exported") for p in sorted((Path(__file__).parent / folder).glob("*.onnx"))]
    found = {path.stem: path.read_bytes() for path in paths}
    made = {
        "mlp": models.mlp(),
        "cnn": models.cnn(),
        "attention": models.attention(-1e9),
        "norm": models.decomposed_norm(),
    }
    return found | {name: proto.SerializeToString() for name, proto in made.items()}


def write_companions(folder: Path) -> None:
    """Put the external data that some of the files refer to into ``folder``."""
    for data in (Path(__file__).parent / "corpus").glob("*.bin"):
        (folder / data.name).write_bytes(data.read_bytes())


def mutant(seed: int) -> bytes:
    """One damaged file: bytes flipped, cut off, or one to three fields removed, repeated, swapped or replaced."""
    rng = random.Random(seed)
    files = originals()
    data = files[rng.choice(sorted(files))]
    kind = rng.random()
    if kind < 0.25:
        return _flipped(rng, data)
    if kind < 0.3:
        return data[: rng.randrange(len(data))]
    proto = onnx.ModelProto.FromString(data)
    for _ in range(rng.randint(1, 3)):
        _damage(rng, rng.choice(_messages(proto)))
    return bytes(proto.SerializeToString())


def _flipped(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _messages(message: Any) -> list[Any]:
    """The message and all below it."""
    found = [message]
    for _, value in message.ListFields():
        for inner in [value] if isinstance(value, Message) else value if _is_repeated(value) else ():
            if isinstance(inner, Message):
                found += _messages(inner)
    return found


def _is_repeated(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Message))


def _damage(rng: random.Random, message: Any) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    if rng.random() < 0.3:
        message.ClearField(field.name)
        return
    try:
        if _is_repeated(value):
            _damage_repeated(rng, value)
        elif not isinstance(value, Message):
            setattr(message, field.name, _another(rng, value))
    except ValueError:  # an integer that the field cannot hold
        message.ClearField(field.name)


def _damage_repeated(rng: random.Random, values: Any) -> None:
    at, other = rng.randrange(len(values)), rng.randrange(len(values))
    kind = rng.random()
    if kind < 0.3:
        del values[at]
    elif isinstance(values[at], Message):
        copy = type(values[at])()
        copy.CopyFrom(values[at])
        if kind < 0.6:
            values.add().CopyFrom(copy)
        else:
            values[at].CopyFrom(values[other])
            values[other].CopyFrom(copy)
    elif kind < 0.5:
        values.append(values[at])
    else:
        values[at] = _another(rng, values[at]) if kind < 0.8 else values[other]


def _another(rng: random.Random, value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(_INTEGERS)
    if isinstance(value, float):
        return rng.choice(_FLOATS)
    if isinstance(value, str):
        return rng.choice((*_TEXTS, value + "q"))
    assert isinstance(value, bytes)
    return rng.choice((b"", value[:-1], value + b"x", value * 3))


@dataclass(frozen=True)
class Said:
    """What one run of the program left: its exit code, and what it wrote."""

    code: int
    out: str
    err: str


def mptune(*arguments: str) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Said(code, out.getvalue(), err.getvalue())


def complaint(said: Said) -> str | None:
    """The one line of the error that a command ended in; None where it has a result.

    Raises:
        AssertionError: another exit code, a traceback, a fault of mptune's own, or no hint.
    """
    lines = said.err.splitlines()
    assert said.code in (0, 1), said
    if said.code == 0:
        assert all(line.startswith("warning: ") for line in lines), said.err
        return None
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint"], said.err
    assert not lines[0].startswith("error: unexpected"), said.err
    assert not said.out
    return lines[0].removeprefix("error: ")


def outcome(path: Path, seed: int) -> str:
    """What ``inspect`` and ``apply`` make of the file: ``result``, or the one line of their error.

    Raises:
        AssertionError: what ``complaint`` refuses, commands that disagree, a changed interface, or an invalid model
            made of a valid one.
    """
    out = path.with_name("mixed.onnx")
    out.unlink(missing_ok=True)
    inspected = mptune("inspect", str(path), "--json")
    message = complaint(inspected)
    assert complaint(mptune("apply", str(path), "--fp16-all", "-o", str(out), "--force")) == message
    if message is not None:
        assert not out.exists()
        return message
    check_result(path, out)
    plan = _plan(random.Random(seed), json.loads(inspected.out), path.with_name("plan.json"))
    assert complaint(mptune("apply", str(path), *plan, "-o", str(out), "--force")) is None
    check_result(path, out)
    return "result"


def _plan(rng: random.Random, inspection: dict[str, Any], path: Path) -> list[str]:
    """Arguments that say which plan to apply: one by groups, one by nodes, or patterns of what stays FP32."""
    groups = inspection["groups"]
    if not groups:
        return ["--fp16-all"]
    kind = rng.choice(("groups", "nodes", "patterns"))
    if kind == "patterns":
        return ["--keep-fp32", f"kind:{rng.choice(groups)['kind']}", "--keep-fp32", rng.choice(groups)["id"]]
    plan: dict[str, Any] = {"model_sha256": inspection["model"]["sha256"]}
    if kind == "groups":
        plan["precision"] = {group["id"]: rng.choice(("fp16", "fp32")) for group in groups}
    else:
        plan["nodes"] = {node: rng.choice(("fp16", "fp32")) for group in groups for node in group["nodes"]}
    path.write_text(json.dumps(plan), encoding="utf-8")
    return [str(path)]


def check_result(path: Path, typed: Path) -> None:
    """The interface is the original's, and the model is valid where the original is."""
    before, after = onnx.load(path, load_external_data=False).graph, onnx.load(typed, load_external_data=False).graph
    assert list(before.input) == list(after.input)
    assert list(before.output) == list(after.output)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception:  # it raises whatever is at hand
        return
    onnx.checker.check_model(str(typed), full_check=True)
