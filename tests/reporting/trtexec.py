"""How trtexec reads its arguments, after NVIDIA/TensorRT, samples/common, tags v10.0.1, v10.3.0, v10.16 and v11.1.

The rules are those of ``argsToArgumentsMap``, ``splitNameAndValue``, ``getShapesBuild``, ``stringToValue`` and
``removeSingleQuotationMarks`` (sampleOptions.cpp), ``splitToStringVec``, ``matchStringWithOneWildcard`` and
``findPlausible`` (sampleUtils) and ``setupNetworkAndConfig`` (sampleEngines.cpp), which are the same in all four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Sizes = tuple[int, ...]

FLAGS = {"--stronglyTyped", "--noTF32", "--useCudaGraph", "--noDataTransfers", "--useSpinWait"}
WITH_VALUE = {"--onnx", "--saveEngine", "--memPoolSize", "--builderOptimizationLevel", "--timingCacheFile"}
REPEATABLE = {"--staticPlugins", "--dynamicPlugins"}
SHAPES = ("--minShapes", "--optShapes", "--maxShapes")


def split(text: str, separator: str, most: int = -1) -> list[str]:
    """``splitToStringVec``: nothing of an empty text, and an empty piece where a separator ends it."""
    return text.split(separator, most) if text else []


def read_options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its values, in order; an option that no parser takes is an error."""
    options: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in ((*WITH_VALUE, *REPEATABLE, *SHAPES) if equals else FLAGS):
            raise ValueError(f"Unknown option: {argument}")
        options.setdefault(name, []).append(value)
        if len(options[name]) > 1 and name not in REPEATABLE:
            raise ValueError(f"given twice: {name}")
    return options


def name_and_sizes(text: str) -> tuple[str, Sizes]:
    """Split one entry of a list of shapes."""
    quoted = split(text, "'")
    if len(quoted) > 1:
        if len(quoted) != 3:
            raise ValueError(f"Found invalid number of 's when parsing {text}")
        name, value = quoted[0] + quoted[1], quoted[2][1:]
    else:
        *before, value = split(text, ":")
        name = ":".join(before) if before else value
    name = "".join(split(name, "'"))
    return name, () if value == "scalar" else tuple(int(size) for size in split(value, "x"))


def matches(pattern: str, name: str) -> bool:
    head, star, tail = pattern.partition("*")
    is_long = len(name) >= len(head) + len(tail)
    return is_long and name.startswith(head) and name.endswith(tail) if star else pattern == name


def profile(
    arguments: Sequence[str], inputs: Mapping[str, Sequence[int]], shape_tensors: Sequence[str] = ()
) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
    """The optimization profile: smallest, usual and largest of each dynamic input, and of each shape tensor's values.

    ``inputs`` are those of the network, -1 for a size that is dynamic.
    """
    options = read_options(arguments)
    given: dict[str, list[Sizes]] = {}
    for option in SHAPES:
        for entry in split(options.get(option, [""])[0], ","):
            name, sizes = name_and_sizes(entry)
            given.setdefault(name, []).append(sizes)
    for pattern in given:
        if not any(matches(pattern, name) for name in inputs):
            raise ValueError(f"Cannot find input tensor with name {pattern!r} in the network inputs")
    read = {}
    for name, declared in inputs.items():
        if -1 not in declared and name not in shape_tensors:
            continue
        plausible = name if name in given else next((pattern for pattern in given if matches(pattern, name)), None)
        count = declared[0] if declared else 1
        ones = (1,) * count if name in shape_tensors else tuple(1 if size < 0 else size for size in declared)
        smallest, usual, largest = [ones] * 3 if plausible is None else given[plausible]
        read[name] = (smallest, usual, largest)
    return read
