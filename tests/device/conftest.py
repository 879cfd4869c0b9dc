"""The machines, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.machines import MACHINES, Here, become

EACH = [pytest.param(name, marks=() if name == "orin" else pytest.mark.slow) for name in MACHINES]
"""An Orin is the machine that the tool is for: it is tested each time."""


@pytest.fixture(params=EACH)
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Here]:
    """No rule is broken on it."""
    with become(request.param, tmp_path / "machine", is_alone=True) as here:
        yield here
        assert here.broken() == []
