"""The messages are TensorRT's own: of TensorRT-RTX 1.7.1 as it printed them, and of 8.5 to 10.15 in public issues."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.tensorrt.library import build_failure, construct, parser_failure, skipped_tactics


def logged(*errors: str, warnings: Sequence[str] = ()) -> Any:
    """A log that holds these."""
    return SimpleNamespace(errors=[*errors], warnings=[*warnings])


BUILDS = [
    (
        "IBuilder::buildSerializedNetwork: Error Code 7: BuildCanceled (Build canceled by user In next at"
        " /_src/optimizer/common/scopedProgressReporter.cpp:92)",
        FailureKind.TIMEOUT,
        "BuildCanceled: Build canceled by user",
    ),
    (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection:"
        " no tactics to implement the operation within workspace limit. Consider increase the allowed workspace size if"
        " applicable.; [tactic.cpp:264: run] Error during tactic selection. In compileGraph at"
        " /_src/optimizer/myelin/codeGenerator.cpp:2012)",
        FailureKind.NO_TACTIC,
        "Myelin: Tactic Selection: no tactics to implement the operation within workspace limit",
    ),
    (
        "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on an"
        " incompatible device, expecting compute 8.9 got compute 8.6, please rebuild.)",
        FailureKind.UNSUPPORTED,
        "The engine plan file is generated on an incompatible device, expecting compute 8.9 got compute 8.6",
    ),
    (
        "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion stdVersionRead =="
        " kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 237, Serialized Engine"
        " Version: 239)",
        FailureKind.ERROR,
        "Serialization: Version tag does not match. Note: Current Version: 237, Serialized Engine Version: 239",
    ),
    (
        "Error reading CUDA GPU properties: In getCurrentCC at /_src/runtime/dispatch/planHeaders.cpp:130 (cudaError"
        " 35: CUDA driver version is insufficient for CUDA runtime version) Ensure that the GPU driver is installed.",
        FailureKind.DRIVER,
        "Error reading CUDA GPU properties: (cudaError 35: CUDA driver version is insufficient",
    ),
]


@pytest.mark.parametrize(("text", "kind", "begins"), BUILDS, ids=[text[:40] for text, _, _ in BUILDS])
def test_kind_and_words_of_a_failed_build(text: str, kind: FailureKind, begins: str) -> None:
    failure = build_failure(logged(text))
    assert failure.kind is kind
    assert failure.message.startswith(begins)
    assert "/_src/" not in failure.message
    assert "\n" not in failure.message


def test_the_telling_error_is_taken_whatever_stands_around_it() -> None:
    no_device = (
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at"
        " /_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient))"
    )
    usage = "IBuilder::x: Error Code 4: API Usage Error (Network has no outputs In validate at /_src/network.cpp:3)"
    assert build_failure(logged(no_device, usage, no_device)).message == "Network has no outputs"
    assert build_failure(logged(no_device)).kind is FailureKind.DRIVER
    assert build_failure(logged(no_device.replace("35", "100"))).kind is FailureKind.DEVICE_LOST
    out_of_memory = "[x.cpp::y::1] Error Code 2: OutOfMemory (Requested size was 8 bytes.)"
    no_tactic = "10: Could not find any implementation for node a."
    assert build_failure(logged(no_tactic, out_of_memory)).kind is FailureKind.OUT_OF_MEMORY


def test_layers_without_a_kernel_for_want_of_memory() -> None:
    """TensorRT warns of tactics that it skips, then misses an implementation."""
    skipped = (
        "Skipping tactic 3 due to insufficient memory on requested size of 68719476736 detected for tactic"
        " 0x0000000000000074."
    )
    missing = (
        "[optimizer.cpp::computeCosts::3869] Error Code 10: Internal Error (Could not find any implementation for node"
        " {ForeignNode[(Unnamed Layer* 1247) [Shuffle].../layers.7/Transpose_2 + /layers.7/Reshape_4]}.)"
    )
    failure = build_failure(logged(missing))
    assert failure.kind is FailureKind.NO_TACTIC
    assert failure.message.endswith("[Shuffle].../layers.7/Transpose_2 + /layers.7/Reshape_4]}.")
    failure = build_failure(logged(missing, warnings=[skipped]))
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.message.endswith("tactics were skipped because of too little memory")


def test_a_constructor_that_gives_nothing() -> None:
    log = logged("CUDA initialization failure with error: 35")

    def refuse() -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    with pytest.raises(EngineError, match="CUDA initialization failure") as caught:
        construct(refuse, log)
    assert caught.value.kind is FailureKind.DRIVER
    log.errors.clear()
    with pytest.raises(EngineError, match="returned nullptr"):
        construct(refuse, log)
    assert construct(lambda: 3, log) == 3


PLUGIN = 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
TYPES = (
    "Invalid Node - nn\nITensor::getDimensions: Error Code 4: API Usage Error (nn: ElementWiseOperation SUM must have"
    " same input types. But they are of types Float and Half. In validateTypes at /_src/x/node.cpp:40)\n"
)


@pytest.mark.parametrize(
    ("complaint", "kind", "begins"),
    [
        (
            ("UNSUPPORTED_NODE", f"Assertion failed: {PLUGIN}", "n", "Round"),
            FailureKind.UNSUPPORTED,
            "Round node 'n': Plugin not found, are",
        ),
        (
            ("INVALID_NODE", TYPES, "nn", "Add"),
            FailureKind.PARSER,
            "Add node 'nn': nn: ElementWiseOperation SUM must have same input types.",
        ),
        (("MEM_ALLOC_FAILED", "words", "", ""), FailureKind.OUT_OF_MEMORY, "words"),
    ],
)
def test_a_complaint_about_an_operator_counts_most(complaint: tuple[str, ...], kind: FailureKind, begins: str) -> None:
    first = ("INVALID_GRAPH", "something follows from it", "", "")
    error = parser_failure([complaint], logged())  # type: ignore[list-item]
    assert error.kind is kind
    assert error.message.startswith(begins)
    counts = parser_failure([first, complaint], logged())  # type: ignore[list-item]
    assert counts.message.startswith(begins if kind is FailureKind.UNSUPPORTED else "something follows from it")
    assert parser_failure([], logged()).kind is FailureKind.ERROR


REQUEST = "Tactic Device request: 4106MB Available: 2893MB. Device memory is insufficient to use tactic."
OLDER = "Skipping tactic 0 due to insuffcient memory on requested size of 1179648 detected for tactic 60."


@pytest.mark.parametrize(
    ("warning", "is_told"), [(REQUEST, True), (OLDER, True), ("Skipping tactic 5 due to x", False)]
)
def test_tactics_skipped_for_memory_are_a_warning_of_the_engine(warning: str, is_told: bool) -> None:
    assert ["--workspace" in text for text in skipped_tactics(["Detected layernorm nodes.", warning])] == [
        True
    ] * is_told
