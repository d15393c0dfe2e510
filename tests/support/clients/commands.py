"""The command line in the test's own process."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from infaas.cli import main


def ran(capsys: pytest.CaptureFixture[str], words: Iterable[str], code: int = 0) -> Any:
    """What a command prints that ends with this code. What it does to logging ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        assert main(list(words)) == code
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], words: Iterable[str], code: int = 2) -> str:
    """The one line that a command says which ends with this code; it prints nothing else."""
    said = ran(capsys, words, code)
    assert (said.out, said.err[:8], said.err.count("\n")) == ("", "infaas: ", 1), said
    return str(said.err)
