"""The notebook is executed as a reader would, and what it stores is what it prints."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.docs.pages import ROOT

NEEDED = ("nbformat", "nbclient", "ipykernel")
nbformat, nbclient, _ = (pytest.importorskip(name, reason="needs pip install '.[docs]'") for name in NEEDED)

NOTEBOOK = ROOT / "docs/examples/digits.ipynb"


def words(cell: Any) -> list[str]:
    """What a cell prints, without figures: those change with the versions of the packages."""
    shown = [output for output in cell.outputs if output.get("name") != "stderr"]
    texts = [output.get("text") or output["data"]["text/plain"] for output in shown]
    return re.findall(r"[A-Za-z][A-Za-z-]{2,}", " ".join(texts))


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    nbclient.NotebookClient(fresh, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = 0
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            printed = set(words(before))
            assert bool(printed) == bool(words(after)), before.source
            missing = printed - set(words(after))
            assert len(missing) <= len(printed) / 5, f"{before.source}\nno longer prints {sorted(missing)}"
            shown += len(printed)
    assert shown > 20
