"""The dashboard's pages that do something, in a real browser on a real system: a query with a picture, a cancelled registration, logs, links."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infaas.blocking import connect_blocking
from infaas.demo import digits
from infaas.errors import InfaasError
from tests.support.clients.browser import DESKTOP, PHONE, TABLET, browser, shoot
from tests.support.servers.processes import environ, eventually
from tests.support.servers.system import APP, Whole

__all__ = ["browser"]  # a fixture
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
pytestmark = pytest.mark.slow

PATIENCE = 90_000  # ms


@pytest.fixture
def page(browser: "playwright.Browser", system: Whole) -> Iterator["playwright.Page"]:
    context = browser.new_context(viewport=DESKTOP, timezone_id="America/New_York")
    found = context.new_page()
    found.set_default_timeout(PATIENCE)
    yield found
    context.close()


def expect(locator: "playwright.Locator") -> "playwright.LocatorAssertions":
    return playwright.expect(locator)


def shoot_all(page: "playwright.Page", name: str) -> None:
    for size, theme in ((DESKTOP, "dark"), (TABLET, "dark"), (TABLET, "light"), (PHONE, "light"), (DESKTOP, "light")):
        shoot(page, name, size, theme)
        assert not page.get_by_test_id("stException").count()
        page.wait_for_function(f"document.querySelector('[data-testid=stMain]').scrollWidth <= {size['width']}")
    page.set_viewport_size(DESKTOP)


def click_cell(table: "playwright.Locator", x: int) -> None:
    """Click into the first row of a table; its cells are drawn on a canvas. x: pixels from its left."""
    table.click(position={"x": x, "y": 52})


def test_a_query_is_tried_with_a_picture_an_array_and_needs_that_nobody_meets(
    page: "playwright.Page", system: Whole, tmp_path: Path
) -> None:
    pixels = np.round(255 * system.x[0]).astype(np.uint8).reshape(28, 28)
    file = io.BytesIO()
    Image.fromarray(255 - pixels).save(file, "PNG")  # dark on bright, as people write
    np.save(tmp_path / "seen.npy", system.x[:3])
    with connect_blocking(system.nats) as client:
        best = int(client.query(APP, pixels.reshape(1, 784).astype(np.float32) / 255).output[0].argmax())

    page.goto(f"{system.dashboard}/try_query?app={APP}")
    page.get_by_role("button", name="Ask").click()  # of random values
    page.get_by_text("Answered by").wait_for()
    page.get_by_text("File or picture", exact=True).click()
    page.locator("input[type=file]").set_input_files(
        {"name": "digit.png", "mimeType": "image/png", "buffer": file.getvalue()}
    )
    page.get_by_text("28 x 28 pixels, grey").wait_for()
    page.get_by_text("Swap bright and dark").click()
    page.wait_for_function("location.search.includes('invert')")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("scores: class")).to_contain_text(f"class {best}", timeout=PATIENCE)
    page.get_by_text("The decision, a moment before").click()
    page.get_by_text("would answer").wait_for()
    shoot_all(page, "try-a-query")

    page.locator("input[type=file]").set_input_files(str(tmp_path / "seen.npy"))
    page.get_by_text("28 x 28 pixels, grey").wait_for(state="detached")
    page.get_by_role("button", name="Ask").click()
    page.get_by_label("Item of 3").wait_for()
    page.get_by_label("Accuracy at least").fill("1")
    page.get_by_label("Accuracy at least").press("Enter")
    page.wait_for_function("location.search.includes('accuracy=1')")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("Refused, unsatisfiable:").wait_for()
    page.get_by_text("Closest:").first.wait_for()
    shoot(page, "try-a-query-refused", DESKTOP)

    page.get_by_text(f"Recent queries of {APP}").click()
    page.get_by_role("heading", level=1, name="Recent queries").wait_for()
    page.goto(f"{system.dashboard}/queries?app={APP}")
    # The outcome is written some seconds after the answer; until then there may be no table.
    click_cell(page.get_by_test_id("stDataFrame").last, 60)
    page.get_by_role("heading", name="One query").wait_for()
    page.wait_for_function("location.search.includes('query=')")
    shoot_all(page, "recent-queries")
    page.get_by_role("button", name="Close").click()
    expect(page.get_by_role("heading", name="One query")).to_have_count(0, timeout=PATIENCE)


def test_names_lead_to_their_pages_and_a_search_leaves_the_rows_that_have_it(
    page: "playwright.Page", system: Whole
) -> None:
    with connect_blocking(system.nats) as client:
        variant = client.query(APP, system.x[:1]).variant
    page.goto(f"{system.dashboard}/applications?app={APP}&search={variant}")
    page.get_by_text(f"Try a query of {APP}").wait_for()
    click_cell(page.get_by_test_id("stDataFrame").first, 60)
    page.get_by_role("heading", level=1, name="Variants").wait_for()
    search = page.get_by_role("textbox", name="Search")
    expect(search).to_have_value(variant, timeout=PATIENCE)
    search.fill("no such variant")
    search.press("Enter")
    page.get_by_text("No instance meets these filters").wait_for()


def _registrations(system: Whole) -> list[str]:
    return [row[0] for row in system.rows("SELECT registration FROM infaas.registrations WHERE app = 'cancelled'")]


def test_a_registration_is_cancelled(page: "playwright.Page", system: Whole) -> None:
    """The last of several that wait for the same worker."""
    validation = system.directory.parent / "validation.npz"
    started: list[subprocess.Popen[str]] = []
    try:
        page.goto(f"{system.dashboard}/registrations?search=mlp-l")
        for model in ("cnn-l", "cnn-m", "mlp-l"):
            if model == "mlp-l":
                assert eventually(lambda: len(_registrations(system)) == 2)
            command = [sys.executable, "-P", "-m", "infaas.cli", "register", str(digits.models()[model])]
            command += ["--app", "cancelled", "--model", model, "--validation", str(validation)]
            command += ["--data-dir", str(system.directory)]
            nothing = {"stdout": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
            started.append(subprocess.Popen(command, env=environ(), stderr=subprocess.PIPE, text=True, **nothing))
        page.get_by_text("mlp-l for cancelled").first.wait_for()
        shoot_all(page, "registrations")
        page.get_by_role("button", name="Cancel").first.click()
        page.get_by_role("button", name="Cancel mlp-l").click()
        page.get_by_text(re.compile("Registration .* is being cancelled")).wait_for()
        _, told = started[-1].communicate(timeout=PATIENCE / 1000)
        assert started[-1].returncode != 0
        assert "cancelled" in told
    finally:
        with connect_blocking(system.nats) as client:
            for registration in _registrations(system):
                with suppress(InfaasError):  # it has ended
                    client.cancel_registration(registration)
        for process in started:
            process.terminate()
            process.wait(60)
            if process.stderr is not None:
                process.stderr.close()


def test_logs_are_shown_by_service_and_text(page: "playwright.Page", system: Whole) -> None:
    page.goto(f"{system.dashboard}/logs?service=dispatcher-0&search=runs")
    page.get_by_test_id("stDataFrame").wait_for()
    shoot_all(page, "logs")
    page.get_by_text("As text").click()
    expect(page.get_by_test_id("stCode")).to_contain_text("dispatcher runs", timeout=PATIENCE)
    expect(page.get_by_test_id("stCode")).not_to_contain_text("registrar")
    search = page.get_by_role("textbox", name="Search")
    search.fill("no such text")
    search.press("Enter")
    page.get_by_text("No line meets these filters").wait_for()
