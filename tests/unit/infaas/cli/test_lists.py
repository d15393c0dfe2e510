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


def test_a_pipeline_has_vertices_instead_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    vertices = [{"name": "lang", "app": "lang"}, {"name": "say", "app": "nmt"}]
    app = {"app": "social", "models": [], "pipeline": {"vertex": vertices}}
    plain = {"app": "nmt", "models": ["m"], "pipeline": None, "stage_of": ["social"]}
    assert [lists._vertices(one) for one in (app, plain)] == ["lang, say -> nmt", None]
    lists.render_overview({"apps": [app, plain], "variants": [], "workers": [], "registrations": []}, wide=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 0 workers ready, 2 apps (1 of them pipelines), 0 variants, 0 instances"
    assert lines[3].split()[:4] == ["social", "2", "vertices", "-"]
    assert lines[4].split()[:3] == ["nmt", "1", "0"]
