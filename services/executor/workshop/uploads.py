"""An upload as something to run: which files to try, what each takes and gives, which operators it is made of."""

from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from bus.messages.catalog import Signature
from services.executor.backends import backend, survey
from services.executor.backends.base import BackendError, Handle, LoadSpec
from services.executor.workshop.jobs import Refusal

FORMATS = ("onnx", "pt2", "torchscript")
CPU_FRAMEWORKS = ("ort", "torch")  # what an upload is read and run with; accelerators are looked at without it


class Candidate(Struct, frozen=True, kw_only=True):
    """One way to run an upload. framework: backend name. fixed: it takes one item at a time.

    opened: our own change of a fixed batch, which counts for nothing until it is proved.
    """

    framework: str
    path: Path
    format: str
    signature: Signature | None
    fixed: bool = False
    opened: bool = False

    def load(self, threads: int = 1, device: str = "cpu", max_batch: int = 1, precision: str = "fp32") -> Handle:
        """Load it; raises Refusal."""
        spec = LoadSpec(
            device=device,
            threads=threads,
            max_batch=max_batch,
            format=self.format,
            precision=precision,
            signature=self.signature,
            options={"allow_torchscript": "true"} if self.format == "torchscript" else {},
        )
        try:
            return backend(self.framework).load(self.path, spec)
        except BackendError as error:
            raise Refusal(str(error)) from error


class Upload(Struct, frozen=True, kw_only=True):
    """candidates: best first. frameworks: "" or why not, by backend name."""

    candidates: list[Candidate]
    operators: list[str]
    frameworks: dict[str, str]


def opened(path: Path, format: str, scratch: Path, most_bytes: int, *, allow_torchscript: bool) -> Upload:
    """Check an uploaded file's content against its format; raises Refusal."""
    if path.stat().st_size > most_bytes:
        raise Refusal(f"the model file is larger than the {most_bytes >> 20} MB allowed")
    if format == "onnx":
        return _onnx(path, scratch, most_bytes)
    if format == "pt2":
        return _pt2(path, scratch, most_bytes)
    if format == "torchscript":
        return _torchscript(path, allow_torchscript=allow_torchscript)
    raise Refusal(f"format {format[:20]!r} is unknown: use one of {', '.join(FORMATS)}")


def _onnx(path: Path, scratch: Path, most_bytes: int) -> Upload:
    from services.executor.workshop import onnx_files  # noqa: PLC0415  # each format imports only its own framework

    model = onnx_files.read(path, most_bytes)
    signature = onnx_files.signature(model)
    sizes = onnx_files.batch_sizes(model)
    candidates = [Candidate(framework="ort", path=path, format="onnx", signature=signature, fixed=bool(sizes))]
    if sizes:
        free = scratch / "free.onnx"
        free.write_bytes(onnx_files.free_batch(model).SerializeToString())
        candidates.insert(0, Candidate(framework="ort", path=free, format="onnx", signature=signature, opened=True))
    return Upload(
        candidates=candidates if sizes <= {1} else candidates[:1],
        operators=onnx_files.operators(model),
        frameworks=survey("cpu", ("ort",)) | {"torch": "it runs torch.export files (.pt2), and this model is ONNX"},
    )


def _pt2(path: Path, scratch: Path, most_bytes: int) -> Upload:
    from services.executor.backends import pt2  # noqa: PLC0415

    reduced = scratch / "reduced.pt2"
    try:
        pt2.reduce(path, reduced, most_bytes)
    except pt2.BadArchive as error:
        raise Refusal(str(error)) from error
    frameworks = survey("cpu", CPU_FRAMEWORKS)
    if frameworks["torch"]:
        raise Refusal(f"this worker cannot read .pt2 files: {frameworks['torch']}")
    from services.executor.workshop import torch_files  # noqa: PLC0415  # imports torch

    signature, fixed = torch_files.signature(reduced)
    candidate = Candidate(framework="torch", path=reduced, format="pt2", signature=signature, fixed=fixed)
    return Upload(candidates=[candidate], operators=pt2.operators(reduced), frameworks=_with_converter(frameworks))


def _torchscript(path: Path, *, allow_torchscript: bool) -> Upload:
    if not allow_torchscript:
        raise Refusal("TorchScript is not accepted here (registrar.allow_torchscript): upload ONNX or .pt2")
    frameworks = survey("cpu", CPU_FRAMEWORKS)
    if frameworks["torch"]:
        raise Refusal(f"this worker cannot read TorchScript: {frameworks['torch']}")
    from services.executor.workshop import torch_files  # noqa: PLC0415

    candidate = Candidate(framework="torch", path=path, format="torchscript", signature=None)
    return Upload(
        candidates=[candidate], operators=torch_files.script_operators(path), frameworks=_with_converter(frameworks)
    )


def _with_converter(frameworks: dict[str, str]) -> dict[str, str]:
    """A torch model runs on onnxruntime only where it can be converted."""
    if not frameworks["ort"] and find_spec("onnxscript") is None:
        return frameworks | {"ort": "converting torch models needs the onnxscript package: install infaas[torch]"}
    return frameworks
