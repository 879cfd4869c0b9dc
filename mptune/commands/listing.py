"""``mptune targets``, ``spaces`` and ``doctor``: profiles, search spaces, and what this machine can do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from mptune.commands.common import JsonOption, complain, print_json


def targets(
    name: str | None = typer.Argument(
        None,
        metavar="NAME|FILE",
        help="Show one profile, or a file of your own: its figures and their sources.",
        show_default=False,
    ),
    json_: JsonOption = False,
) -> None:
    """List the devices that have a profile, or show one.

    A profile names the source of every figure.

    \b
    Example:
      mptune targets
      mptune targets jetson-orin-nano-8gb-super
      mptune search model.onnx --target jetson-orin-nano-8gb-super
    """
    from mptune.targets.target import list_targets, load_target

    profiles = list_targets() if name is None else [load_target(name)]
    if json_:
        documents = [target.model_dump() for target in profiles]
        print_json(documents if name is None else documents[0])
        return
    from mptune.reporting.terminal.listings import print_target, print_targets

    if name is None:
        print_targets(profiles)
    else:
        print_target(profiles[0])


def spaces(json_: JsonOption = False) -> None:
    """List the search spaces.

    A search space defines which groups are pinned, and which plans are tried first.

    \b
    Example:
      mptune spaces
      mptune search model.onnx --space transformer
    """
    from mptune.tuning.space import list_spaces

    named = list_spaces()
    if json_:
        print_json(
            [{"name": s.name, "path": str(s.path), "sha256": s.sha256, **s.file.model_dump(mode="json")} for s in named]
        )
        return
    from mptune.reporting.terminal.listings import print_spaces

    print_spaces(named)


def doctor(
    selftest: bool = typer.Option(
        False,
        "--selftest",
        help="Build, run, time and check the demo's model on every engine here. Exit code 1 if a check fails.",
    ),
    json_: JsonOption = False,
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

    environment, toolchains = describe_environment(), list_toolchains()
    document: dict[str, Any] = {
        "environment": environment.to_json(),
        "toolchains": [asdict(each) for each in toolchains],
    }
    if not json_:
        print_doctor(environment, toolchains)
    holds = True
    if selftest:
        from mptune.selftest import run_selftest

        result = run_selftest(progress=lambda text: complain(f"self-test: {text}"))
        holds, document["selftest"] = result.holds, result.to_json()
        if not json_:
            print_selftest(result)
    if json_:
        print_json(document)
    if not holds:
        raise typer.Exit(1)
