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
    """Keep the findings of a search that they stop in its run.json, and in front.json unless there is one already.

    That of a search that a limit ended has no points, either. The run directory is locked; errors are passed on.
    """
    try:
        yield
    except (EndedEarlyError, BaselineError) as error:
        findings = error.findings if isinstance(error, BaselineError) else ()
        file = run.load()
        if file is not None and findings:
            codes = {finding.code for finding in findings}
            others = (finding for finding in file.findings if finding.code not in codes)
            file = file.model_copy(update={"findings": with_suspects((*others, *findings))})
            run.save(file)
        is_told = bool(findings) or isinstance(error, EndedEarlyError)
        if file is not None and is_told and not run.front_json.exists():
            write_json(run.front_json, stopped_document(file))
        raise


def stopped_document(file: RunFile) -> dict[str, Any]:
    """front.json of a search without a front: every key, no points, the findings."""
    target = file.target
    return {
        "format": FRONT_FORMAT,
        "model": {"path": file.model.path, "sha256": file.model.sha256},
        "target": {
            "name": file.fixed_settings.target if target is None else target.name,
            "engine": file.fixed_settings.engine if target is None else target.engine,
            "device": None if target is None else target.device,
        },
        "metric": file.search.metric,
        "baseline": dict.fromkeys(("fp32", "fp16", "tf32")),
        "points": [],
        "chosen": None,
        "chosen_point": None,
        "choice": None,
        "evaluations": 0,
        "failures": 0,
        "hypervolume": None,
        "findings": [finding.to_json() for finding in by_severity(file.findings)],
        "warnings": list(file.warnings),
    }


def with_suspects(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, a broadcast as a warning once the engine is seen to differ from the reference."""
    if not any(finding.code == "engine-differs" for finding in findings):
        return tuple(findings)
    return tuple(replace(f, severity="warning") if f.code == "broadcast" else f for f in findings)
