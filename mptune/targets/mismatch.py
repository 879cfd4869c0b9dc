"""Where a target is not the device here: findings and warnings."""

from __future__ import annotations

from mptune.finding import CODES, Finding, Where
from mptune.targets.jetson import JetsonState, same_memory
from mptune.targets.target import Target

TARGET_CODE = "target-not-here"

_CLOCK_TOLERANCE = 0.05
"""The steps of the clock are finer; profiles round it."""


def not_measured(device: str) -> Finding:
    """The finding of a search whose latencies are predicted.

    Args:
        device: what they are predicted for.
    """
    return Finding(
        code=TARGET_CODE,
        severity=CODES[TARGET_CODE].severity,
        origin="search",
        where=Where(),
        evidence={"target": device},
        text=f"{device} is not measured here: latency is predicted and errors are emulated",
        cure="`mptune confirm` measures both on the device",
    )


def profile_warnings(target: Target, jetson: JetsonState) -> tuple[str, ...]:
    """Where the device here differs from the one that a profile describes, one line each, ending with what to do."""
    warnings = []
    if not _is_module(target, jetson):
        memory = "" if jetson.memory_gb is None else f", {jetson.memory_gb:g} GB"
        part = f", module {jetson.part}" if jetson.part else ""
        warnings.append(
            f"this is {jetson.model}{part}{memory}, and the target is {target.title}: what was predicted holds for "
            "another module; give --target the profile of this one"
        )
    highest, assumed = jetson.gpu_max_mhz, target.gpu_mhz
    if highest is not None and assumed is not None and abs(highest / assumed - 1) > _CLOCK_TOLERANCE:
        mode = f"power mode {jetson.power_mode}" if jetson.power_mode else "the power mode"
        warnings.append(
            f"{mode} lets the GPU run at {highest:.0f} MHz, the profile {target.name} holds for {assumed:.0f} MHz: "
            "set the mode that will be deployed (sudo nvpmodel -m ID), and go by what is measured in it"
        )
    if highest is not None and jetson.gpu_min_mhz is not None and jetson.gpu_min_mhz < highest:
        warnings.append(
            f"the GPU's clock floats between {jetson.gpu_min_mhz:.0f} and {highest:.0f} MHz: lock it for measuring "
            "(sudo jetson_clocks)"
        )
    return tuple(warnings)


def _is_module(target: Target, jetson: JetsonState) -> bool:
    """Whether the module is the profile's; a value that the device does not report rules nothing out."""
    if target.kind != "jetson":
        return False
    if jetson.part and target.part_numbers:
        return jetson.part in target.part_numbers
    if target.gpu_names and not any(name.lower() in jetson.model.lower() for name in target.gpu_names):
        return False
    if jetson.memory_gb is None or target.memory_gb is None:
        return True
    return same_memory(jetson.memory_gb, target.memory_gb)
