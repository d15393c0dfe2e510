"""A collector of OpenTelemetry spans for tests: an HTTP server that takes OTLP as protobuf and keeps it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
