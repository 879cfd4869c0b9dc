"""The front of a finished run, kept in its data directory: ``report`` shows it without replaying the journal.

It is used only while all that it follows from is what it was, byte for byte: the journal, run.json, and the files of
the data directory that explanations rest on. What depends on where the run directory lies is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

from mptune._version import __version__
from mptune.errors import PlanError, RunError
from mptune.files import file_sha256, write_text, writing
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation
from mptune.tuning.front import Front
from mptune.tuning.fronts.run_facts import facts_of, hint_of_exactness, other_devices, shown_findings

KEPT_FORMAT = 1

_EXPLANATION = pydantic.TypeAdapter(Explanation)
_NAMES = ("chosen_reason", "choice_kind", "limits_met", "evaluations", "failures", "metric", "warnings")
"""Fields of a front that are JSON as they are."""


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
                digest.update(f"{path.name} {file_sha256(path)}\n".encode())
        except OSError:
            return None
        return cls(digest.hexdigest())


def keep_front(run: RunDirectory, file: RunFile, front: Front, before: RunStamp) -> None:
    """Keep a front, unless somebody has written the journal since it was read.

    Args:
        run: the run directory, locked.
        file: its run.json.
        front: of it.
        before: the stamp from before the record was read.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    if RunStamp.of(run, file) != before:
        return
    every = (front.fp32, front.fp16, front.chosen, *front.points)
    unique = {id(evaluation): evaluation for evaluation in every if evaluation is not None}
    position = {key: index for index, key in enumerate(unique)}
    hint = hint_of_exactness(front.points, front.chosen, front.choice_kind, run.path)
    document = {
        **{name: getattr(front, name) for name in _NAMES},
        "made_from": before.made_from,
        "chosen_reason": front.chosen_reason.removesuffix(hint),
        "hypervolume": front.hypervolume,
        "plans": [evaluation.to_json() for evaluation in unique.values()],
        "fp32": position[id(front.fp32)],
        "fp16": None if front.fp16 is None else position[id(front.fp16)],
        "chosen": None if front.chosen is None else position[id(front.chosen)],
        "points": [position[id(point)] for point in front.points],
        "explanation": asdict(front.explanation),
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
    fields = {name: document[name] for name in _NAMES}
    hint = hint_of_exactness(points, chosen, fields["choice_kind"], run.path)
    return Front(
        **{
            **fields,
            "chosen_reason": fields["chosen_reason"] + hint,
            "warnings": tuple(fields["warnings"]),
        },
        run_dir=facts.run_dir,
        model_path=facts.model_path,
        model_sha256=facts.model_sha256,
        target=facts.target,
        engine=facts.engine,
        device=facts.device,
        fp32=fp32,
        fp16=fp16,
        points=points,
        chosen=chosen,
        hypervolume=document["hypervolume"],
        findings=shown_findings(facts, chosen, fp32, is_confirmation=file.confirms is not None),
        explanation=_EXPLANATION.validate_python(document["explanation"]),
        other_devices=other_devices(run),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _grounds(run: RunDirectory) -> Iterator[Path]:
    """The small files that explanations rest on, in the order of their names."""
    kept = run.kept_front_json.name
    yield from (path for path in sorted(run.data.glob("*.json")) if path.name != kept)
