"""A browser of this machine, the sizes of its window, and pictures of what it shows, left in artifacts/browser.

Test modules skip themselves without playwright: here nothing of it is imported until a browser starts.
"""

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.processes import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SHOTS = ROOT / "artifacts" / "browser"
DESKTOP, TABLET, PHONE = ({"width": 1400, "height": 900}, {"width": 800, "height": 1000}, {"width": 390, "height": 844})


def find_chromium() -> str | None:
    """A browser of this machine; Playwright's own is not fetched."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for found in map(shutil.which, filter(None, names)) if found), None)


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: apt install chromium, or name one in CHROMIUM")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as api:
        found = api.chromium.launch(executable_path=program, args=arguments)
        yield found
        found.close()


def shoot(page: "Page", name: str, size: dict[str, int], theme: str = "light") -> None:
    """A picture of the whole page at this size of the screen, by day ("light") or by night ("dark")."""
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size(size)
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(int(height) + 1, 4000)})
    page.wait_for_timeout(250)  # charts and tables follow the width
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name.lower().replace(' ', '-')}-{size['width']}-{theme}.png"))
