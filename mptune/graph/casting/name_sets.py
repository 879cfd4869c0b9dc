"""Sets of names as flags: what a plan means for tens of thousands of values takes NumPy one pass over an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import compress

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Positions = NDArray[np.intp]


class Names(Set[str]):
    """An ordered set of names, each with its position.

    Attributes:
        position: name -> its place in the order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._all = tuple(dict.fromkeys(names))
        self.position = {name: position for position, name in enumerate(self._all)}

    def __contains__(self, name: object) -> bool:
        return name in self.position

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def marked(self, names: Iterable[str] = ()) -> Marked:
        """Those of ``names`` as flags; KeyError for one that is not among them."""
        flags = np.zeros(len(self), np.bool_)
        flags[[self.position[name] for name in names]] = True
        return Marked(self, flags)


class Marked(Set[str]):
    """A set of names out of an ordered set; gives them in its order.

    Attributes:
        names: what the flags are about.
        flags: one for each of ``names``, [len(names)].
    """

    def __init__(self, names: Names, flags: Flags) -> None:
        self.names = names
        self.flags = flags

    def __contains__(self, name: object) -> bool:
        position = self.names.position.get(name, -1)  # type: ignore[call-overload]
        return position >= 0 and bool(self.flags[position])

    def __iter__(self) -> Iterator[str]:
        return compress(self.names, self.flags.tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.flags))

    def add(self, name: str) -> None:
        """Mark one more; KeyError where it is not among the names."""
        self.flags[self.names.position[name]] = True
