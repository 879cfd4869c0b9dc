"""Pages of the documentation as data: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
"""The pages that people read to use mptune, relative to the repository."""

_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: as after the fence.
        title: the name of the file that the block is, or None.
        body: the text between the fences.
    """

    language: str
    title: str | None
    body: str


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(language, title or None, body) for language, title, body in _FENCE.findall(text)]


def prose_of(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, without comments; ``&&`` and a pipe into jq stay as they are written."""
    lines = block.body.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(?:^|\s)#.*$", "", line).strip() for line in lines]
    return [re.sub(r"\s+", " ", line) for line in bare if line]
