"""Just enough of the protobuf wire format to assemble an ONNX file from parts that were serialised once.

A typed model differs from its original in some names and a few small nodes, so joining bytes is all that a plan needs.
Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# Field numbers in onnx.proto.
MODEL_GRAPH = 7
GRAPH_NODE = 1
GRAPH_INITIALIZER = 5
NODE_INPUT = 1
NODE_OUTPUT = 2
NODE_NAME = 3
TENSOR_RAW_DATA = 9

_AT_ONCE = 1 << 10
_SMALL = tuple(
    [bytes((value,)) for value in range(0x80)]
    + [bytes((value & 0x7F | 0x80, value >> 7)) for value in range(0x80, 0x1000)]
)


@dataclass(frozen=True)
class Streamed:
    """A field that is too large to be held: its first bytes, and what gives the rest a chunk at a time.

    Attributes:
        head: tags and lengths, and whatever is small.
        rest_size: bytes that ``chunks`` gives in all.
        chunks: called for each writing anew.
    """

    head: bytes
    rest_size: int
    chunks: Callable[[], Iterable[bytes]]

    def __len__(self) -> int:
        return len(self.head) + self.rest_size

    def __iter__(self) -> Iterator[bytes]:
        yield self.head
        yield from self.chunks()


Piece = bytes | Streamed
"""A part of a file: bytes, or a promise of them."""


def varint(value: int) -> bytes:
    """A non-negative integer, seven bits a byte, least significant first."""
    if value < 0x1000:
        return _SMALL[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def opening(number: int, size: int) -> bytes:
    """What stands before the ``size`` bytes of a length-delimited field."""
    return varint(number << 3 | 2) + varint(size)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field: bytes or a message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def string(number: int, value: str) -> bytes:
    """A string field."""
    return field(number, value.encode())


def strings(number: int, values: Iterable[str]) -> bytes:
    """A repeated string field."""
    return b"".join([field(number, value.encode()) for value in values])


def prefixed(prefix: bytes, piece: Piece) -> Piece:
    """A piece with something before it."""
    return prefix + piece if isinstance(piece, bytes) else replace(piece, head=prefix + piece.head)


def total_size(pieces: Iterable[Piece]) -> int:
    """Bytes of all pieces together."""
    return sum(map(len, pieces))


def join(pieces: Iterable[Piece]) -> bytes:
    """All pieces as one."""
    return b"".join([piece if isinstance(piece, bytes) else b"".join(piece) for piece in pieces])


class Table:
    """Many small pieces, of which a file takes some in some order.

    Attributes:
        sizes: of the pieces, in bytes.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = np.fromiter(pieces, object, len(pieces))
        self.sizes = np.fromiter(map(len, pieces), np.intp, len(pieces))

    def __setitem__(self, position: int, piece: Piece) -> None:
        self._pieces[position] = piece
        self.sizes[position] = len(piece)

    def selected(self, chosen: NDArray[np.intp], instead: Mapping[int, Piece] | None = None) -> Streamed:
        """The chosen pieces as one. They are joined while it is written, at a time as many as fit the caches.

        Args:
            chosen: positions in the table.
            instead: position among the chosen -> what stands there instead.
        """
        size = int(self.sizes[chosen].sum())
        exceptions: dict[int, list[tuple[int, Piece]]] = {}
        for position, piece in (instead or {}).items():
            size += len(piece) - int(self.sizes[chosen[position]])
            exceptions.setdefault(position // _AT_ONCE, []).append((position % _AT_ONCE, piece))
        return Streamed(b"", size, lambda: self._joined(chosen, exceptions))

    def _joined(
        self, chosen: NDArray[np.intp], exceptions: Mapping[int, Sequence[tuple[int, Piece]]]
    ) -> Iterator[bytes]:
        for number in range(-(-len(chosen) // _AT_ONCE)):
            pieces = self._pieces[chosen[number * _AT_ONCE : (number + 1) * _AT_ONCE]].tolist()
            for position, piece in exceptions.get(number, ()):
                pieces[position] = piece
            try:
                yield b"".join(pieces)
            except TypeError:  # a promise among them
                for piece in pieces:
                    yield from (piece,) if isinstance(piece, bytes) else piece
