"""The pages for people: what they link is there, nothing is loaded from elsewhere, and what they offer to paste runs as it stands."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bus.messages.catalog import TensorSpec
from services.gateway.http.pages import snippets
from tests.support.gateways.echo_gateway import DATATYPES, Echoing, echoing, stage

__all__ = ["stage"]  # a fixture

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"
SLOW = 120.0  # s that a program may take on a busy machine
SUFFIX = {"python": "py", "node": "mjs", "go": "go", "curl": "sh"}
RUN = {"python": [sys.executable], "node": ["node"], "go": ["go", "run"], "curl": ["bash", "-e"]}


def get(stage: Echoing, path: str, accept: str = "*/*", token: str = "") -> tuple[int, str, Any]:
    headers = {"Accept": accept, **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{stage.url}{path}", headers=headers)) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_start_links_what_there_is(stage: Echoing) -> None:
    status, text, _ = get(stage, "/")
    assert status == 200
    found = json.loads(text)
    assert found["ready"] is True
    assert set(found["apps"]) == {*(datatype.lower() for datatype in DATATYPES), "several", "fixed"}
    assert "dashboard" not in found["links"]
    _, page, headers = get(stage, "/", HTML)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    for url in (*found["links"].values(), *found["apps"].values()):
        assert get(stage, url)[0] == 200, url
        assert f'href="{url}"' in page
    for url in re.findall(r'href="(/[^"]*)"', page):
        assert get(stage, url, HTML)[0] == 200, url


@pytest.mark.parametrize("path", ["/", "/docs", "/apps/several"])
def test_pages_load_nothing_from_elsewhere_and_run_only_their_own_script(stage: Echoing, path: str) -> None:
    _, page, headers = get(stage, path, HTML)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert not re.findall(r"<[^>]+ (?:on\w+|style)=", page)  # the policy forbids them
    assert "{{" not in page


def test_apps_are_shown_as_in_their_json_or_are_not_there(stage: Echoing) -> None:
    for path in ("/apps/nobody", "/apps/<script>", "/apps/" + "a" * 300):
        status, text, headers = get(stage, path.replace("<", "%3C").replace(">", "%3E"), HTML)
        assert (status, headers["Content-Type"]) == (404, "application/json")
        assert "there is no app" in json.loads(text)["error"]
    found = json.loads(get(stage, "/apps/several")[1])
    assert [one["shape"] for one in found["inputs"]] == [[-1, 2], [-1, -1], [-1, 1]]
    page = get(stage, "/apps/several", HTML)[1]
    shown = [html.unescape(text) for text in re.findall(r"<pre class='snippet'>(.*?)</pre>", page, re.DOTALL)]
    assert shown == list(found["snippets"].values())


@pytest.mark.parametrize("language", RUN)
def test_what_is_offered_to_paste_runs(stage: Echoing, language: str, tmp_path: Path) -> None:
    if shutil.which(RUN[language][0]) is None:
        pytest.skip(f"no {RUN[language][0]} on the path")
    for app in ("several", "fp32", "bool", "bytes"):
        text = json.loads(get(stage, f"/apps/{app}")[1])["snippets"][language]
        file = tmp_path / f"query.{SUFFIX[language]}"
        file.write_text(text)
        stage.heard = {}
        done = subprocess.run(
            [*RUN[language], str(file)], check=False, capture_output=True, text=True, timeout=SLOW, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert f"{app}-v1" in done.stdout
        assert stage.heard["latency_ms"] == 10_000


@pytest.mark.parametrize("language", RUN)
def test_names_need_no_care_and_inputs_may_be_large(stage: Echoing, language: str, tmp_path: Path) -> None:
    if shutil.which(RUN[language][0]) is None:
        pytest.skip(f"no {RUN[language][0]} on the path")
    name = """<b>it's "x" \\ $HOME `id` é"""
    inputs = [
        TensorSpec(name=name, datatype="FP32", shape=[224, 224]),
        TensorSpec(name="y", datatype="BOOL", shape=[2]),
    ]
    text = snippets(f"http://{stage.url}/v2/models/several/infer", inputs, token=True)[language]
    file = tmp_path / f"query.{SUFFIX[language]}"
    file.write_text(text)
    environ = {**os.environ, "TOKEN": "none"}
    done = subprocess.run(
        [*RUN[language], str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=SLOW,
        cwd=tmp_path,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert {found: one["shape"] for found, one in stage.heard["inputs"].items()} == {name: [1, 224, 224], "y": [1, 2]}


def test_metrics_are_prometheus_and_clippers_for_who_accepts_json(stage: Echoing) -> None:
    get(stage, "/v2/models/nobody/infer")
    status, text, headers = get(stage, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"infaas_gateway_requests", "infaas_actor_messages"} & names, names
    for path, accept in (("/metrics", "application/json"), ("/clipper/metrics", "*/*")):
        assert set(json.loads(get(stage, path, accept)[1])) == {"counters", "ratio_counters", "histograms"}


def test_the_list_of_models_is_the_repositorys_index(stage: Echoing) -> None:
    names = json.loads(get(stage, "/v2/models")[1])
    assert {"name": "fp32", "version": "", "state": "READY", "reason": ""} in names
    assert {"name": "fp32.m-fp32", "version": "1", "state": "READY", "reason": ""} in names


def test_with_tokens_the_start_names_no_app_and_snippets_show_where_the_token_goes() -> None:
    with echoing(tokens=("secret",)) as stage:
        assert json.loads(get(stage, "/")[1])["apps"] == {}
        assert "fp32" not in get(stage, "/", HTML)[1]
        assert get(stage, "/docs", HTML)[0] == 200
        for path in ("/apps/fp32", "/metrics", "/clipper/metrics", "/v2/models", "/openapi.json"):
            assert get(stage, path)[0] == 401, path
            assert get(stage, path, token="secret")[0] == 200, path
        snippet = json.loads(get(stage, "/apps/fp32", token="secret")[1])["snippets"]["curl"]
        done = subprocess.run(
            ["bash", "-c", f"TOKEN=secret\n{snippet}"], check=False, capture_output=True, text=True, timeout=SLOW
        )
        assert "fp32-v1" in done.stdout or shutil.which("curl") is None
