"""Draw the pictures of the page in README and docs: ``python -m benchmarks.page_picture``.

Runs the README's command and photographs its report.html: the top of the page, the network and the outputs, and a phone
in the dark. Needs what ``benchmarks.browser`` needs, and Pillow.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.browser import open_browser, show
from benchmarks.terminal_picture import ARGUMENTS, ROOT

IMAGES = ROOT / "docs" / "images"

PICTURES = (
    ("report.png", 1180, "light", "h1", "#front"),
    ("report_network.png", 1180, "light", "#network", "#network"),
    ("report_outputs.png", 1180, "light", "#outputs", "#search"),
    ("report_phone.png", 390, "dark", "h1", "#breaks"),
)
"""File, width in pixels, scheme, and the elements at which the picture begins and ends."""

MARGIN = 14


def photograph(driver: Any, page: Path, name: str, width: int, scheme: str, first: str, last: str) -> None:
    """A picture from the top of one element to the bottom of another."""
    show(driver, page, width, scheme, height=4000)
    place = "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]]"
    top = max(0.0, driver.execute_script(place, first, "top") - MARGIN)
    bottom = driver.execute_script(place, last, "bottom") + MARGIN
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    with Image.open(io.BytesIO(base64.b64decode(found["data"]))) as picture:
        # A palette makes a third of the bytes: the page has few colours.
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "digits_vit.mptune"
        command = [sys.executable, "-m", "mptune", *ARGUMENTS.split(), "--out", str(run)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = run / "report.html"
        with open_browser(Path(folder) / "browser") as driver:
            for picture in PICTURES:
                photograph(driver, page, *picture)


if __name__ == "__main__":
    main()
