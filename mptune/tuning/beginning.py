"""How a search begins: its layer groups, and run.json, which is held against what is asked for or written anew."""

from __future__ import annotations

from dataclasses import dataclass

from mptune.choice import Choice
from mptune.errors import RunError
from mptune.files import files_sha256
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_fitting_groups, find_groups, groups_sha256
from mptune.graph.loading.model import Model
from mptune.identity import check_same, plugins_sha256, refuse_confirmation
from mptune.run_json import FixedSettings, ModelSection, RunFile
from mptune.rundir import RunDirectory
from mptune.settings import Granularity, SearchSettings
from mptune.tuning.record.storage import check_opens, check_storage, named_storage
from mptune.tuning.record.study import shared_granularity, study_name
from mptune.tuning.runs.result import check_asked, has_evaluation
from mptune.tuning.space import NamedSpace


@dataclass(frozen=True)
class Beginning:
    """What a call of ``search`` comes to, beside what its run directory holds.

    Attributes:
        file: run.json, as it is on the disk.
        settings: those asked for, with the limits that hold on from earlier calls.
        asked: the choice to make of the front.
        url: of the study's database; None for the journal in the run directory.
    """

    grouped: GroupedModel
    file: RunFile
    settings: SearchSettings
    asked: Choice
    url: str | None


def begin(run: RunDirectory, model: Model, settings: SearchSettings, named: NamedSpace) -> Beginning:
    """Group the model, and check run.json against what is asked for, or write the first one.

    A run without an evaluation begins anew where something differs.

    Raises:
        RunError: the run was made with another model, other settings or another storage.
    """
    recorded = earlier = run.load()
    refuse_confirmation(run.path, recorded)
    is_evaluated = recorded is not None and has_evaluation(run, recorded, settings.storage)
    name = run.path.resolve().name.removesuffix(".mptune")

    # ``auto`` fits the budget of the first search, here or in the study that is shared: a larger one resumes the run.
    granularity: Granularity | None = named.file.granularity
    if granularity == "auto" and recorded is not None and is_evaluated:
        granularity = recorded.fixed_settings.granularity
    elif granularity == "auto":
        url = named_storage(settings.storage, is_journal=recorded is not None and recorded.storage is None)
        granularity = shared_granularity(name, None if settings.fresh else url, model.sha256, named.sha256)
    if granularity is None:
        granularity, groups = find_fitting_groups(model, settings.budget)
    else:
        groups = find_groups(model, granularity)

    labels = settings.labels
    fixed = FixedSettings.of(
        settings,
        space_sha256=named.sha256,
        granularity=granularity,
        groups_sha256=groups_sha256(groups),
        # One that cannot be read is reported where the labels are loaded.
        labels_sha256=files_sha256(labels) if labels is not None and labels.is_file() else None,
        plugins_sha256=plugins_sha256(settings.plugins),
    )
    try:
        if recorded is not None:
            check_same(run.path, recorded, model.sha256, fixed)
    except RunError:
        if is_evaluated:
            raise
        run.forget()
        recorded = None
    url = named_storage(settings.storage, is_journal=recorded is not None and recorded.storage is None)
    storage = None if url is None else check_opens(url)  # only what has opened is written down
    if recorded is not None and is_evaluated:
        check_storage(run.path, recorded.storage, storage)
    elif recorded is not None and recorded.storage != storage:
        run.forget()
        recorded = None

    given = Choice.of(settings)
    asked = given if recorded is None else recorded.choice.asked_again(given)
    settings = asked.limit(settings)
    check_asked(asked, (settings.metric, *settings.reported_metrics), [output.name for output in model.outputs])
    study = earlier.study if earlier is not None and earlier.storage == storage else name
    study = study if storage is None else study_name(study, is_new=settings.fresh)
    section = ModelSection(path=str(model.path.resolve()), sha256=model.sha256)
    file = RunFile.of(settings, section, fixed, storage, study)
    if recorded is not None:
        choice = asked if recorded.choice.chosen is None else recorded.choice  # till the end what it was
        file = recorded.model_copy(update={"search": file.search, "choice": choice, "model": file.model})
    if file != recorded:
        run.save(file)
    return Beginning(GroupedModel(model, groups), file, settings, asked, url)
