"""The command line in the test's own process."""

from collections.abc import Iterable
from typing import Any

import pytest

from infaas.cli import main


def ran(capsys: pytest.CaptureFixture[str], words: Iterable[str], code: int = 0) -> Any:
    """What a command prints that ends with this code."""
    assert main(list(words)) == code
    return capsys.readouterr()
