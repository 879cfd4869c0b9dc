"""The names that ``import mptune`` gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mptune


def test_every_public_name_is_there() -> None:
    for name in mptune.__all__:
        assert getattr(mptune, name) is not None
    assert set(mptune.__all__) <= set(dir(mptune))


@pytest.mark.parametrize(
    "first",
    [
        "import mptune.tuning.steps.tuner",
        "import mptune.reporting.text",
        "mptune.Evaluation",
        "mptune.search",
        "import mptune.api",
    ],
)
def test_search_and_report_are_functions_whatever_was_imported_before(first: str) -> None:
    """Both are names of subpackages too."""
    code = f"import mptune\n{first}\nassert callable(mptune.search) and callable(mptune.report)\n"
    code += "from mptune.tuning.steps.tuner import Tuner\n"
    code += "assert mptune.search.__module__ == mptune.report.__module__ == 'mptune.api'"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        mptune.nothing_like_it  # noqa: B018
