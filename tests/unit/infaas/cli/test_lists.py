"""Tables of apps: what their columns show."""

import pytest

from infaas.cli import lists
from infaas.cli.output import print_table


@pytest.mark.parametrize(
    ("headroom", "shown"), [(None, "-"), (1.75, "1.75"), (100.0, "100"), (100.5, "> 100"), (4321.0, "> 100")]
)
def test_a_headroom_of_more_than_a_hundred_is_shown_as_such(
    headroom: float | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table([{"headroom": headroom}], [one for one in lists._OBJECTIVE if one.title == "headroom"], "none")
    title, value = capsys.readouterr().out.splitlines()
    assert (title.strip(), value.strip()) == ("headroom", shown)
