"""Limits on the metrics' own values: how they are written."""

from __future__ import annotations

import pytest

from mptune.errors import SettingsError
from mptune.tuning.fronts.limits import MetricLimit

SCRIPT = "my metrics.py:f1:max"


@pytest.mark.parametrize("name", [SCRIPT, "my metrics.py:f1"])
def test_a_limit_names_a_function_with_or_without_its_direction(name: str) -> None:
    limit = MetricLimit.parse(f"{name}>=0.9", ("relative_l2", SCRIPT))
    assert (limit.metric, limit.at_least, limit.bound) == (SCRIPT, True, 0.9)


def test_the_name_as_it_is_comes_first() -> None:
    assert MetricLimit.parse("m.py:f<=1", ("m.py:f", "m.py:f:max")).metric == "m.py:f"


@pytest.mark.parametrize("name", ["f1", "metrics.py:f1", "my metrics.py:f1:min", "map:max"])
def test_another_metric_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"the metrics are map, my metrics\.py:f1:max"):
        MetricLimit.parse(f"{name}>=0.9", ("map", SCRIPT))
