"""The gateway's pages in a real browser: the documentation is readable offline, and its form sends a query. Pictures are left in artifacts/browser."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.browser import DESKTOP, PHONE, SHOTS, browser
from tests.support.gateways.echo_gateway import Echoing, echoing

__all__ = ["browser"]  # a fixture
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")

pytestmark = pytest.mark.slow

PATIENCE = 60_000  # ms


@pytest.fixture(scope="module")
def stage() -> Iterator[Echoing]:
    with echoing() as found:
        yield found


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_the_documentation_sends_a_query_and_shows_all_operations(
    stage: Echoing, browser: Any, size: Any, scheme: str
) -> None:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    SHOTS.mkdir(parents=True, exist_ok=True)
    try:
        page.goto(f"http://{stage.url}/")
        page.screenshot(path=SHOTS / f"gateway-start-{size['width']}.png", full_page=True)
        page.get_by_role("link", name="several").click()
        page.wait_for_selector("button.copy")
        page.screenshot(path=SHOTS / f"gateway-app-{size['width']}.png", full_page=True)
        page.get_by_role("link", name="Ask it here").click()
        inputs, reply = playwright.expect(page.locator("#inputs")), playwright.expect(page.locator("#reply"))
        inputs.to_have_value(re.compile("BYTES"), timeout=PATIENCE)
        assert page.input_value("#app") == "several"
        page.fill("#accuracy", "0.5")
        page.get_by_role("button", name="Ask").click()
        reply.to_contain_text("several-v1", timeout=PATIENCE)
        assert stage.heard["accuracy"] == 0.5
        assert stage.heard["inputs"]["b"]["shape"] == [1, 8]
        page.select_option("#app", "fp32")
        inputs.to_have_value(re.compile("FP32"), timeout=PATIENCE)
        page.fill("#inputs", "[{")
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector("#reply.bad")
        assert "no list in JSON" in page.text_content("#reply")
        operation = page.locator("details", has_text="POST /v2/models/{model}/infer").first
        operation.locator("summary").click()
        operation.locator("pre", has_text="latency_ms").first.wait_for()
        page.screenshot(path=SHOTS / f"gateway-docs-{size['width']}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert not errors
        assert all(url.startswith((f"http://{stage.url}/", "data:")) for url in asked)
    finally:
        page.close()
