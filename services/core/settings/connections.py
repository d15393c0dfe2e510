"""Sections about servers: those that processes reach, and those that listen."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import field

from bus.fields import SOME_TEXT, Fault, Number, Text
from services.core.settings.fields import PORT, SECONDS, Section, Texts

_LISTEN = Text(r"[\w.:-]+", "an address to listen on, as 127.0.0.1 or 0.0.0.0")
_TOKENS = Text(r"[\x21-\x7e\s]*", "tokens without spaces or commas inside, as `openssl rand -hex 32` makes them")
_PUBLIC = Text(r"(https?://[^\s/]+(/\S*)?)?", "empty, or a URL: https://host or https://host/path")
_DAYS = Number(1 / 24, 36500, zero="for ever")
_AGGREGATED = Number(2, 36500, zero="for ever")  # rows that come a day late are still counted


class BusSettings(Section, frozen=True, kw_only=True):
    """NATS: where it is, who we are there, and how large its streams may become."""

    url: Annotated[
        str,
        Text(r"\S+", "a URL as nats://host:4222"),
        "NATS servers: one URL, or several separated by commas. If it is given, `infaas up` starts no NATS of its own.",
    ] = "nats://127.0.0.1:4222"
    auth: Annotated[
        str,
        "Directory of `infaas auth`: `infaas up` starts its NATS with these users and certificates, and each service with its own key.",
    ] = ""
    nkey_seed: Annotated[str, "Credentials that `infaas auth` made, or the path of their file."] = ""
    inbox: Annotated[
        str,
        Text(r"([^\s*>.]+\.)*[^\s*>.]*", "empty, or a subject without wildcards, as _INBOX_.app.name"),
        "Prefix of our inboxes. Empty: the one that the credentials name.",
    ] = ""
    tls_ca: Annotated[str, "PEM file that vouches for the servers (docs/security.md)."] = ""
    tls_certificate: Annotated[str, "PEM file with our own certificate."] = ""
    tls_key: Annotated[str, "PEM file with the key of our own certificate."] = ""
    monitoring: Annotated[
        str,
        Text(r"(https?://[^\s,/]+/?\s*,?\s*)*", "empty, or URLs as http://nats:8222"),
        "Where the servers show their own settings: one URL, or several separated by commas. Empty: port 8222 of each.",
    ] = ""
    require_durable: Annotated[
        bool, "Start only with servers that are known to keep what they have acknowledged (docs/nats.md)."
    ] = False
    replicas: Annotated[
        int, Number(most=5, zero="as many as there are servers, up to 3"), "Copies of each stream and bucket."
    ] = 0
    known: Annotated[
        str, "File that lists the streams which exist, kept beside the database: their loss is noticed at start."
    ] = ""
    adopt: Annotated[bool, "Start with the streams that are there, even if some are lost."] = False
    max_payload: Annotated[int, Number(1024, 64 * 2**20), "Bytes of one message. NATS takes no more than 64 MiB."] = (
        8 * 2**20
    )
    outcome_bytes: Annotated[int, Number(1024, 1e18), "Bytes of the stream of query outcomes."] = 2 * 2**30
    event_bytes: Annotated[int, Number(1024, 1e18), "Bytes of the stream of events."] = 1 * 2**30


class KeepDays(Section, frozen=True, kw_only=True):
    """For how many days the rows of a relation are kept. Hourly cost is always kept."""

    query_outcomes: Annotated[float, _AGGREGATED, "Days that rows of query_outcomes are kept."] = 30.0
    cost_events: Annotated[float, _AGGREGATED, "Days that rows of cost_events are kept."] = 30.0
    state_events: Annotated[float, _DAYS, "Days that rows of state_events are kept."] = 90.0
    scaling_events: Annotated[float, _DAYS, "Days that rows of scaling_events are kept."] = 90.0
    shadow_events: Annotated[float, _DAYS, "Days that rows of shadow_events are kept."] = 90.0
    worker_events: Annotated[float, _DAYS, "Days that rows of worker_events are kept."] = 90.0
    objective_events: Annotated[float, _DAYS, "Days that rows of objective_events are kept."] = 30.0
    selection_events: Annotated[float, _DAYS, "Days that rows of selection_events are kept."] = 90.0
    pipeline_events: Annotated[float, _DAYS, "Days that rows of pipeline_events are kept."] = 90.0
    client_errors: Annotated[float, _DAYS, "Days that rows of client_errors are kept."] = 90.0
    worker_samples: Annotated[float, _DAYS, "Days that rows of worker_samples are kept."] = 7.0
    instance_samples: Annotated[float, _DAYS, "Days that rows of instance_samples are kept."] = 7.0
    slo_by_app_minutely: Annotated[float, _DAYS, "Days that rows of slo_by_app_minutely are kept."] = 400.0


class StoreSettings(Section, frozen=True, kw_only=True):
    """The database. `timescale` and `keep_days` take effect when a database is prepared."""

    dsn: Annotated[str, "PostgreSQL DSN of the role that writes."] = ""
    reader_dsn: Annotated[str, "PostgreSQL DSN of the read-only role, as shown to users."] = ""
    timescale: Annotated[
        Literal["auto", "apache", "off"],
        "What is used of TimescaleDB where the server has it: all that its licence there allows, only what is under the "
        "Apache licence, or nothing.",
    ] = "auto"
    keep_days: KeepDays = field(default_factory=KeepDays)


class GatewaySettings(Section, frozen=True, kw_only=True):
    """The HTTP and gRPC gateway (docs/gateway.md)."""

    address: Annotated[str, _LISTEN, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, Number(most=65535, zero="off"), "Port for HTTP."] = 8000
    grpc_port: Annotated[int, Number(most=65535, zero="off"), "Port for gRPC."] = 8001
    reuse_port: Annotated[
        bool, "Several gateways listen at one address; the kernel distributes connections among them."
    ] = False
    drain_s: Annotated[
        float,
        Number(most=60.0),
        "Seconds for which it still takes requests when it stops; it says that it is not ready.",
    ] = 0.5
    admin: Annotated[bool, "Whether management verbs and registrations go through the gateway."] = True
    tokens: Annotated[Texts, _TOKENS, "Tokens of those that may query. Empty: anybody who reaches the gateway."] = ()
    operator_tokens: Annotated[
        Texts, _TOKENS, "Tokens of those that may manage. Empty: anybody who reaches the gateway."
    ] = ()
    tls_certificate: Annotated[str, "PEM file; with it and its key the gateway speaks HTTPS and gRPC over TLS."] = ""
    tls_key: Annotated[str, "PEM file with the key of the certificate."] = ""
    cors_origins: Annotated[
        Texts,
        Text(r"[\s,]*((\*|https?://[^\s/,]+)[\s,]*)*", "origins as https://example.org, or *"),
        "Origins of web pages that may ask.",
    ] = ()
    hosts: Annotated[
        Texts,
        Text(r"[\w.:\[\]*\s,-]*", "names of hosts, as models.example.org"),
        "Names under which the gateway may be asked, beside its address.",
    ] = ()
    max_body: Annotated[int, Number(1024, 2**31), "Bytes of a request's body."] = 64 * 2**20
    max_header: Annotated[int, Number(256, 2**20), "Bytes of a request's head."] = 16 * 2**10
    head_timeout_s: Annotated[float, SECONDS, "Seconds in which a request's head must come."] = 10.0
    body_timeout_s: Annotated[float, SECONDS, "Seconds in which a request's body must come."] = 30.0
    idle_timeout_s: Annotated[float, SECONDS, "Seconds after which a connection without a request is closed."] = 75.0
    connections: Annotated[int, Number(1, 1e6), "Most connections at a time."] = 1000
    in_flight: Annotated[int, Number(1, 1e6), "Most requests at a time."] = 1000
    register_hosts: Annotated[
        Texts,
        Text(r"[\w.:=\[\]\s,-]*", "names of hosts, as models.example.org or store.internal=10.1.2.3"),
        "Hosts from which models may be fetched.",
    ] = ()
    register_max_bytes: Annotated[int, Number(1024, 1e12), "Bytes of one fetched file."] = 2**30

    def conflicts(self) -> Iterator[Fault]:
        yield from _unpaired("gateway", self)
        if self.port == 0 and self.grpc_port == 0:
            yield Fault(
                "gateway.port", "must not be 0 where gateway.grpc_port is 0, too: there would be nothing to listen on"
            )
        elif self.port == self.grpc_port:
            yield Fault("gateway.grpc_port", f"must be another than gateway.port, not {self.grpc_port}")


def _unpaired(name: str, section: "GatewaySettings | DashboardSettings") -> Iterator[Fault]:
    if bool(section.tls_certificate) != bool(section.tls_key):
        missing = "tls_key" if section.tls_certificate else "tls_certificate"
        yield Fault(f"{name}.{missing}", "must name a file, too: a certificate and its key belong together")


class EngineSettings(Section, frozen=True, kw_only=True):
    """The engine proxy (docs/security.md)."""

    address: Annotated[str, _LISTEN, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, PORT, "Port to listen on."] = 2375
    socket: Annotated[str, SOME_TEXT, "Socket of the Docker engine."] = "/var/run/docker.sock"
    token: Annotated[
        str,
        Text(r"[\x21-\x7e]*", "empty, or a token without spaces, as `openssl rand -hex 32` makes them"),
        "Token that a client must show. Empty: anybody who reaches the proxy may use it.",
    ] = ""


class DashboardSettings(Section, frozen=True, kw_only=True):
    """The dashboard (docs/dashboard.md)."""

    address: Annotated[str, SOME_TEXT, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, PORT, "Port to listen on."] = 8501
    public_url: Annotated[
        str, _PUBLIC, "Where visitors see the dashboard behind a proxy. Empty: at http://address:port."
    ] = ""
    login: Annotated[
        str, "TOML file with Streamlit's section [auth], for OpenID Connect. Empty: anybody who reaches it may look."
    ] = ""
    tls_certificate: Annotated[str, "PEM file; with it and its key the dashboard speaks HTTPS."] = ""
    tls_key: Annotated[str, "PEM file with the key of the certificate."] = ""
    allow: Annotated[
        Texts,
        "E-mail addresses, or @domain, that may look. Empty: anybody who can log in. In a variable: separated by commas.",
    ] = ()

    def conflicts(self) -> Iterator[Fault]:
        yield from _unpaired("dashboard", self)


class MetricsSettings(Section, frozen=True, kw_only=True):
    """Each process's HTTP server with /metrics, /healthz and /readyz (docs/metrics.md)."""

    enabled: Annotated[bool, "Whether there are such servers at all."] = True
    host: Annotated[str, _LISTEN, "Address to listen on."] = "127.0.0.1"
    port: Annotated[
        int,
        Number(most=65535, zero="none"),
        "Port to listen on. Under `infaas up`: the system's; its services get the next ones.",
    ] = 0
    series: Annotated[int, Number(1, 1e6), "Most label sets that a metric shows."] = 1000


class TelemetrySettings(Section, frozen=True, kw_only=True):
    """Traces (docs/metrics.md)."""

    otlp_endpoint: Annotated[
        str,
        Text(r"(https?://[^\s/]+(/\S*)?)?", "empty, or a URL as http://host:4318"),
        "OpenTelemetry collector (OTLP over HTTP) that gets the spans of traced queries. Empty: no spans are made. Needs the "
        "extra `otel`.",
    ] = ""
