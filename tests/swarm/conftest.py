"""Figures that the tests of a swarm took, in one table at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.shell.host.process import ServerError
from tests.swarm import image, nodes

TIMINGS: list[tuple[str, float]] = []


@pytest.fixture(scope="session")
def timings() -> list[tuple[str, float]]:
    """(what, seconds): what is added is printed at the end of the run."""
    return TIMINGS


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory from which engines share the images that `image` names; skips where none can be built."""
    if reason := nodes.missing() or image.missing():
        pytest.skip(reason)
    target = tmp_path_factory.mktemp("images") / "data"
    try:
        image.build(target)
    except ServerError as error:
        pytest.skip(str(error))  # another run builds
    yield target
    nodes.remove_tree(target)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TIMINGS:
        terminalreporter.section("timings")
        width = max(len(what) for what, _ in TIMINGS)
        for what, seconds in TIMINGS:
            terminalreporter.write_line(f"{what:<{width}}  {seconds:7.1f} s")
