"""The gateway: any HTTP or gRPC client becomes a client of the system. An application of the client library."""

from importlib.util import find_spec

NO_GRPC = "it needs the extra `grpc`: pip install 'infaas[grpc]', or set gateway.grpc_port = 0"


def has_grpc() -> bool:
    """Whether it can serve gRPC."""
    return find_spec("grpc") is not None
