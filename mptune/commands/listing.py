"""``mptune targets``, ``spaces`` and ``doctor``: profiles, search spaces, and what this machine can do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from mptune.commands.common import JSON, argument, complain, flag, print_json


def targets(
    name: str | None = argument("NAME|FILE", "Show one profile, or a file of your own: its figures and their sources."),
    json_: bool = JSON,
) -> None:
    """List the devices that have a profile, or show one.

    A profile names the source of every figure.

    \b
    Example:
      mptune targets
      mptune targets jetson-orin-nano-8gb-super
      mptune search model.onnx --target jetson-orin-nano-8gb-super
    """
    from mptune.reporting.terminal.listings import print_target, print_targets
    from mptune.targets.target import list_targets, load_target

    profiles = list_targets() if name is None else [load_target(name)]
    documents = [target.model_dump() for target in profiles]
    if json_:
        print_json(documents if name is None else documents[0])
    elif name is None:
        print_targets(profiles)
    else:
        print_target(profiles[0])


def spaces(json_: bool = JSON) -> None:
    """List the search spaces.

    A search space defines which groups are pinned, and which plans are tried first.

    \b
    Example:
      mptune spaces
      mptune search model.onnx --space transformer
    """
    from mptune.reporting.terminal.listings import print_spaces
    from mptune.tuning.space import list_spaces

    named = list_spaces()
    if json_:
        names = [{"name": each.name, "path": str(each.path), "sha256": each.sha256} for each in named]
        print_json([own | each.file.model_dump(mode="json") for own, each in zip(names, named, strict=True)])
    else:
        print_spaces(named)


def doctor(
    selftest: bool = flag(
        "--selftest", "Build, run, time and check the demo's model on every engine here. Exit code 1 if a check fails."
    ),
    json_: bool = JSON,
) -> None:
    """Show what this machine can do, and what is missing.

    Versions, the GPU, which toolchains are ready, and the command that installs those that are not.

    \b
    Example:
      mptune doctor
      mptune doctor --selftest --json > selftest.json
    """
    from mptune.engines.environment import describe_environment
    from mptune.engines.toolchains.choose import list_toolchains
    from mptune.reporting.terminal.listings import print_doctor, print_selftest

    environment, toolchains, result = describe_environment(), list_toolchains(), None
    if not json_:
        print_doctor(environment, toolchains)
    if selftest:
        from mptune.selftest import run_selftest

        result = run_selftest(progress=lambda text: complain(f"self-test: {text}"))
    if json_:
        document = {"environment": environment.to_json(), "toolchains": [asdict(each) for each in toolchains]}
        print_json(document if result is None else {**document, "selftest": result.to_json()})
    elif result is not None:
        print_selftest(result)
    if result is not None and not result.holds:
        raise typer.Exit(1)
