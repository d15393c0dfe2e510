"""What people open in a browser: where everything is (/), the documentation with a form that sends a query (/docs), and each app with
snippets to paste (/apps/<app>). Programs get the same as JSON. And the page of metrics.

All pages come from one file, page.html, and load nothing from elsewhere.
"""

import asyncio
import base64
import hashlib
import json
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable
from html import escape
from math import prod
from pathlib import Path
from typing import Any

from bus.messages.catalog import TensorSpec
from services.core.metric import MetricFamily
from services.core.settings import listed
from services.gateway.edge import GatewayService
from services.gateway.errors import RequestFailed
from services.gateway.oip import models
from services.shell.http.messages import HttpReply, HttpRequest, HttpRoute, JsonReply

TEMPLATE = Path(__file__).parent / "page.html"
LENGTH = 8  # of an example's axes of variable length
INLINE = 16  # elements that an example writes out
PATIENCE_MS = 10_000  # latency that the snippets ask for: a model that is not loaded may have to load first
Endpoint = Callable[[HttpRequest], Awaitable[Any]]


def _policy(template: str) -> str:
    """The Content-Security-Policy of the pages: their own style and script, by digest, and requests to this gateway alone."""

    def digest(tag: str) -> str:
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Pages:
    """The endpoints. clipper: Clipper's counts, which /metrics gives to who accepts JSON."""

    def __init__(self, service: GatewayService, clipper: Endpoint) -> None:
        self._service = service
        self._clipper = clipper
        self._template = TEMPLATE.read_text()
        self._lines = (
            f"content-type: text/html; charset=utf-8\r\ncontent-security-policy: {_policy(self._template)}\r\n"
            "x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\nvary: accept\r\n"
        ).encode()

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("/", self.start),
            HttpRoute("/docs", self.documentation),
            HttpRoute("/apps/{app}", self.app),
            HttpRoute("/metrics", self.metrics),
        ]

    async def start(self, request: HttpRequest) -> Any:
        service = self._service
        links = {
            "docs": "/docs",
            "openapi": "/openapi.json",
            "models": "/v2/models",
            "metrics": "/metrics",
            "live": "/v2/health/live",
            "ready": "/v2/health/ready",
            **({"dashboard": service.dashboard} if service.dashboard else {}),
        }
        # Names of apps are for those who may query; a page that is opened in a browser carries no token.
        known = [] if self._protected else sorted(app.app for app in service.catalog.apps)
        state = await service.readiness()
        if not _wants_html(request):
            found = {"name": models.NAME, "version": service.version, "ready": state.ready, "links": links}
            return JsonReply({**found, "apps": {app: f"/apps/{app}" for app in known}})
        said = "Queries can be answered." if state.ready else "The system is not ready."
        said += f" Missing: {state.missing}." if state.missing else ""
        words = {
            "docs": "Documentation, and a form that sends a query",
            "openapi": "OpenAPI document, for machines",
            "models": "All names that may be queried, as JSON",
            "metrics": "Metrics, for Prometheus",
            "live": "Whether this gateway runs",
            "ready": "Whether queries can be answered",
            "dashboard": "Dashboard",
        }
        if known:
            apps = _table(
                ("App", "Inputs", "Models"), [(_link(f"/apps/{app}", app), *self._about(app)) for app in known]
            )
        elif self._protected:
            apps = "<p>Apps are listed for those with a token: <a href='/docs'>Documentation</a> asks for it.</p>"
        else:
            apps = "<p>There is no app yet. Register a model: <code>infaas register MODEL --app APP --validation DATA.npz</code></p>"
        places = _table(("Where", "What"), [(_link(url, url), escape(words[name])) for name, url in links.items()])
        return self._page(
            "INFaaS gateway",
            f"<h1>INFaaS {escape(service.version)}</h1><p>{escape(said)}</p><h2>Apps</h2>{apps}<h2>Places</h2>{places}",
        )

    async def documentation(self, _request: HttpRequest) -> Any:
        return self._page("INFaaS documentation", _FORM)

    async def app(self, request: HttpRequest) -> Any:
        name = request.params["app"]
        record = self._service.catalog.app(name)
        if record is None:
            near = self._service.catalog.meant_app(name)
            raise RequestFailed(None, f"there is no app {name[:80]!r}: see /v2/models{near}", code="unknown_app")
        signature = record.signature
        inputs, outputs = ([], []) if signature is None else (signature.inputs, signature.outputs)
        where = (
            f"{'https' if request.secure else 'http'}://{request.header(b'host') or 'localhost'}/v2/models/{name}/infer"
        )
        pasted = snippets(where, inputs, token=self._protected) if inputs else {}
        if not _wants_html(request):
            tensors = {"inputs": _shapes(inputs), "outputs": _shapes(outputs)}
            return JsonReply({"app": name, "models": dict(record.links), **tensors, "url": where, "snippets": pasted})
        rows = [
            (kind, escape(spec.name), escape(spec.datatype), escape(_shape(spec)))
            for kind, specs in (("input", inputs), ("output", outputs))
            for spec in specs
        ]
        served = ", ".join(f"{model} (version {version})" for model, version in sorted(record.links.items()))
        goal = "" if record.latency_ms is None else f" Answers are due in {record.latency_ms:g} ms."
        about = (f"Models: {served}." if served else "No model serves this app itself.") + goal
        parts = [
            f"<h1>{escape(name)}</h1><p>{escape(about)} {_link(f'/docs?app={name}', 'Ask it here')}.</p>",
            _table(("", "Name", "Datatype", "Shape"), rows) if rows else "<p>Its inputs are not known yet.</p>",
            "<p>n: items of a query. In <code>parameters</code> say what you need: <code>latency_ms</code>, <code>accuracy</code>"
            " (0 to 1, at least), <code>cost</code> (US$ per 1,000 queries, at most). Leave out what you do not need.</p>" if rows else "",
        ]  # fmt: skip
        for language, text in pasted.items():
            parts.append(f"<h2>{_TITLES[language]}</h2><pre class='snippet'>{escape(text)}</pre>")
        return self._page(f"{name} – INFaaS", "".join(parts))

    async def metrics(self, request: HttpRequest) -> Any:
        accept = request.header(b"accept") or ""
        if "application/json" in accept:
            return await self._clipper(request)
        return await asyncio.to_thread(_exposition, list(self._service.families()), accept)

    @property
    def _protected(self) -> bool:
        return bool(listed(self._service.settings.tokens))

    def _about(self, app: str) -> tuple[str, str]:
        record = self._service.catalog.app(app)
        if record is None:
            return "", ""
        inputs = [] if record.signature is None else record.signature.inputs
        shown = ", ".join(f"{spec.name} {spec.datatype} {_shape(spec)}" for spec in inputs)
        return escape(shown), escape("a pipeline" if record.pipeline is not None else ", ".join(sorted(record.links)))

    def _page(self, title: str, body: str) -> HttpReply:
        before, _, rest = self._template.partition("{{title}}")
        between, _, after = rest.partition("{{body}}")
        return HttpReply([(before + escape(title) + between + body + after).encode()], self._lines)


def _exposition(families: list[MetricFamily], accept: str) -> HttpReply:
    """Called in a thread: importing prometheus_client takes a while."""
    from services.shell.metrics.exposition import page  # noqa: PLC0415

    return page(families, accept=accept)


def _wants_html(request: HttpRequest) -> bool:
    return "text/html" in (request.header(b"accept") or "")


def _link(url: str, text: str) -> str:
    return f'<a href="{escape(url)}">{escape(text)}</a>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML."""
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _shape(spec: TensorSpec) -> str:
    return "[" + ", ".join(["n", *("any" if size < 0 else str(size) for size in spec.shape)]) + "]"


def _shapes(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.shape]} for spec in specs]


_FORM = """<h1>Documentation</h1>
<h2>Send a query</h2>
<form id="ask">
<label>App <select id="app"></select></label>
<label>latency_ms, at most <input id="latency_ms" type="number" min="0" step="any" value="10000"></label>
<label>accuracy, at least <input id="accuracy" type="number" min="0" max="1" step="any"></label>
<label>cost in US$ per 1,000 queries <input id="cost" type="number" min="0" step="any"></label>
<label>Token, where one is needed <input id="token" type="password" autocomplete="off"></label>
<p>Inputs. <code>"0 x 784"</code> stands for 784 zeros. <a id="snippets" href="/">The same in a program</a></p>
<textarea id="inputs" spellcheck="false" aria-label="Inputs"></textarea>
<p><button>Ask</button></p>
<pre id="reply" aria-live="polite"></pre>
</form>
<h2>Everything that can be asked over HTTP</h2>
<div id="operations"></div>
<noscript><p>This page needs JavaScript. <a href="/openapi.json">The OpenAPI document</a> has the same for machines.</p></noscript>"""


# -- Snippets to paste. Each runs as it stands, with values that fit the app's inputs.

_TITLES = {"curl": "curl", "python": "Python", "node": "Node.js (as query.mjs)", "go": "Go (as main.go)"}
_PARAMETERS = {"latency_ms": PATIENCE_MS}


def snippets(url: str, inputs: Iterable[TensorSpec], *, token: bool) -> dict[str, str]:
    """Programs that send one query, by language. token: one is needed; the programs take it from the variable TOKEN."""
    tensors = [_Example(spec) for spec in inputs]
    makers = {"curl": _curl, "python": _python, "node": _node, "go": _go}
    return {language: make(url, tensors, token) for language, make in makers.items()}


class _Example:
    """A tensor of one item. one: each of its `count` elements, as JSON has it."""

    def __init__(self, spec: TensorSpec) -> None:
        self.shape = [1, *(LENGTH if size < 0 else size for size in spec.shape)]
        self.count = prod(self.shape)
        self.one = json.dumps({"BYTES": "some text", "BOOL": False}.get(spec.datatype, 0))
        # Without escapes: the text is a literal in Go, too.
        head = {"name": spec.name, "shape": self.shape, "datatype": spec.datatype}
        self.head = json.dumps(head, ensure_ascii=False)[1:-1]
        self.name, self.datatype = json.dumps(spec.name, ensure_ascii=False), spec.datatype
        self.written = f"[{', '.join([self.one] * self.count)}]" if self.count <= INLINE else None

    @property
    def pythonic(self) -> str:
        one = self.one.title() if self.datatype == "BOOL" else self.one
        return f"[{one}] * {self.count}"


def _curl(url: str, tensors: list[_Example], token: bool) -> str:
    tail = f', "parameters": {json.dumps(_PARAMETERS)}}}'
    auth = ' -H "Authorization: Bearer $TOKEN"' if token else ""
    send = f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json'{auth}"
    if all(tensor.written for tensor in tensors):
        given = ", ".join(f'{{{tensor.head}, "data": {tensor.written}}}' for tensor in tensors)
        body = '{"inputs": [' + given + "]" + tail
        return f"{send} -d {shlex.quote(body)}\n"
    lines, before = [], '{"inputs": ['
    for tensor in tensors:
        head = f'{before}{{{tensor.head}, "data": ['
        lines.append(f"printf %s {shlex.quote(head)}")
        lines.append(f"yes {shlex.quote(tensor.one)} | head -n {tensor.count} | paste -sd, -")
        before = "]}, "
    lines.append(f"printf %s {shlex.quote(']}]' + tail)}")
    return "{ " + "\n  ".join(lines) + f"\n}} | {send} -d @-\n"


def _python(url: str, tensors: list[_Example], token: bool) -> str:
    given = "".join(f'        {{{tensor.head}, "data": {tensor.pythonic}}},\n' for tensor in tensors)
    auth = ', "Authorization": "Bearer " + os.environ["TOKEN"]' if token else ""
    return f"""import json{chr(10) + "import os" if token else ""}
from urllib.request import Request, urlopen

query = {{
    "inputs": [
{given}    ],
    "parameters": {json.dumps(_PARAMETERS)},
}}
headers = {{"Content-Type": "application/json"{auth}}}
with urlopen(Request({json.dumps(url)}, json.dumps(query).encode(), headers)) as reply:
    print(json.load(reply))
"""


def _node(url: str, tensors: list[_Example], token: bool) -> str:
    given = "".join(
        f'    {{ {tensor.head}, "data": Array({tensor.count}).fill({tensor.one}) }},\n' for tensor in tensors
    )
    auth = ', Authorization: "Bearer " + process.env.TOKEN' if token else ""
    return f"""const query = {{
  inputs: [
{given}  ],
  parameters: {json.dumps(_PARAMETERS)},
}};
const headers = {{ "Content-Type": "application/json"{auth} }};
const reply = await fetch({json.dumps(url)}, {{ method: "POST", headers, body: JSON.stringify(query) }});
console.log(reply.status, await reply.json());
"""


def _go(url: str, tensors: list[_Example], token: bool) -> str:
    kinds = {"BYTES": "string", "BOOL": "bool"}
    given = ""
    for tensor in tensors:
        shape = ", ".join(map(str, tensor.shape))
        kind = kinds.get(tensor.datatype, "float64")
        made = f"make([]{kind}, {tensor.count})" if tensor.written is None else f"[]{kind}{{{tensor.written[1:-1]}}}"
        given += (
            f'\t\t\t{{"name": {tensor.name}, "shape": []int{{{shape}}}, "datatype": "{tensor.datatype}",'
            f' "data": {made}}},\n'
        )
    auth = '\n\trequest.Header.Set("Authorization", "Bearer "+os.Getenv("TOKEN"))' if token else ""
    return f"""package main

import (
\t"bytes"
\t"encoding/json"
\t"fmt"
\t"io"
\t"net/http"{chr(10) + chr(9) + '"os"' if token else ""}
)

func main() {{
\tquery, _ := json.Marshal(map[string]any{{
\t\t"inputs": []map[string]any{{
{given}\t\t}},
\t\t"parameters": map[string]any{{"latency_ms": {PATIENCE_MS}}},
\t}})
\trequest, _ := http.NewRequest("POST", {json.dumps(url)}, bytes.NewReader(query))
\trequest.Header.Set("Content-Type", "application/json"){auth}
\treply, err := http.DefaultClient.Do(request)
\tif err != nil {{
\t\tpanic(err)
\t}}
\tdefer reply.Body.Close()
\ttext, _ := io.ReadAll(reply.Body)
\tfmt.Println(reply.Status, string(text))
}}
"""
