"""Execution backends by framework name, one file each, imported when first asked for."""

from functools import cache
from importlib import import_module

from services.executor.backends.base import Backend, Unavailable

_MODULES = {
    "ort": ("services.executor.backends.ort", "OrtBackend"),
    "torch": ("services.executor.backends.torch_backend", "TorchBackend"),
}
NAMES = tuple(_MODULES)
UNAVAILABLE = "unavailable: "


@cache
def backend(framework: str) -> Backend:
    """The backend of this framework; raises Unavailable when there is none of that name."""
    try:
        module, attribute = _MODULES[framework]
    except KeyError:
        raise Unavailable(f"no backend {framework!r}: there are {', '.join(NAMES)}") from None
    made: Backend = getattr(import_module(module), attribute)()
    return made


def survey(device: str) -> dict[str, str]:
    """By framework: its version where it works on this device, else "unavailable: " and why. Imports all of them."""
    found: dict[str, str] = {}
    for name in NAMES:
        try:
            found[name] = backend(name).probe(device)
        except Unavailable as error:
            found[name] = f"{UNAVAILABLE}{error}"
    return found
