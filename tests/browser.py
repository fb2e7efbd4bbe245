"""Headless Chromium, as a test looks at a page: sizes, light and dark, the console, the order of focus, screenshots.

The Debian packages ``chromium`` and ``chromium-driver`` are installed by whoever is root and does not have them.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def ensure_chromium() -> None:
    """Install Chromium and its driver where they are missing.

    Raises:
        RuntimeError: they are missing, and this user cannot install them.
    """
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.geteuid() != 0:
        raise RuntimeError(f"headless Chromium is missing; as root: apt-get install {' '.join(_PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *_PACKAGES)):
        done = subprocess.run(
            ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *words], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"apt-get {words[0]} failed: {done.stderr[-500:]}")


class Browser:
    """One browser with one page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def look(self, width: int, height: int = 900, *, is_dark: bool = False) -> None:
        """Size of the page in CSS pixels, and the colour scheme that it is told."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # no scrolling that takes time
        self.command("Emulation.setEmulatedMedia", {"features": [scheme, still]})

    def open(self, path: Path) -> None:
        self.driver.get(path.resolve().as_uri())
        self.settle()

    def settle(self) -> None:
        """Two frames and what was queued for them."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 60)));"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function's body in the page."""
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def console(self) -> list[str]:
        """What was written to the console since the last look, of any level."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def scrolls_sideways(self) -> bool:
        return bool(self.run("return document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """A key, as a keyboard gives it (not a synthetic event of a script)."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.command("Input.dispatchKeyEvent", {"type": "rawKeyDown", **common})
        self.command("Input.dispatchKeyEvent", {"type": "keyUp", **common})

    def screenshot(self, path: Path, *, whole: bool = False, selector: str | None = None, margin: int = 0) -> Path:
        """A PNG of what is seen, of the whole page, or of one element with ``margin`` pixels around it."""
        arguments: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole or selector is not None}
        if selector is not None:
            box = self.run(
                "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
                "const m = arguments[1];"
                "return {x: b.x + scrollX - m, y: b.y + scrollY - m, width: b.width + 2 * m, height: b.height + 2 * m}",
                selector,
                margin,
            )
            arguments["clip"] = {**box, "scale": 1}
        elif whole:
            size = self.run("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
            arguments["clip"] = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        data = self.command("Page.captureScreenshot", arguments)["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextmanager
def headless() -> Iterator[Browser]:
    """A browser with an empty profile of its own, which is gone afterwards."""
    ensure_chromium()
    with tempfile.TemporaryDirectory(prefix="milesbatch-browser-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
