"""docs/ as a site: what it generates is there, nothing is loaded from elsewhere, and the pages on words and errors are complete."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import infaas.errors
from bus.messages.public import Code
from infaas.cli import COMMANDS
from services.core.settings import Settings, described
from tools import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site needs the extra `docs`")
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return directory


def test_every_setting_is_in_the_reference(site: Path) -> None:
    page = (site / "settings.html").read_text().partition('id="all-settings"')[2]
    parts = re.split(r"<h3[^>]*>(?:<code>)?([^<]*)", page)
    shown = {
        section: set(re.findall(r"<td><code>([^<]*)</code></td>", rows))
        for section, rows in zip(parts[1::2], parts[2::2], strict=True)
    }
    missing = []
    for one in described(Settings):
        section, _, name = one.key.rpartition(".")
        if name not in shown[section or "Without a section"]:
            missing.append(one.key)
    assert missing == []


def test_every_metric_and_relation_is_in_the_reference(site: Path) -> None:
    metrics = (site / "metrics.html").read_text().partition('id="all-metrics"')[2]
    assert [one.name for one in reference.metrics() if f"<code>{one.name}</code>" not in metrics] == []
    assert len(reference.metrics()) > 100
    assert [one.name for one in reference.metrics() if (one.kind == "counter") != one.name.endswith("_total")] == []
    relations = (site / "sql.html").read_text().partition('id="all-relations"')[2]
    assert [
        one
        for one in reference.comments()
        if f"<code>{one.column or one.relation}</code>" not in relations and one.relation != "*"
    ] == []


def test_every_alert_and_page_of_the_dashboard_is_told() -> None:
    found = reference.alerts()
    assert [name for name, *_ in found] == re.findall(r"alert: (\w+)", reference.RULES.read_text())
    assert [name for name, when, says, _ in found if not when or not says] == []
    assert "{{" not in reference.metrics_page()
    pages = [path.stem for path in reference.VIEWS.glob("*.py") if path.stem != "__init__"]
    assert len(reference.dashboard_page().splitlines()) == 5 + len(pages)


def test_every_command_and_method_is_in_the_reference(site: Path) -> None:
    commands = (site / "commands.html").read_text()
    assert [name for name in COMMANDS if f'id="infaas-{name}"' not in commands] == []
    methods = [name for name, _ in inspect.getmembers(infaas.Client, inspect.isfunction) if not name.startswith("_")]
    client = (site / "client.html").read_text()
    assert len(methods) > 15
    assert [name for name in methods if f'id="{name}"' not in client] == []


def test_what_the_pages_link_to_beside_docs_is_there(site: Path) -> None:
    """Links in strict mode are checked by mkdocs; here those that a hook has changed."""
    for page, target in [
        ("index.html", "start.html"),
        ("index.html", "benches/index.html"),
        ("start.html", "registering.html"),
        ("scaling.html", "architecture.html"),
    ]:
        assert target in (site / page).read_text(), (page, target)
        assert (site / target).is_file()


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?P<url>(?:https?:)?//[^"' >]+)""")
    canonical = re.compile(r"""<link[^>]+rel=["']?canonical[^>]*>""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert {m["url"] for page in pages for m in loaded.finditer(canonical.sub("", page.read_text()))} == set()


def test_every_code_of_a_refusal_has_a_remedy() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    exceptions = {
        name
        for name, one in inspect.getmembers(infaas.errors, inspect.isclass)
        if issubclass(one, infaas.errors.InfaasError) and name != "InfaasError"
    }
    assert set(rows) == set(get_args(Code)) | exceptions


def test_messages_that_the_page_quotes_are_still_said() -> None:
    text = (ROOT / "docs" / "errors.md").read_text().partition("## At the start")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    sources = "\n".join(path.read_text() for name in ("services", "infaas") for path in (ROOT / name).rglob("*.py"))
    assert quoted
    for message in quoted:
        for part in re.split(r"\.\.\.|FILE: SECTION\.KEY|DIRECTORY", message):
            assert part.strip(" :") in sources, message
