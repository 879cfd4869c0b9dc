"""What the website needs beyond docs/: pages that live elsewhere in the repository, and notebooks as pages.

Every page is also read in the repository itself, so links there are ordinary relative links. On the website a link
to a page that is published leads to it; a link to another file of the repository (a script, a folder) keeps its text
only, since the site has no such file.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

PUBLISHED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "reference/benchmarks.md",
    "benchmarks/models/README.md": "reference/digits-model.md",
}
"""Pages of the repository that stand outside docs/, and their place on the site."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and a page for every notebook."""
    for source, place in PUBLISHED.items():
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"))
        place = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, place, content=notebook_as_markdown(notebook, file.src_uri)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of the repository links of the site."""
    here = page.file.src_uri
    homes = {place: source for source, place in PUBLISHED.items() if (ROOT / "docs" / place).is_file() is False}
    home = homes.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        place = site_place(
            posixpath.normpath(posixpath.join(posixpath.dirname(home), path)), mark == "!", config, files
        )
        if place is None:
            return text
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def site_place(path: str, is_image: bool, config: MkDocsConfig, files: Files) -> str | None:
    """Where a file of the repository stands on the site; None where it does not."""
    if path in PUBLISHED:
        return PUBLISHED[path]
    if path.startswith("docs/"):
        place = path.removeprefix("docs/")
        return place.removesuffix(".ipynb") + ".md" if place.endswith(".ipynb") else place
    if not is_image:
        return None
    place = f"images/{posixpath.basename(path)}"
    if files.get_file_from_path(place) is None:
        image = File.generated(config, place, content=(ROOT / path).read_bytes())
        files.append(image)
        image.copy_file()
    return place


def notebook_as_markdown(notebook: dict[str, Any], name: str) -> str:
    """Text cells as they are, code cells as fenced blocks, each followed by the output that the notebook stores."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    title, rest = parts[0], parts[1:]
    note = f"This page is the notebook `docs/{name}` of the repository, which the tests run."
    return "\n\n".join([title, note, *rest]) + "\n"


def _output(output: dict[str, Any]) -> str:
    """One stored output as text; an SVG picture stays a picture."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f'<div class="picture">{"".join(data["image/svg+xml"])}</div>'
    if "image/png" in data:
        return (
            f'<img alt="The figure that the cell above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
        )
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```"
