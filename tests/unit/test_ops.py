"""What operators get for Prometheus and Grafana: Prometheus' own tool reads it, tries the rules, and parses every panel's query."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "ops"
PROMETHEUS = OPS / "prometheus"


def promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing: install Debian's package prometheus")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_configuration_is_valid() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_the_rules_do_what_they_say() -> None:
    promtool("check", "rules", PROMETHEUS / "infaas.rules.yml")
    promtool("test", "rules", PROMETHEUS / "infaas.rules.test.yml")


def test_every_panels_query_is_promql(tmp_path: Path) -> None:
    board = json.loads((OPS / "grafana" / "infaas.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 30
    made = {"$__rate_interval": "5m", "$app": ".*"}
    plain = [re.sub(r"\$\w+", lambda found: made[found[0]], query) for query in queries]
    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(plain)]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)


def test_panels_have_titles_units_and_room() -> None:
    board = json.loads((OPS / "grafana" / "infaas.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["title"] for panel in panels)
    assert all("unit" in panel["fieldConfig"]["defaults"] for panel in panels)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
