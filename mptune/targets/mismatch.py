"""Where a target is not the device here: findings and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mptune.finding import Finding, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.ops import RECURRENT
from mptune.targets.costs import Shape
from mptune.targets.jetson import JetsonState
from mptune.targets.roofline import FUSED, roofline
from mptune.targets.target import Target, can_be, in_power_mode

TARGET_CODE = "target-not-here"

_RECURRENT_RATIOS = (3, 13)
"""Measured over emulated errors of three LSTM layers, ONNX Runtime's CUDA provider on an H200."""

_TF32_COUNTS = 0.01
"""Share of all-FP32's latency that TF32 saves, below which nothing is said of it."""

_LIMITS = {"{:.0f} SMs": "sm_count", "the GPU {:.0f} MHz": "gpu_mhz", "the memory {:.0f} MHz": "memory_mhz"}

_CLOCK_TOLERANCE = 0.05
"""The steps of the clock are finer; profiles round it."""


def not_measured(device: str) -> Finding:
    """The finding of a search whose latencies are predicted."""
    return Finding.of(TARGET_CODE, "search", Where(), {"target": device})


def beside_tf32(
    findings: Sequence[Finding],
    grouped: GroupedModel,
    target: Target | None,
    shapes: Mapping[str, Shape],
    *,
    tf32: bool = False,
) -> tuple[Finding, ...]:
    """The findings of ``not_measured``, with the latency that all-FP32 would have with TF32, TensorRT's default."""
    not_here = tuple(finding for finding in findings if finding.code == TARGET_CODE)
    if not not_here or target is None or target.tf32_tflops is None:
        return not_here
    terms = roofline(grouped, target, shapes, replace(FUSED, tf32=True))
    fp32_ms, tf32_ms = terms.base_ms, terms.base_ms - terms.tf32_gain_ms
    if tf32_ms >= (1 - _TF32_COUNTS) * fp32_ms:
        return not_here
    evidence = {"target": not_here[0].evidence["target"], "fp32_ms": fp32_ms, "tf32_ms": tf32_ms}
    ratio = fp32_ms / tf32_ms
    return (Finding.of(TARGET_CODE, "search", Where(), evidence, kind="beside TF32", ratio=ratio, tf32=tf32),)


def not_emulated(findings: Sequence[Finding], grouped: GroupedModel) -> tuple[Finding, ...]:
    """The finding of a search with ``not_measured`` about the operators whose emulated errors are too small."""
    groups = [group for group in grouped.groups if not RECURRENT.isdisjoint(group.ops) and group.pinned is None]
    if not groups or not any(finding.code == TARGET_CODE for finding in findings):
        return ()
    operators = ", ".join(sorted({op for group in groups for op in group.ops} & RECURRENT))
    where, (low, high) = Where(groups=tuple(group.id for group in groups)), _RECURRENT_RATIOS
    evidence: dict[str, int | float | str] = {"operators": operators, "low": low, "high": high}
    return (Finding.of("emulation-differs", "search", where, evidence, kind="recurrent"),)


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
    mode = jetson.mode
    scaled = in_power_mode(target, mode)
    limits = [
        (words.format(getattr(scaled, figure)), words.format(getattr(target, figure)))
        for words, figure in _LIMITS.items()
        if abs((getattr(scaled, figure) or 1) / (getattr(target, figure) or 1) - 1) > _CLOCK_TOLERANCE
    ]
    if limits:
        here, assumed = (", ".join(each) for each in zip(*limits, strict=True))
        warnings.append(
            f"power mode {mode.name or 'here'} leaves {here}, and the profile {target.name} holds for {assumed} "
            f"({scaled.fp16_tflops:.1f} of {target.fp16_tflops:.1f} TFLOPS in FP16): set the mode that will be "
            "deployed (sudo nvpmodel -m ID), and go by what is measured in it"
        )
    highest = jetson.gpu_max_mhz
    if highest is not None and jetson.gpu_min_mhz is not None and jetson.gpu_min_mhz < highest:
        warnings.append(
            f"the GPU's clock floats between {jetson.gpu_min_mhz:.0f} and {highest:.0f} MHz: lock it for measuring "
            "(sudo jetson_clocks)"
        )
    return tuple(warnings)


def other_mode(earlier: JetsonState | None, now: JetsonState | None, before: str, cure: str) -> tuple[str, ...]:
    """The warning that measurements go on in another power mode than that of those ``before``."""
    if earlier is None or now is None or not earlier.mode.differs(now.mode):
        return ()
    return (f"{before} in power mode {earlier.mode}, and this is {now.mode}: {cure}",)


def _is_module(target: Target, jetson: JetsonState) -> bool:
    if jetson.part and target.part_numbers:
        return jetson.part in target.part_numbers
    return target.kind == "jetson" and can_be(target, jetson.model, jetson.memory_gb)
