"""INFaaS on a message bus: say what a query needs, the system picks the model variant.

    import infaas

    async with infaas.connect() as client:          # asyncio
        answer = await client.query("digits", images, latency_ms=20, accuracy=0.95)

    with infaas.connect_blocking() as system:        # without asyncio
        answer = system.query("digits", images, cost=0.5)

    system = infaas.serve(model, x, y)               # without a system: in this process

Names are loaded when first used: importing the package is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infaas.answers import Answer
    from infaas.blocking import Infaas, connect_blocking, register
    from infaas.client import Client
    from infaas.connecting import connect
    from infaas.errors import BadInput, InfaasError, NotConnected, Refused, RegistrationFailed, Timeout
    from infaas.serving import serve

_WHERE = {
    "Answer": "infaas.answers",
    "BadInput": "infaas.errors",
    "Client": "infaas.client",
    "Infaas": "infaas.blocking",
    "InfaasError": "infaas.errors",
    "NotConnected": "infaas.errors",
    "Refused": "infaas.errors",
    "RegistrationFailed": "infaas.errors",
    "Timeout": "infaas.errors",
    "connect": "infaas.connecting",
    "connect_blocking": "infaas.blocking",
    "register": "infaas.blocking",
    "serve": "infaas.serving",
}

__all__ = [
    "Answer",
    "BadInput",
    "Client",
    "Infaas",
    "InfaasError",
    "NotConnected",
    "Refused",
    "RegistrationFailed",
    "Timeout",
    "connect",
    "connect_blocking",
    "register",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # noqa: PLC0415  (it takes longer than the rest)

        return metadata.version("infaas")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
