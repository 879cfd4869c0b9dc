"""The front as one self-contained HTML page: data, style and script inside, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from string import Template
from typing import Any

from mptune.files import write_text
from mptune.printable import printable_html as escape
from mptune.reporting.page.document import PageContent, page_document
from mptune.resources import read_template

SCRIPTS = (
    "dom", "format", "state", "findings", "decide", "axes", "chart", "selection", "strip", "points", "outputs",
    "confirmation", "progress", "main",
)  # fmt: skip
"""The parts of the page's script, in the order in which they are put together."""


def write_report(content: PageContent, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render(content))


def render(content: PageContent) -> str:
    """The page as text. The script builds it from the data, with text nodes only: no text becomes markup.

    A content security policy forbids every request, and every script and style but the page's own.
    """
    front = content.front
    style = read_template("page/page.css")
    script = '(() => {\n"use strict";\n' + "".join(read_template(f"page/{name}.js") for name in SCRIPTS) + "})();\n"
    return Template(read_template("page/page.html")).substitute(
        title=escape(f"{front.model_path.name} on {front.target} - mptune"),
        model=escape(front.model_path.name),
        policy=f"default-src 'none'; img-src data:; style-src {_allowed(style)}; script-src {_allowed(script)}",
        style=style,
        script=script,
        data=embedded_json(page_document(content)),
    )


def embedded_json(document: Any) -> str:
    """JSON that may stand in a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _allowed(text: str) -> str:
    """The hash by which a content security policy allows an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
