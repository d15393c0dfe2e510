"""A query's traceparent travels from the client to the answer, and the parts' spans reach an OpenTelemetry collector."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.codec import encode
from bus.messages.catalog import AppRecord, PipelineEdge, PipelineRecord, PipelineVertex, VariantRecord
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from bus.tensors import from_array
from infaas.client import Client
from infaas.errors import BadInput, Refused
from services.core.catalog import key_of
from services.core.settings import MonitorSettings
from services.core.trace import read
from services.shell.runtime.telemetry import SpanExporter, span_exporter
from tests.support.clients.responders import until
from tests.support.data.events import app_record, model_record, variant_record
from tests.support.models import tiny_models
from tests.support.servers.processes import program
from tests.support.servers.worker import APP, Worker, measured, worker


class Collector:
    """url: its endpoint. spans: what came, oldest first, as OTLP's own messages; resources: of which services."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.services: list[str] = []

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
                for scope in resource.scope_spans:
                    found.spans.extend(scope.spans)
                    found.services += names * len(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"
X, _ = tiny_models.digits(4)
BRISK = MonitorSettings(heartbeat_s=0.1, sample_s=1.0)


def hexed(span: object, field: str) -> str:
    value: bytes = getattr(span, field)
    return value.hex()


@asynccontextmanager
async def traced(
    found: Collector, url: str, prefix: str, directory: Path
) -> AsyncIterator[tuple[Worker, SpanExporter, VariantRecord]]:
    """A worker with one variant, whose parts send their spans there."""
    model = tiny_models.mlp()
    async with worker(url, prefix, directory, BRISK) as here:
        spans = SpanExporter(found.url, "test")
        for runtimes in here.runtimes.values():
            for runtime in runtimes:
                runtime.spans = spans
        record = measured(model, X, [tiny_models.CLASSES])
        await here.catalogue(record, model)
        yield here, spans, record


async def arrived(found: Collector, count: int) -> None:
    await until(lambda: len(found.spans) >= count)


async def test_a_query_is_traced_from_the_client_to_the_answer(nats_url: str, prefix: str, tmp_path: Path) -> None:
    with collector() as found:
        async with traced(found, nats_url, prefix, tmp_path) as (here, spans, _):
            body = encode({"inputs": from_array(X[:1]), "id": "mine"})
            first = await here.ask(X[:1])
            assert "outputs" in first
            answer = await here.bus.request(here.subjects.query(APP), body, 30.0, {"traceparent": HEADER})
            client = await Client(here.bus, prefix=prefix).open()
            await client.query(APP, X[:2], traceparent=f"00-{TRACE}-{PARENT}-00")  # not to be recorded
            with pytest.raises(BadInput, match="traceparent"):
                await client.query(APP, X[:2], traceparent="nonsense")
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider

            with TracerProvider().get_tracer("test").start_as_current_span("mine") as mine:
                await client.query(APP, X[:2])
            await client.close()
            await asyncio.to_thread(spans.close)
            await arrived(found, 6)

            told = read(answer.headers)
            assert told.trace == TRACE
            by_name = {span.name: span for span in found.spans if hexed(span, "trace_id") == TRACE}
            assert len(by_name) == 3
            query, execute, compute = (by_name[f"infaas {part}"] for part in ("query", "execute", "compute"))
            assert hexed(query, "parent_span_id") == PARENT
            assert execute.parent_span_id == query.span_id
            assert compute.parent_span_id == execute.span_id
            assert hexed(execute, "span_id") == told.parent
            start = query.start_time_unix_nano
            assert start <= execute.start_time_unix_nano <= compute.start_time_unix_nano
            assert compute.end_time_unix_nano <= query.end_time_unix_nano
            about = {one.key: one.value.string_value or one.value.int_value for one in query.attributes}
            assert about["infaas.query.id"] == "mine"
            assert about["infaas.app"] == APP
            context = mine.get_span_context()
            theirs = [
                span for span in found.spans if hexed(span, "trace_id") == trace.format_trace_id(context.trace_id)
            ]
            assert len(theirs) == 3
            assert trace.format_span_id(context.span_id) in {hexed(span, "parent_span_id") for span in theirs}
            assert len(found.spans) == 6
            assert found.services == ["infaas-test"] * 6


async def test_a_pipeline_has_one_span_a_stage_below_its_own(nats_url: str, prefix: str, tmp_path: Path) -> None:
    with collector() as found:
        async with traced(found, nats_url, prefix, tmp_path) as (here, spans, record):
            vertices = [PipelineVertex(name=name, app=APP, inputs={"x": "$.x"}) for name in ("first", "second")]
            edges = [PipelineEdge(source="first", target="second")]
            graph = PipelineRecord(vertices=vertices, edges=edges, output={"scores": "second.scores"})
            bucket = await here.bus.key_value(here.subjects.catalog_bucket)
            both = AppRecord(app="both", links={}, signature=record.signature, pipeline=graph)
            await bucket.put(key_of(both), encode(both))
            client = await Client(here.bus, prefix=prefix).open()
            for _ in range(3000):
                if await client.pipelines(app="both"):
                    break
                await asyncio.sleep(0.02)
            assert "outputs" in await here.ask(X[:1])  # the model is loaded
            answer = await client.query("both", X[:1], traceparent=HEADER, timeout=60.0)
            await client.close()
            await asyncio.to_thread(spans.close)
            await arrived(found, 7)

            mine = [span for span in found.spans if hexed(span, "trace_id") == TRACE]
            about = {
                hexed(span, "span_id"): {one.key: one.value.string_value for one in span.attributes} for span in mine
            }
            [whole] = [span for span in mine if hexed(span, "parent_span_id") == PARENT]
            assert about[hexed(whole, "span_id")]["infaas.app"] == "both"
            assert about[hexed(whole, "span_id")]["infaas.query.uid"] == answer.query
            stages = {
                about[hexed(one, "span_id")]["infaas.stage"]: one for one in mine if one.parent_span_id == whole.span_id
            }
            assert set(stages) == {"first", "second"}
            assert len(mine) == 7, "of each stage, one span more where it is taken and one where it is computed"
            for stage in stages.values():
                [execute] = [one for one in mine if one.parent_span_id == stage.span_id]
                [compute] = [one for one in mine if one.parent_span_id == execute.span_id]
                assert (execute.name, compute.name) == ("infaas execute", "infaas compute")
                assert whole.start_time_unix_nano <= stage.start_time_unix_nano <= compute.start_time_unix_nano
                assert compute.end_time_unix_nano <= whole.end_time_unix_nano
            assert stages["first"].end_time_unix_nano <= stages["second"].end_time_unix_nano


async def test_a_service_sends_spans_where_its_settings_say(nats_url: str, prefix: str, tmp_path: Path) -> None:
    """Of a refused query, too: nobody is there to compute it."""
    with collector() as found:
        settings = {
            "INFAAS_BUS__URL": nats_url,
            "INFAAS_PREFIX": prefix,
            "INFAAS_TELEMETRY__OTLP_ENDPOINT": found.url,
        }
        with program("infaas.cli.run", "dispatcher", errors=tmp_path / "log", **settings):
            bus = await NatsBus.connect(nats_url, name="test")
            subjects = Subjects(prefix)
            bucket = await bus.key_value(subjects.catalog_bucket)
            for record in (variant_record(), model_record(), app_record()):
                await bucket.put(key_of(record), encode(record))
            client = await Client(bus, prefix=prefix).open()
            x = np.zeros((1, 64), np.float32)
            while True:  # the client asks again until a dispatcher is there; what it says before it has read the catalogue does not count
                refused = await client.query(
                    app_record().app, x, latency_ms=200, traceparent=HEADER, raise_refused=False
                )
                if found.spans or not isinstance(refused, Refused) or refused.code != "overloaded":
                    break
                await asyncio.sleep(0.1)
            assert isinstance(refused, Refused)
            await arrived(found, 1)
            (span, *_) = found.named("infaas query")
            assert hexed(span, "trace_id") == TRACE
            assert span.status.message == refused.code
            assert found.services[0] == "infaas-dispatcher"
            await client.close()
            await bus.close()
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert {line["service"] for line in lines} == {"dispatcher"}
        assert {line["message"] for line in lines} >= {"dispatcher runs", "dispatcher stopped"}


def test_without_an_endpoint_nothing_is_made() -> None:
    assert span_exporter("", "test") is None
