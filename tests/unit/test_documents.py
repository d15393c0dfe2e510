"""Documents do not point to what is not there, pictures can be read, and code blocks say what they are."""

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bus.messages.verbs import ADMIN_VERBS, body_of
from infaas.cli import COMMANDS
from infaas.cli.plan import read_plan_file
from services.shell.settings import load
from services.simulation.scenario.pipelines import check_pipeline, read_pipeline
from services.simulation.scenario.read import read_scenario
from tests.support.documents.code_blocks import LANGUAGES, Block, blocks, prose

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benches").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)")


def found(pattern: re.Pattern[str]) -> list[tuple[Path, str]]:
    """What the pattern finds, with the document that says it."""
    return [(document, said) for document in DOCUMENTS for said in pattern.findall(document.read_text())]


def test_links_lead_somewhere() -> None:
    assert [(document, link) for document, link in found(LINK) if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed_and_fit_both_themes(picture: Path) -> None:
    text = picture.read_text()
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
INDENTED = re.compile(r"\n\n {4,}(?![-*\d])\S[^\n]*", re.MULTILINE)


MADE = {"ops/secrets", "ops/deploy.env"}  # by ops/deploy.sh, and by the operator
NAMED = re.compile(r"`((?:bus|services|infaas|dashboard|ops|tests|benches|docs|tools|examples)/[\w./-]*[\w/])`")


def test_files_that_are_named_exist() -> None:
    named = [(document, path) for document, path in found(NAMED) if not path.startswith(tuple(MADE))]
    assert [one for one in named if not (ROOT / one[1]).exists()] == []


def test_every_code_block_says_what_it_is() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [(document, said) for document in DOCUMENTS for said in INDENTED.findall(prose(document))] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("toml", "json")], ids=str)
def test_what_is_shown_can_be_read(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        json.loads(block.text)
        return
    assert tomllib.loads(block.text)
    path = tmp_path / "shown.toml"
    path.write_text(block.text)
    match block.options:
        case ():
            load(path, {})
        case ("plan",):
            read_plan_file(path)
        case ("scenario",):
            read_scenario(path)
        case ("pipeline",):
            check_pipeline(read_pipeline(path))
        case other:
            assert other == ("part",)


def test_the_contract_has_each_verb_of_operators_with_its_fields() -> None:
    lines = (ROOT / "docs" / "contract.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    for verb, kind in ADMIN_VERBS.items():
        fields = next(row for row in rows if f"`{verb}`" in row[1])[2:]
        unsaid = [name for name in body_of(kind) if f"`{name}`" not in "|".join(fields)]
        assert unsaid == (["plan"] if verb == "set-pipeline" else []), verb


def test_commands_in_the_readme_exist() -> None:
    named = set(re.findall(r"^infaas ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
