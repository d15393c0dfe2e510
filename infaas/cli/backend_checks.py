"""What `infaas doctor` says of each inference framework: whether it works on a device of this machine, and why not."""

from infaas.cli.findings import Finding

NEVER = "never executed by its authors"


def check_backends() -> list[Finding]:
    """A line each. Only the CPU's first one must work: without it there is nothing to serve with."""
    from services.executor.backends import NAMES  # noqa: PLC0415

    return [_backend(name) for name in NAMES]


def _backend(name: str) -> Finding:
    from services.executor.backends import backend  # noqa: PLC0415
    from services.executor.backends.base import BackendUnavailable  # noqa: PLC0415
    from services.shell.host.accelerators import accelerators  # noqa: PLC0415

    made = backend(name)
    mark = "" if made.executed else f" ({NEVER})"
    places = ["cpu"] if made.hardware == "cpu" else [one.address for one in accelerators() if one.kind == made.hardware]
    # Where no driver shows a device, the first one that there could be gets the reason.
    place = places[0] if places else {"gpu": "cuda:0", "inferentia": "neuron:0"}[made.hardware]
    check = f"backend {name}"
    try:
        return Finding(check, "ok", f"works on {place}, version {made.probe(place)}{mark}")
    except BackendUnavailable as error:
        if name == "ort":
            return Finding(check, "failed", str(error), "pip install onnxruntime")
        return Finding(check, "skipped", f"{error}{mark}")
