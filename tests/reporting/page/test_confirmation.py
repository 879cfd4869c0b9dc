from __future__ import annotations

from mptune.reporting.page.confirmation import confirmation_section
from mptune.tuning.runs.confirmation import Confirmation


def test_the_section_of_the_page(confirmation: Confirmation) -> None:
    section = confirmation_section(confirmation)
    assert section.count("<tr") == 1 + len(confirmation.plans)
    assert "its outputs are &lt;not&gt; finite" in section
    assert "<not>" not in section
    assert "the predicted ranking held" in section
    assert section.count('class="is-chosen"') == 1
