"""How rows are shown to people."""

import pytest

from infaas.cli.sql import _render


def test_the_last_column_is_whole_and_long_cells_before_it_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _render({"columns": ["a", "reason"], "rows": [["x" * 80, "y" * 80]]})
    _, _, row, _ = capsys.readouterr().out.splitlines()
    assert row == "x" * 59 + "…  " + "y" * 80
