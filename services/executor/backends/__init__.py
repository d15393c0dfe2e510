"""Execution backends by framework name: one file each, imported at first use."""

from functools import cache
from importlib import import_module

from services.executor.backends.base import Backend, BackendUnavailable

_MODULES = {
    "ort": ("services.executor.backends.ort", "OrtBackend"),
    "torch": ("services.executor.backends.torch", "TorchBackend"),
    "torch-cuda": ("services.executor.backends.torch_cuda", "TorchCudaBackend"),
    "ort-cuda": ("services.executor.backends.ort", "OrtCudaBackend"),
    "tensorrt": ("services.executor.backends.tensorrt", "TensorrtBackend"),
    "remote": ("services.executor.backends.remote", "RemoteBackend"),
}
NAMES = tuple(_MODULES)


@cache
def backend(framework: str) -> Backend:
    """The backend of this framework. Raises BackendUnavailable if there is none of that name."""
    try:
        module, attribute = _MODULES[framework]
    except KeyError:
        raise BackendUnavailable(f"no backend {framework!r}: there are {', '.join(NAMES)}") from None
    made: Backend = getattr(import_module(module), attribute)()
    return made


def names_for(hardware: str) -> tuple[str, ...]:
    """The frameworks that run on this kind of device, whether or not they are installed."""
    return tuple(name for name in NAMES if backend(name).hardware == hardware)


def survey(device: str, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """By framework: "" if it works on this device, else the reason. Imports the frameworks that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            backend(name).probe(device)
            found[name] = ""
        except BackendUnavailable as error:
            found[name] = str(error)
    return found
