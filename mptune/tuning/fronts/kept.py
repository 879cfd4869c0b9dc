"""The front of a finished run, kept in its data directory: ``report`` shows it without replaying the journal.

It is used only while all that it follows from is what it was, byte for byte: the journal, run.json, and the files of
the data directory that explanations rest on. What depends on where the run directory lies is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mptune._version import __version__
from mptune.errors import PlanError, RunError
from mptune.files import files_sha256, write_text, writing
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation, GroupWorth, Kept, Reason
from mptune.tuning.front import Front
from mptune.tuning.fronts.content import origin_fields
from mptune.tuning.fronts.run_facts import facts_of, hint_of_exactness, other_devices, shown_findings

KEPT_FORMAT = 2

_TYPES = {
    "evaluations": int,
    "failures": int,
    "hypervolume": float,
    "metric": str,
    "warnings": list,
}
"""Fields of a front that are JSON as they are, or a list of lines."""

_FIELDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "float": (int, float),
    "int": (int,),
    "bool": (bool,),
    "Reason": (Reason,),
    "None": (type(None),),
}
"""Types of the fields of an explanation's rows, by their names."""

_TYPES_OF = {
    kind: [tuple(one for name in str(field.type).split(" | ") for one in _FIELDS[name]) for field in fields(kind)]
    for kind in (Kept, GroupWorth)
}

_REASONS = {reason.value: reason for reason in Reason}

Row = TypeVar("Row", Kept, GroupWorth)


@dataclass(frozen=True)
class RunStamp:
    """What a front follows from, by its hash.

    Attributes:
        made_from: SHA-256 of the journal, of run.json and of the data directory's own files.
    """

    made_from: str

    @classmethod
    def of(cls, run: RunDirectory, file: RunFile) -> RunStamp | None:
        """The stamp of a run as it is now; None where its study is in a database, or there is no journal.

        Args:
            run: the run directory.
            file: its run.json, which need not be written yet.
        """
        if file.storage is not None:
            return None
        document = json.dumps([KEPT_FORMAT, __version__, file.model_dump(mode="json")], sort_keys=True)
        digest = hashlib.sha256(document.encode())
        try:
            for path in (run.journal, *_grounds(run)):
                digest.update(f"{path.name} {files_sha256(path)}\n".encode())
        except OSError:
            return None
        return cls(digest.hexdigest())


def keep_front(run: RunDirectory, file: RunFile, front: Front, before: RunStamp) -> None:
    """Keep a front, unless somebody has written the journal since it was read.

    It is used once run.json has its choice.

    Args:
        run: the run directory, locked.
        file: its run.json.
        front: of it.
        before: the stamp from before the record was read.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    stamp = RunStamp.of(run, file.model_copy(update={"choice": front.choice}))
    if stamp is None or RunStamp.of(run, file) != before:
        return
    every = (front.fp32, front.fp16, front.chosen, *front.points)
    unique = {id(evaluation): evaluation for evaluation in every if evaluation is not None}
    position = {key: index for index, key in enumerate(unique)}
    document = {
        **{name: getattr(front, name) for name in _TYPES},
        "made_from": stamp.made_from,
        "plans": [evaluation.to_json() for evaluation in unique.values()],
        "fp32": position[id(front.fp32)],
        "fp16": None if front.fp16 is None else position[id(front.fp16)],
        "chosen": None if front.chosen is None else position[id(front.chosen)],
        "points": [position[id(point)] for point in front.points],
        "explanation": {
            "kept": {plan: list(map(_to_list, groups)) for plan, groups in front.explanation.kept.items()},
            "groups": list(map(_to_list, front.explanation.groups)),
            "gains_from": front.explanation.gains_from,
        },
    }
    path = run.kept_front_json
    text = json.dumps(document, separators=(",", ":")) + "\n"  # with Python's NaN: it is for mptune alone
    if _text(path) == text:
        return
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_text(path, text)


def kept_front(run: RunDirectory, file: RunFile) -> Front | None:
    """The front that was kept of a run; None where there is none, or what it follows from has changed since."""
    try:
        document = json.loads(run.kept_front_json.read_text(encoding="utf-8"))
        stamp = RunStamp.of(run, file)
        if stamp is None or document["made_from"] != stamp.made_from:
            return None
        return _decoded(run, file, document)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, PlanError, RunError):
        return None  # The record says it, or what is wrong with it.


def _decoded(run: RunDirectory, file: RunFile, document: dict[str, Any]) -> Front:
    facts, ignored = facts_of(run, file), file.choice.ignore
    plans = [Evaluation.from_json(plan).ignoring(ignored) for plan in document["plans"]]
    fp32, fp16, chosen = (None if document[k] is None else plans[document[k]] for k in ("fp32", "fp16", "chosen"))
    points = tuple(plans[index] for index in document["points"])
    if fp32 is None:
        raise ValueError("no baseline")
    plain = {name: _of_type(document[name], kind) for name, kind in _TYPES.items()}
    plain["warnings"] = tuple(_of_type(line, str) for line in plain["warnings"])
    explanation = _explanation(document["explanation"])
    return Front(
        **plain,
        **origin_fields(facts),
        fp32=fp32,
        fp16=fp16,
        points=points,
        chosen=chosen,
        choice=file.choice,
        hint=hint_of_exactness(points, chosen, file.choice.kind, run.path),
        findings=shown_findings(facts, chosen, fp32, explanation, is_confirmation=file.confirms is not None),
        explanation=explanation,
        other_devices=other_devices(run),
        reported_metrics=facts.reported_metrics,
    )


def _to_list(row: Kept | GroupWorth) -> list[Any]:
    """The fields in their order: there is one for every group of every plan, so their names are left out."""
    return [getattr(row, field.name) for field in fields(row)]


def _explanation(document: Mapping[str, Any]) -> Explanation:
    kept = {
        plan: _rows(Kept, ([*row[:2], _REASONS[row[2]], *row[3:]] for row in rows))
        for plan, rows in document["kept"].items()
    }
    return Explanation(kept, _rows(GroupWorth, document["groups"]), document["gains_from"])


def _rows(kind: type[Row], rows: Iterable[list[Any]]) -> tuple[Row, ...]:
    """Rows of an explanation, whose values are of the types that its fields have: tens of thousands in a long run."""
    types = _TYPES_OF[kind]
    read = []
    for values in rows:
        if len(values) != len(types) or not all(map(isinstance, values, types)):
            raise TypeError(f"{values!r} is no {kind.__name__}")
        read.append(kind(*values))
    return tuple(read)


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, int | float if kind is float else kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _grounds(run: RunDirectory) -> Iterator[Path]:
    """The small files that explanations rest on, in the order of their names."""
    kept = run.kept_front_json.name
    yield from (path for path in sorted(run.data.glob("*.json")) if path.name != kept)
