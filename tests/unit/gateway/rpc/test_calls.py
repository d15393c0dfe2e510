"""How requests of a stream are counted, whatever becomes of them."""

import pytest

from bus.tensors import BadTensor
from infaas.errors import Refused
from services.core.settings import GatewaySettings
from services.gateway.actor import RequestCounts
from services.gateway.errors import RequestFailed
from services.gateway.http.access import AccessControl
from services.gateway.rpc.calls import Calls
from tests.support.servers.nats import run


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadTensor("x"), "INVALID_ARGUMENT"),
        (RequestFailed(None, "x", code="too_large"), "RESOURCE_EXHAUSTED"),
        (Refused("deadline", "x"), "DEADLINE_EXCEEDED"),
        (KeyError("nobody has foreseen this"), "INTERNAL"),
    ],
)
def test_a_request_of_a_stream_counts_with_the_status_that_its_client_is_told(error: Exception, status: str) -> None:
    settings, counts = GatewaySettings(), RequestCounts()
    calls = Calls(AccessControl(settings), settings, counts)

    async def fails() -> bytes:
        raise error

    async def main() -> None:
        with pytest.raises(RequestFailed):
            await calls.counted(b"body", fails)

    run(main())
    assert counts.requests == {("grpc", status): 1}
    assert (calls.running, calls.buffered) == (0, 0)
