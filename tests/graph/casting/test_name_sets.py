from __future__ import annotations

import numpy as np
import pytest

from mptune.graph.casting.name_sets import Marked, Names


def test_names_keep_their_order_and_know_their_positions() -> None:
    names = Names(["b", "a", "b", "c"])
    assert list(names) == ["b", "a", "c"]
    assert len(names) == 3
    assert names.position == {"b": 0, "a": 1, "c": 2}
    assert "c" in names
    assert "d" not in names
    assert {"a", "d"} & names == {"a"}


def test_marked_names_are_a_set_in_the_order_of_the_names() -> None:
    names = Names(["x", "y", "z"])
    marked = names.marked(["z", "x"])
    assert marked.flags.tolist() == [True, False, True]
    assert list(marked) == ["x", "z"]
    assert len(marked) == 2
    assert marked == {"x", "z"}
    marked.add("y")
    assert marked == names
    assert "w" not in marked
    assert not Marked(names, np.zeros(3, np.bool_))


def test_nothing_that_is_not_among_the_names_can_be_marked() -> None:
    names = Names(["x"])
    with pytest.raises(KeyError):
        names.marked(["y"])
    with pytest.raises(KeyError):
        names.marked().add("y")
