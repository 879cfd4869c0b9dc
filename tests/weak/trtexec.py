"""How trtexec reads its arguments of layers, after samples/common/sampleOptions.cpp and sampleUtils.h of its tags.

``--layerPrecisions`` and ``--layerOutputTypes`` of 8.4.3 to v10.3.0: a list that is split at commas, each entry at its
last colon; 8.x looks layers up by their names or takes ``*`` for all others, 10.x (``findPlausible``) by exact names
first, then by one wildcard.
"""

from __future__ import annotations

from collections.abc import Mapping

TYPES = {"fp32", "fp16", "int8", "int32"}
"""``stringToValue<DataType>`` of 8.4 and 8.5."""


def split(text: str, separator: str, most: int | None = None) -> list[str]:
    """``splitToStringVec``: an empty text gives nothing, a last separator no last part."""
    parts: list[str] = []
    start = 0
    while start < len(text):
        end = text.find(separator, start)
        if end < 0 or (most is not None and len(parts) >= most):
            end = len(text)
        parts.append(text[start:end])
        start = end + 1
    return parts


def name_and_value(text: str) -> tuple[str, str]:
    """``splitNameAndValue``, then ``removeSingleQuotationMarks`` on the name."""
    quoted = split(text, "'")
    if len(quoted) != 1:
        if len(quoted) != 3:
            raise ValueError(f"Found invalid number of 's when parsing {text}")
        return quoted[0] + quoted[1], quoted[2][1:]
    parts = split(text, ":")
    return ":".join(parts[:-1]), parts[-1]


def layer_precisions(text: str) -> dict[str, str]:
    """``getLayerPrecisions``."""
    read = dict(name_and_value(entry) for entry in split(text, ","))
    assert set(read.values()) <= TYPES
    return read


def layer_output_types(text: str) -> dict[str, list[str]]:
    """``getLayerOutputTypes``."""
    read = {name: split(value, "+") for name, value in map(name_and_value, split(text, ","))}
    assert {kind for kinds in read.values() for kind in kinds} <= TYPES
    return read


def plausible(told: Mapping[str, str], layer: str) -> str | None:
    """What a layer is told: ``setLayerPrecisions`` of 8.x, ``findPlausible`` of 10.x."""
    if layer in told:
        return told[layer]
    for pattern, kind in told.items():
        first, star, last = pattern.partition("*")
        if star and len(layer) >= len(first) + len(last) and layer.startswith(first) and layer.endswith(last):
            return kind
    return None
