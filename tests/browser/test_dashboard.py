"""The dashboard in a real browser, on a real system under load: every page on three screens, by day and by night.

Pictures of what was seen are left in artifacts/browser.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import pytest

from infaas.blocking import connect_blocking
from tests.support.clients.browser import DESKTOP, PHONE, TABLET, browser, shoot
from tests.support.clients.retrying import insist
from tests.support.servers.nats import free_port
from tests.support.servers.processes import program, read_line, script
from tests.support.servers.system import APP, MODELS, Whole, with_digits

__all__ = ["browser"]  # a fixture
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
pytestmark = pytest.mark.slow

PATIENCE = 90_000  # ms

# What is wrong with the charts: words that are cut at their edges (titles at the left stand a little outside), and axes with equal ticks.
FAULTS = """() => [...document.querySelectorAll('[data-testid=stVegaLiteChart] svg.marks')].flatMap(chart => {
  const frame = chart.getBoundingClientRect();
  const seen = node => [...node.querySelectorAll('text')].filter(text => text.textContent && text.getAttribute('opacity') !== '0');
  const inside = box => !box.width || (box.left >= frame.left - 6 && box.right <= frame.right + 1);
  const cut = seen(chart).filter(text => !inside(text.getBoundingClientRect())).map(text => `cut: ${text.textContent}`);
  const equal = [...chart.querySelectorAll('.role-axis-label')].map(axis => seen(axis).map(text => text.textContent))
    .filter(ticks => new Set(ticks).size < ticks.length).map(ticks => `equal ticks: ${ticks}`);
  return [...cut, ...equal];
})"""
# What a page shows of this system once it has drawn everything.
PAGES = {
    "Overview": ["What runs", "Latest decisions", "queries/s"],
    "Variants": ["States over time", "Active", "Why"],
    "Workers": ["Starts and stops", "Ready", "Prices per hour"],
    "Cost": ["Rate", "So far", "Idle"],
    "SLO": ["Objectives", "target", "Why queries were missed", "unsatisfiable", "In time", "Who answered"],
    "Applications": ["Best accuracy", "accuracy", "Registrations"],
    "Members": ["answered by several models together", "set-selection"],
    "Pipelines": ["No pipeline is registered yet", "infaas pipeline add"],
    "Shadow": ["Policies", "Cost", "What they would have done"],
    "Explain": ["would answer", "Only variant"],
    "Try a query": ["Sends one query", "Random values"],
    "Recent queries": ["how each ended", "any outcome"],
    "Registrations": ["Models on their way", "registration id"],
    "Logs": ["The last lines of each process", "level"],
    "Jobs": ["Items done", "Unfinished"],
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """One of their own: what pages say of a system without pipelines and members is true of it."""
    with with_digits(tmp_path_factory.mktemp("looked-at") / "data") as whole:
        yield whole


@pytest.fixture(scope="module")
def loaded(system: Whole) -> Iterator[Whole]:
    """The system with queries coming in all the time, one kind of which cannot be met, and a job."""
    load = ("--seconds", "600", "--warmup", "0", "--rate", "20", "--latency-ms", "200")
    with program("infaas.cli", "bench", "--app", APP, *load, *system.where):
        jobs = system.directory / "jobs"
        jobs.mkdir(exist_ok=True)
        np.save(jobs / "seen.npy", system.x[:20])
        seen = ("--app", APP, "--input", str(jobs / "seen.npy"))
        system.done("submit", *seen, "--output", str(jobs / "seen.jsonl"))
        system.command("query", *seen, "--accuracy", "1")
        system.done("shadow", "static", "--seconds", "10")
        yield system


@contextmanager
def another(
    browser: "playwright.Browser", system: Whole, **settings: str
) -> Iterator[tuple[int, "playwright.Page", str]]:
    """A dashboard of a test's own beside this system: its process, a window, and where it is."""
    variables = {f"INFAAS_DASHBOARD__{name}": value for name, value in (settings | {"PORT": str(free_port())}).items()}
    with program("infaas.cli", "run", "dashboard", *system.where, patience=0.0, **variables) as process:
        assert read_line(process)
        visitor = browser.new_page()
        visitor.set_default_timeout(PATIENCE)
        yield process.pid, visitor, f"http://127.0.0.1:{variables['INFAAS_DASHBOARD__PORT']}/"
        visitor.close()


@pytest.fixture(scope="module")
def page(browser: "playwright.Browser", loaded: Whole) -> Iterator["playwright.Page"]:
    """One visitor's window, far away, which may reach nothing but the dashboard."""
    context = browser.new_context(viewport=DESKTOP, timezone_id="America/New_York")
    found = context.new_page()
    found.set_default_timeout(PATIENCE)
    foreign: list[str] = []
    found.on(
        "request", lambda request: foreign.append(request.url) if not _ours(request.url, loaded.dashboard) else None
    )
    failed: list[str] = []
    found.on("response", lambda reply: failed.append(reply.url) if reply.status >= 400 else None)
    found.goto(loaded.dashboard)
    yield found
    context.close()
    assert not foreign
    assert not failed


def _ours(url: str, dashboard: str) -> bool:
    return url.startswith((dashboard, dashboard.replace("http", "ws"), "data:", "blob:"))


def assert_fits(page: "playwright.Page", size: dict[str, int]) -> None:
    """Nothing failed; no page is wider than the screen and no chart cut, once they have followed it."""
    main = page.get_by_test_id("stMain")
    assert not main.get_by_test_id("stException").count()
    assert not main.get_by_test_id("stAlertContentError").count()
    page.wait_for_function(f"document.querySelector('[data-testid=stMain]').scrollWidth <= {size['width']}")
    try:
        page.wait_for_function(f"({FAULTS})().length === 0")
    except playwright.TimeoutError:
        pytest.fail(f"{page.url}: {page.evaluate(FAULTS)}")


def open_page(page: "playwright.Page", name: str) -> None:
    page.set_viewport_size(DESKTOP)
    page.emulate_media(color_scheme="light")
    path = {"Recent queries": "queries", "Try a query": "try_query"}.get(name, name.lower())
    page.goto(urljoin(page.url, f"/{path}"))
    page.get_by_role("heading", level=1, name=name, exact=True).wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_every_page_shows_the_system_on_every_screen(page: "playwright.Page", name: str, theme: str) -> None:
    open_page(page, name)
    main = page.get_by_test_id("stMain")
    for told in PAGES[name]:
        main.get_by_text(told).first.wait_for(state="attached")
    if name in ("Overview", "Variants", "Workers", "Cost", "SLO", "Applications", "Shadow"):
        main.get_by_test_id("stVegaLiteChart").locator("svg.marks, canvas.marks").first.wait_for()
    for size in (DESKTOP, TABLET, PHONE) if theme == "light" else (DESKTOP, TABLET):
        shoot(page, name, size, theme)
        assert_fits(page, size)


def test_members_show_what_feedback_taught(page: "playwright.Page", loaded: Whole) -> None:
    """An app whose two models answer together, with feedback by which one of them is always right."""
    loaded.done("admin", "add-app", "team")
    for model in MODELS:
        loaded.done("admin", "link-model", "team", "--model", model)
    loaded.done("admin", "set-selection", "team", "--policy", "exp4")
    with connect_blocking(loaded.nats) as client:
        for picture in loaded.x[:12]:
            answer = insist(partial(client.query, "team", picture[None]))
            client.feedback("team", int(answer.output[0].argmax()), query=answer.query)
    page.set_viewport_size(DESKTOP)
    page.goto(f"{loaded.dashboard}/members?app=team&range=5m")
    main = page.get_by_test_id("stMain")
    for told in ("Weights", "Error", "Confidence", "Missing", "Believed most"):
        main.get_by_text(told).first.wait_for(state="attached")
    main.get_by_test_id("stVegaLiteChart").locator("svg.marks, canvas.marks").nth(2).wait_for()
    for size in (DESKTOP, TABLET, PHONE):
        shoot(page, "members-of-team", size)
        assert_fits(page, size)
    page.goto(f"{loaded.dashboard}/explain?app=team")
    page.get_by_text("2 models answer together").wait_for()
    shoot(page, "explain-team", DESKTOP)


def test_pipelines_show_their_graph_and_how_stages_are_visited(page: "playwright.Page", loaded: Whole) -> None:
    file = loaded.directory.parent / "twice.toml"
    file.write_text(
        f"""[pipeline]
        name = "twice"
        latency_ms = 5000
        [[vertex]]
        name = "first"
        app = "{APP}"
        inputs = {{ x = "$.x" }}
        [[vertex]]
        name = "again"
        app = "{APP}"
        inputs = {{ x = "$.x" }}
        [[edge]]
        from = "first"
        to = "again"
        when = {{ output = "scores", reduce = "max", op = "<", value = 2.0 }}
        probability = 0.5
        [output]
        scores = "again.scores | first.scores"
        """
    )
    loaded.done("pipeline", "add", str(file))
    with connect_blocking(loaded.nats) as client:
        for picture in loaded.x[:12]:
            insist(partial(client.query, "twice", picture[None]))
    page.set_viewport_size(DESKTOP)
    page.goto(f"{loaded.dashboard}/pipelines?app=twice&range=5m")
    main = page.get_by_test_id("stMain")
    graph = main.get_by_test_id("stGraphVizChart").locator("svg")
    for told in ("first", "again", "scores", "50", "answer"):
        graph.locator("text").filter(has_text=told).first.wait_for()
    for told in ("Stages", "In time", "Latency", "Visits", "No plan was deployed"):
        main.get_by_text(told).first.wait_for(state="attached")
    main.get_by_test_id("stVegaLiteChart").locator("svg.marks, canvas.marks").nth(2).wait_for()
    for size in (DESKTOP, TABLET, PHONE):
        shoot(page, "pipelines-of-twice", size)
        assert_fits(page, size)
        drawn = graph.bounding_box()
        assert drawn["x"] + drawn["width"] <= size["width"]
    page.goto(f"{loaded.dashboard}/explain?app=twice")
    page.get_by_text("each asked for its share").wait_for()
    shoot(page, "explain-twice", DESKTOP)
    loaded.done("pipeline", "remove", "twice")


def test_live_parts_follow_the_system_without_being_drawn_anew(page: "playwright.Page") -> None:
    open_page(page, "Overview")
    page.get_by_test_id("stVegaLiteChart").locator("svg.marks").nth(3).wait_for()
    charts = "[...document.querySelectorAll('[data-testid=stVegaLiteChart] svg.marks')]"
    load = page.get_by_test_id("stMetric").filter(has_text="Load").get_by_test_id("stMetricDelta")
    kept: list[str] = []
    for _ in range(10):  # a chart is drawn anew when something new comes into it: its first rows, another variant's
        page.evaluate(f"{charts}.forEach((chart, i) => chart.dataset.seen = i)")
        before = load.inner_text()
        playwright.expect(load).not_to_have_text(before, timeout=PATIENCE)
        kept = page.evaluate(f"{charts}.map(chart => chart.dataset.seen)")
        if kept == ["0", "1", "2", "3"]:
            break
    assert kept == ["0", "1", "2", "3"]


def test_an_address_leads_to_the_same_view_again(page: "playwright.Page", loaded: Whole) -> None:
    page.goto(f"{loaded.dashboard}/slo?range=1h&app={APP}")
    page.get_by_text("Who answered").wait_for()
    playwright.expect(page.get_by_role("radio", name="1h")).to_be_checked(timeout=PATIENCE)
    open_page(page, "Explain")
    page.get_by_label("Within, ms").fill("0.001")
    page.get_by_label("Within, ms").press("Enter")
    page.get_by_text("It would be refused").wait_for()
    page.get_by_text("Closest:").wait_for()
    page.wait_for_function("location.search.includes('latency_ms=0.001')")


def test_the_pointer_shows_the_whole_text_of_what_is_cut(page: "playwright.Page", loaded: Whole) -> None:
    """Where the screen has less room than the text needs; the address without a page is Overview's."""
    page.set_viewport_size(PHONE)
    page.goto(loaded.dashboard)
    page.wait_for_url(f"{loaded.dashboard}/overview**")
    page.goto(f"{loaded.dashboard}/registrations")
    table = page.get_by_test_id("stDataFrame").first
    table.locator("canvas").first.wait_for()
    page.wait_for_function("window.showsWholeTexts")
    for x in range(20, 380, 40):  # one of the cells is cut at the edge
        table.hover(position={"x": x, "y": 52}, force=True)
        if table.get_attribute("title"):
            break
    assert table.get_attribute("title")


TICKS = """
import pandas as pd
from dashboard import charts
for top in (0.12, 0.6, 3.0, 1200.0):
    rows = pd.DataFrame({"batch": [1, 2, 4], "time": pd.date_range("2026-01-01", periods=3, freq="min", tz="UTC"), "what": "p50", "ms": [0.0, top / 2, top]})
    charts.draw(rows, charts.profile("ms", "what", unit="ms"), f"profile-{top}")
    charts.draw(rows, charts.lines("ms", "what", unit="ms"), f"lines-{top}")
"""


def test_ticks_differ_whatever_the_top_of_an_axis(browser: "playwright.Browser", tmp_path: Path) -> None:
    ticks, port = tmp_path / "ticks.py", free_port()
    ticks.write_text(TICKS)
    options = ["--server.port", str(port), "--server.address", "127.0.0.1", "--server.headless", "true"]
    with program("streamlit", "run", str(ticks), *options, patience=0.0) as process:
        assert process.stdout is not None
        assert any("URL" in line for line in process.stdout)
        visitor = browser.new_page()
        visitor.set_default_timeout(PATIENCE)
        visitor.goto(f"http://127.0.0.1:{port}/")
        visitor.get_by_test_id("stVegaLiteChart").locator("svg.marks").nth(7).wait_for()
        axes = "document.querySelectorAll('[data-testid=stVegaLiteChart] .role-axis-label').length"
        visitor.wait_for_function(f"{axes} >= 16")
        assert visitor.evaluate(FAULTS) == []
        visitor.close()


def test_people_log_in_where_that_is_configured(browser: "playwright.Browser", system: Whole, tmp_path: Path) -> None:
    pytest.importorskip("authlib", reason="authlib is not installed: pip install '.[login]'")
    from tests.support.servers.oidc_provider import CLIENT, provider

    with provider("eve@example.net") as issuer:
        login = tmp_path / "login.toml"
        login.write_text(
            f"""[auth]
            cookie_secret = "{"s" * 40}"
            client_id = "{CLIENT}"
            client_secret = "secret"
            server_metadata_url = "{issuer.url}/.well-known/openid-configuration"
            """
        )
        with another(browser, system, LOGIN=str(login), ALLOW="@example.org") as (_, visitor, url):
            visitor.goto(url)
            visitor.get_by_role("button", name="Log in").click()
            visitor.get_by_text("eve@example.net may not see this dashboard").wait_for()
            assert not visitor.get_by_test_id("stMetric").count()
            issuer.email = "ann@example.org"
            visitor.get_by_role("button", name="Log out").click()
            visitor.get_by_role("button", name="Log in").click()
            visitor.get_by_test_id("stMetric").first.wait_for()
            visitor.get_by_text("Logged in as ann@example.org").wait_for()


def test_opening_it_costs_less_than_120_mb(browser: "playwright.Browser", loaded: Whole) -> None:
    """Of memory that is this process's own (`Anonymous`), by what the kernel says of it before and after the first page."""
    with another(browser, loaded) as (pid, visitor, url):
        before = own_memory_mb(pid)
        visitor.goto(url)
        visitor.get_by_text("Latest decisions").wait_for()
        visitor.get_by_test_id("stVegaLiteChart").locator("svg.marks").nth(3).wait_for()
        assert own_memory_mb(pid) - before < 120


def own_memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous:"))


def test_the_dashboard_holds_little_memory_until_somebody_looks(tmp_path: Path) -> None:
    """A process that waits for its first visitor, by what the kernel says of it."""
    options = "ServeOptions(address='127.0.0.1', port=0, public_url='', login='', allow=())"
    with script(
        f"import socket; from dashboard.serve import ServeOptions, serve; serve({options}, None, lambda: socket.create_server(('127.0.0.1', 0)))"
    ) as process:
        assert "the dashboard is at" in read_line(process)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert not [name for name in ("pandas", "pyarrow", "numpy") if f"site-packages/{name}" in maps]
