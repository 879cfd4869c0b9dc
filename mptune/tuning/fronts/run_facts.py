"""What a front says beside its evaluations: the run, its target, what its run.json warns of, and the words about it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mptune.choice import ChoiceKind
from mptune.data.calibration import split_indices
from mptune.errors import RunError
from mptune.finding import Finding, FindingOrigin
from mptune.run_json import RunFile
from mptune.rundir import RunDirectory, read_run
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation
from mptune.tuning.fronts.content import FrontOrigin, OtherDevice
from mptune.tuning.fronts.neighbours import neighbours
from mptune.tuning.fronts.table import compared
from mptune.tuning.reasons.group_findings import in_order
from mptune.tuning.reasons.plan_findings import SampleIndices, plan_findings


@dataclass(frozen=True)
class Facts(FrontOrigin):
    """What a front says beside its evaluations.

    Attributes:
        data_dir: the run's data directory, which holds what explanations rest on; None explains nothing.
        budget: how many plans the search was asked for.
        reduced: the precisions that its plans may have beside FP32, as a text.
        reported_metrics: that are taken beside the objective.
    """

    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    data_dir: Path | None = None
    indices: SampleIndices = field(default_factory=SampleIndices)
    budget: int = 0
    reduced: str = "FP16"
    reported_metrics: tuple[str, ...] = ()


def facts_of(run: RunDirectory, file: RunFile) -> Facts:
    """The facts of a run, from its run.json."""
    target = file.target
    if target is None:
        raise RunError(f"{run.path} holds no evaluation yet", "let `mptune search` go on with it first")
    return Facts(
        run_dir=run.path,
        model_path=Path(file.model.path),
        model_sha256=file.model.sha256,
        target=target.name,
        engine=target.engine,
        device=target.device,
        warnings=file.warnings,
        findings=file.findings,
        data_dir=run.data,
        indices=sample_indices(file),
        budget=file.search.budget,
        reported_metrics=file.search.reported_metrics,
        reduced=" or ".join(name.upper() for name in file.fixed_settings.precisions if name != "fp32"),
    )


def other_devices(run: RunDirectory) -> tuple[OtherDevice, ...]:
    """The fronts of other devices below a run directory, by their names; those that cannot be read are left out."""
    found = []
    for path in sorted(run.devices.iterdir()) if run.devices.is_dir() else ():
        with suppress(RunError):
            directory, file = read_run(path)
            if file.target is not None:
                found.append(OtherDevice(directory.path, file.target.device, file.target.engine))
    return tuple(found)


def sample_indices(file: RunFile) -> SampleIndices:
    """Which of the user's samples are search samples, and which are held out; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    count = file.data.samples // steps
    split = split_indices(count, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))


def hint_of_exactness(points: Sequence[Evaluation], chosen: Evaluation | None, kind: ChoiceKind, run_dir: Path) -> str:
    """What is added to why a plan was chosen where a neighbour is much more exact for little latency; else empty.

    Where limits or a plan were asked for nothing is added.
    """
    if chosen is None or kind not in ("knee", "fastest"):
        return ""
    cheap = next((beside.evaluation for beside in neighbours(points, chosen) if beside.is_cheap), None)
    if cheap is None:
        return ""
    pick = f"`mptune pick {shlex.quote(str(run_dir))} --plan {cheap.plan.fingerprint[:4]}`"
    return f"; for {compared(cheap, chosen)}: {pick}"


def shown_findings(
    facts: Facts, chosen: Evaluation | None, fp32: Evaluation, explanation: Explanation, *, is_confirmation: bool
) -> tuple[Finding, ...]:
    """The findings of a run and of its chosen plan, as they stand under that plan, in the order of all views."""
    plan = (chosen or fp32).plan
    run = shlex.quote(str(facts.run_dir))
    origin: FindingOrigin = "confirm" if is_confirmation else "search"
    own = () if chosen is None else plan_findings(chosen, facts.indices, origin, run)
    errors = {one.group: one.one_group_error for one in explanation.groups if one.one_group_error is not None}
    about = (finding.under_plan(plan.fp32_groups, plan.bf16_groups) for finding in (*facts.findings, *own))
    return in_order(about, errors)
