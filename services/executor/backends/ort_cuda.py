"""onnxruntime on an NVIDIA GPU by its CUDA provider. This file has never been executed on a GPU by its authors.

Needs the package onnxruntime-gpu in place of onnxruntime, and CUDA and cuDNN in the versions that it was built for.
"""

from pathlib import Path
from types import ModuleType

from services.executor.backends.base import LoadFailed, LoadSpec, Unavailable, plain
from services.executor.backends.cuda import gpu, growth
from services.executor.backends.ort import IDENTITY, framework, one
from services.executor.backends.ort_device import BoundHandle, opened, preload, strict_options

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip uninstall onnxruntime, then pip install onnxruntime-gpu (see docs/hardware.md)"


class OrtCudaBackend:
    """Runs .onnx files, fp32 and fp16, on a GPU."""

    name = "ort-cuda"
    hardware = "gpu"
    formats = ("onnx",)
    executed = False

    def probe(self, device: str) -> str:
        """Runs a one-node model there with the CPU forbidden."""
        gpu(device, "onnxruntime")
        ort = build(PROVIDER)
        providers = [(PROVIDER, cuda_options(device))]
        try:
            session = ort.InferenceSession(IDENTITY, strict_options(ort, 1), providers=providers, enable_fallback=0)
            session.run(None, {"x": one()})
        except Exception as error:
            raise Unavailable(f"onnxruntime does not run on {device}: {plain(error)}") from error
        if session.get_providers()[0] != PROVIDER:
            raise Unavailable(f"onnxruntime cannot load CUDA or cuDNN in the versions that it was built for; {INSTALL}")
        return str(ort.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> BoundHandle:
        """A session on exactly this GPU, nothing of it on the CPU."""
        if spec.format not in self.formats:
            raise LoadFailed(f"onnxruntime runs {', '.join(self.formats)} files, not {spec.format}")
        found = gpu(spec.device, "onnxruntime")
        ort = build(PROVIDER)
        with growth(spec.device) as grown:
            session, where = opened(ort, artifact, spec, [(PROVIDER, cuda_options(spec.device))])
        proof = f"onnxruntime {ort.__version__} {PROVIDER}, {spec.device} ({found.name}), {where}"
        return BoundHandle(ort, session, spec, place(spec.device), proof, grown.mb)


def place(device: str) -> tuple[str, int]:
    """Onnxruntime's own words for "cuda:1"."""
    kind, _, number = device.partition(":")
    return kind, int(number)


def cuda_options(device: str) -> dict[str, str]:
    """Provider options. Memory grows by what is asked for; fp32 is really fp32 (TF32 has 10 bits of mantissa)."""
    return {
        "device_id": str(place(device)[1]),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }


def build(provider: str) -> ModuleType:
    """Onnxruntime with this provider compiled in; raises Unavailable."""
    ort = framework()
    if provider not in ort.get_available_providers():
        raise Unavailable(f"this onnxruntime {ort.__version__} was built without {provider}: {INSTALL}")
    preload(ort)
    return ort
