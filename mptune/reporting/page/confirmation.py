"""The page's section on a confirmation: what the search reported and what the device measured, plan by plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptune.printable import printable_html as escape
from mptune.reporting.confirmation_text import cells_of, failures, headings, place_of, verdicts

if TYPE_CHECKING:
    from mptune.tuning.runs.confirmation import Confirmation


def confirmation_section(confirmation: Confirmation) -> str:
    """The section of the page: the table of both, and the verdicts."""
    heads = "".join(f'<th class="number">{escape(name)}</th>' for name in headings(confirmation))
    rows = []
    for plan in confirmation.plans:
        name, figures, origin = cells_of(confirmation, plan)
        place = place_of(confirmation, plan)
        numbers = "".join(f'<td class="number">{escape(text)}</td>' for text in figures)
        style = ' class="is-chosen"' if place == "chosen" else ""
        rows.append(f"<tr{style}><td><code>{name}</code></td>{numbers}<td>{place}</td><td>{escape(origin)}</td></tr>")
    lines = (*verdicts(confirmation), *failures(confirmation))
    summary = "".join(f"<p>{escape(line)}.</p>" for line in lines)
    body = "\n".join(rows)
    return (
        f"<section>\n<h2>Search against measurement: {escape(confirmation.front.device)}</h2>\n{summary}\n"
        f'<div class="scroll"><table>\n<thead><tr><th>plan</th>{heads}<th></th><th>origin</th></tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n</section>"
    )
