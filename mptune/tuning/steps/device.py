"""The device of a search against its profile: what belies the profile, and whether the model fits its memory."""

from __future__ import annotations

from dataclasses import replace

from mptune.engines.base import Toolchain
from mptune.engines.environment import Environment
from mptune.graph.loading.model import Model
from mptune.targets.memory import memory_need, memory_warnings
from mptune.targets.mismatch import profile_warnings
from mptune.targets.target import Target
from mptune.tuning.steps.prepare import Observations


def describe_device(toolchain: Toolchain, target: Target | None) -> Environment:
    """The machine, with warnings where it is measured and is not what the profile's figures hold for.

    Args:
        toolchain: who measures, or predicts: then the machine is not the device, and says nothing of it.
        target: the profile; None where the caller brought a toolchain of its own.
    """
    environment = toolchain.environment()
    if target is None or environment.jetson is None or toolchain.latency_source != "measured":
        return environment
    return environment.with_warnings(*profile_warnings(target, environment.jetson))


def check_memory(observations: Observations, model: Model, target: Target | None) -> Observations:
    """The observations with a warning where the model will not fit the target's memory."""
    if target is None:
        return observations
    told = memory_warnings(memory_need(model, observations.shapes), target)
    return replace(observations, warnings=(*observations.warnings, *told))
