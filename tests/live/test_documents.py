"""Every code block of the README and of the pages in docs/ runs as it stands, typed by a reader in an empty directory."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infaas.demo.__main__ import write
from tests.support.documents.code_blocks import Reader, blocks
from tests.support.servers.processes import ROOT
from tests.support.servers.system import Whole, with_digits

RUN = {"sh", "console", "python"}
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if any(block.language in RUN for block in blocks(page))]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """One of their own: readers register models in the app `digits`."""
    with with_digits(tmp_path_factory.mktemp("read") / "data") as whole:
        yield whole


@pytest.fixture
def reader(system: Whole, tmp_path: Path) -> Iterator[Reader]:
    """A reader with the demo's files, beside a running system with the app `digits`."""
    write(tmp_path)
    for name in ("docs", "examples", "ops"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = Reader(tmp_path, system.directory)
    yield found
    found.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        reader.run(block)


@pytest.mark.timeout(1500)
def test_the_readme_in_a_fresh_clone(tmp_path: Path) -> None:
    """As a new user: the installation, and the model of one's own. `.ci/run` itself begins with the two commands of `make`."""
    clone = tmp_path / "infaas"
    clone.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-c", "--null", "-T", "-", "-f", tmp_path / "clone.tar"], cwd=ROOT, input=listed, check=True)
    subprocess.run(["tar", "-xf", tmp_path / "clone.tar", "-C", clone], check=True)
    new_user = Reader(clone, PYTHONPATH="")
    try:
        for block in blocks(clone / "README.md"):
            block = block._replace(text=block.text.replace("make ", "make -n "))
            new_user.run(block)
    finally:
        new_user.close()
