"""What every section of the settings is, and the sections of the gateway and of the engine proxy; the others are in settings.py."""

from msgspec import Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error, not a typo that passes."""


class GatewaySettings(Section, frozen=True, kw_only=True):
    """The HTTP and gRPC gateway (docs/gateway.md).

    port, grpc_port: 0 = off. reuse_port: several gateways listen at one address, the kernel deals connections out. drain_s: while it
    stops, it still takes requests for so long and says that it is not ready. admin: management verbs and registrations over HTTP.
    tokens, operator_tokens: who may ask, who may manage; empty: whoever reaches it. tls_certificate, tls_key: PEM files.
    cors_origins: of web pages that may ask. hosts: names under which it may be asked, beside its address. max_body, max_header:
    bytes of a request. head_timeout_s, body_timeout_s: to send them. idle_timeout_s: a connection without a request.
    connections, in_flight: most connections, most requests at a time. register_hosts: from which models may be fetched;
    register_max_bytes: of one fetched file.
    """

    address: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    reuse_port: bool = False
    drain_s: float = 0.5
    admin: bool = True
    tokens: tuple[str, ...] | str = ()  # in a variable or file: separated by commas or white space
    operator_tokens: tuple[str, ...] | str = ()
    tls_certificate: str = ""
    tls_key: str = ""
    cors_origins: tuple[str, ...] | str = ()
    hosts: tuple[str, ...] | str = ()
    max_body: int = 64 * 2**20
    max_header: int = 16 * 2**10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    connections: int = 1000
    in_flight: int = 1000
    register_hosts: tuple[str, ...] | str = ()
    register_max_bytes: int = 2**30


class EngineSettings(Section, frozen=True, kw_only=True):
    """The engine proxy (docs/security.md). socket: of the Docker engine. token: whoever asks must show it; empty: whoever reaches it may."""

    address: str = "127.0.0.1"
    port: int = 2375
    socket: str = "/var/run/docker.sock"
    token: str = ""


def listed(value: tuple[str, ...] | str) -> tuple[str, ...]:
    """A setting that may be a list or, in a variable, a text with commas or white space between the items."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value
