"""Documents do not point to what is not there, and pictures can be read."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from infaas.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benches").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed_and_fit_both_themes(picture: Path) -> None:
    text = picture.read_text()
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text


def test_the_scenario_in_the_docs_is_the_example() -> None:
    shown = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "simulation.md").read_text(), re.DOTALL | re.MULTILINE)
    assert shown == [(ROOT / "docs" / "examples" / "scenario.toml").read_text()]


def test_commands_in_the_readme_exist() -> None:
    named = set(re.findall(r"^\s{4}(?:\$ )?infaas ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)
