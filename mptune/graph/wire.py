"""Just enough of the protobuf wire format to assemble an ONNX file from parts that were serialised once.

A typed model differs from its original in some names and a few small nodes, so joining bytes is all that a plan needs.
Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable

# Field numbers in onnx.proto.
MODEL_GRAPH = 7
GRAPH_NODE = 1
GRAPH_INITIALIZER = 5
NODE_INPUT = 1
NODE_OUTPUT = 2


def varint(value: int) -> bytes:
    """A non-negative integer, seven bits a byte, least significant first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field: a string, bytes or a message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def strings(number: int, values: Iterable[str]) -> bytes:
    """A repeated string field."""
    return b"".join(field(number, value.encode()) for value in values)
