"""A search that ends without a front: run.json keeps what was found, and front.json says it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mptune.errors import BaselineError, EndedEarlyError
from mptune.files import write_json
from mptune.finding import Finding, by_severity
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory
from mptune.tuning.front import FRONT_FORMAT


@contextlib.contextmanager
def findings_kept(run: RunDirectory) -> Iterator[None]:
    """Keep the findings that stop a search in its run.json, and in front.json unless there is one already.

    That of a search that a limit ended has no points, either. The run directory is locked; errors are passed on.
    """
    try:
        yield
    except (EndedEarlyError, BaselineError) as error:
        file, findings = run.load(), getattr(error, "findings", ())
        if file is not None and findings:
            codes = {finding.code for finding in findings}
            others = (finding for finding in file.findings if finding.code not in codes)
            file = file.model_copy(update={"findings": with_suspects((*others, *findings))})
            run.save(file)
        if file is not None and (findings or isinstance(error, EndedEarlyError)) and not run.front_json.exists():
            write_json(run.front_json, stopped_document(file))
        raise


def stopped_document(file: RunFile) -> dict[str, Any]:
    """front.json of a search without a front: every key, no points, the findings."""
    target, fixed = file.target, file.fixed_settings
    asked = {"name": fixed.target, "engine": fixed.engine, "device": None}
    return {
        "format": FRONT_FORMAT,
        "model": {"path": file.model.path, "sha256": file.model.sha256},
        "target": {name: asked[name] if target is None else getattr(target, name) for name in asked},
        "metric": file.search.metric,
        "baseline": dict.fromkeys(("fp32", "fp16", "tf32")),
        "points": [],
        **dict.fromkeys(("chosen", "chosen_point", "choice", "hypervolume")),
        **dict.fromkeys(("evaluations", "failures"), 0),
        "findings": [finding.to_json() for finding in by_severity(file.findings)],
        "warnings": list(file.warnings),
    }


def with_suspects(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, a broadcast as a warning once the engine is seen to differ from the reference."""
    is_suspect = any(finding.code == "engine-differs" for finding in findings)
    return tuple(replace(f, severity="warning") if is_suspect and f.code == "broadcast" else f for f in findings)
