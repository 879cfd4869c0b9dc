"""Chromium without a window, driven by selenium: for the benchmark of the page, its pictures, and its tests.

Needs Debian's ``chromium`` and ``chromium-driver``, and the extra ``test-browser``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "headless no-sandbox disable-gpu disable-background-networking disable-component-update disable-sync "
    "disable-dev-shm-usage hide-scrollbars"
)

NEXT_FRAME = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))"
"""An asynchronous script that ends when what was asked for is drawn: drawings follow their frames, a frame later."""


def missing() -> str:
    """What is not installed, for whoever skips; empty where nothing is missing."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(lacking)} (Debian: chromium chromium-driver)" if lacking else ""


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A selenium driver that logs the console and every request.

    Args:
        profile: an empty folder for the browser's own files.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS.split(), f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def show(driver: Any, page: Path, width: int = 1280, scheme: str = "light", *, height: int = 900) -> None:
    """Open a page at a width in pixels, in the light or the dark scheme, and wait until it is drawn."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.absolute().as_uri())
    driver.execute_async_script(NEXT_FRAME)
