"""What only a real GPU shows of its backends, beside their contract (tests/contract/test_backends.py). Without one this is a single skip.

Add `-s` for the table of accuracies and latencies beside the CPU's fp32; INFAAS_GPU_REPORT=FILE.json keeps it.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from services.executor.backends import backend, names_for, pt2
from services.executor.backends.base import BackendUnavailable, Handle, LoadFailed, LoadSpec
from services.executor.workshop.tasks import measuring, onnx_files, quantise
from services.executor.workshop.tasks.validation import ValidationSet
from services.monitor.edge import MachineEdge
from services.monitor.effects import MachineSample, SampleMachine
from services.shell.host.accelerators import accelerators, cuda_device, why_no_gpu
from tests.support.data.events import floats
from tests.support.models import tiny_models
from tests.support.servers.processes import eventually

if why_no_gpu():
    pytest.skip(why_no_gpu(), allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

DEVICE = "cuda:0"
LARGEST = 64
BATCHES = (1, 3, 8, 64)
MATRIX = [
    ("torch-cuda", "fp32"), ("torch-cuda", "fp16"), ("torch-cuda", "bf16"), ("ort-cuda", "fp32"), ("ort-cuda", "fp16"),
    ("tensorrt", "fp32"), ("tensorrt", "fp16"), ("tensorrt", "int8"),
]  # fmt: skip
LEAST_AGREEMENT = {"fp32": 0.995, "fp16": 0.95, "bf16": 0.85, "int8": 0.7}
MOST_ERROR = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.2, "int8": 0.6}  # mean, of the spread of the CPU's scores
SIGNATURE = floats({"x": [1, 28, 28]}, {"scores": [tiny_models.CLASSES]})
IMAGES = np.random.default_rng(7).normal(size=(256, 1, 28, 28)).astype("f4")


@pytest.fixture(autouse=True)
def logging_as_before():
    """What makes artifacts silences its process, which is a sandbox elsewhere."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The same convolutional net in both formats, and the CPU's own fp32 handle."""
    directory = tmp_path_factory.mktemp("gpu")
    (directory / "fp32.onnx").write_bytes(tiny_models.convnet())
    handle = backend("ort").load(directory / "fp32.onnx", LoadSpec(signature=SIGNATURE, max_batch=LARGEST))
    yield directory, handle
    handle.close()


def artifact(files, framework: str, precision: str) -> tuple[Path, str]:
    """The file that this framework runs in this precision, made as the workshop makes it."""
    directory, _ = files
    data = ValidationSet(inputs={"x": IMAGES}, labels=np.zeros(len(IMAGES), "i8"))
    if framework == "torch-cuda":
        path = directory / f"{precision}.pt2"
        if not path.exists():
            if not (directory / "fp32.pt2").exists():
                exported(directory)
            if precision != "fp32":
                from services.executor.workshop.tasks.torch_files import to_half

                to_half(directory / "fp32.pt2", path, precision, data)
        return path, "pt2"
    path = directory / f"{precision}.onnx"
    if not path.exists() and precision == "fp16":
        onnx_files.to_fp16(directory / "fp32.onnx", path)
    elif not path.exists():
        quantise.static(directory / "fp32.onnx", path, data, 8, lambda share: None, symmetric=True)
    return path, "onnx"


def exported(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    onnx = pytest.importorskip("onnx")
    weights = {
        t.name: onnx.numpy_helper.to_array(t).copy() for t in onnx.load(directory / "fp32.onnx").graph.initializer
    }

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kernels = torch.nn.ParameterList([torch.from_numpy(weights[f"k{i}"]) for i in range(len(weights) - 1)])
            self.last = torch.nn.Parameter(torch.from_numpy(weights["last"]))

        def forward(self, x):
            for kernel in self.kernels:
                x = torch.relu(torch.nn.functional.conv2d(x, kernel, padding=1))
            return x.mean(dim=(2, 3)) @ self.last

    shapes = ({0: torch.export.Dim("batch", min=1, max=LARGEST)},)
    program = torch.export.export(Net().eval(), (torch.zeros(2, 1, 28, 28),), dynamic_shapes=shapes)
    torch.export.save(program, directory / "upload.pt2")
    pt2.reduce(directory / "upload.pt2", directory / "fp32.pt2", 2**30)


def works(framework: str) -> None:
    try:
        backend(framework).probe(DEVICE)
    except BackendUnavailable as reason:
        pytest.skip(f"{framework}: {reason}")


def load(files, framework: str, precision: str = "fp32") -> Handle:
    works(framework)
    path, kind = artifact(files, framework, precision)
    return backend(framework).load(
        path, LoadSpec(device=DEVICE, max_batch=LARGEST, format=kind, precision=precision, signature=SIGNATURE)
    )


@pytest.fixture(params=names_for("gpu"))
def framework(request) -> str:
    works(request.param)
    return request.param


@pytest.fixture(scope="session")
def report():
    """Rows of the comparison; printed at the end, and kept where the environment says."""
    rows: list[dict] = []
    yield rows
    gpu = cuda_device(DEVICE).name
    print(f"\n{gpu}: milliseconds a batch (median), agreement with the CPU's fp32")
    for row in rows:
        times = "  ".join(f"b{n} {row[f'b{n}_ms']:8.3f}" for n in BATCHES)
        print(
            f"{row['framework']:11} {row['precision']:5} {times}  {row['agreement']:7.2%}  {row['memory_mb']:6.0f} MB"
        )
    if os.environ.get("INFAAS_GPU_REPORT"):
        Path(os.environ["INFAAS_GPU_REPORT"]).write_text(json.dumps({"gpu": gpu, "rows": rows}, indent=1))


def error(scores: np.ndarray, wanted: np.ndarray) -> float:
    """How far these scores are from those, as a share of what differs from item to item."""
    spread = wanted.std(axis=0).mean() if len(wanted) > 1 else 0.03  # the net's own, over many
    return float(np.abs(scores - wanted).mean() / spread)


def row(name: str, precision: str, handle: Handle, reference: Handle) -> dict:
    right = [reference.run_single(IMAGES[i : i + LARGEST])[0] for i in range(0, len(IMAGES), LARGEST)]
    found = [handle.run_single(IMAGES[i : i + LARGEST])[0] for i in range(0, len(IMAGES), LARGEST)]
    # A random net has a favourite class: answers are compared by what differs from item to item.
    usual = np.concatenate(right).mean(axis=0)
    scores, wanted = np.concatenate(found), np.concatenate(right)
    times = {}
    for n in BATCHES:
        batch = np.ascontiguousarray(IMAGES[:n])
        times[f"b{n}_ms"] = measuring.measure_calls(lambda batch=batch: handle.run_single(batch), 0.3, 0).p50_ms
    return {
        "framework": name, "precision": precision, "agreement": float(((scores - usual).argmax(1) == (wanted - usual).argmax(1)).mean()),
        "error": error(scores, wanted), "memory_mb": handle.memory_mb,
        "proof": handle.proof, **times,
    }  # fmt: skip


def test_the_cpu_to_compare_with(files, report):
    report.append(row("ort (cpu)", "fp32", files[1], files[1]))


@pytest.mark.parametrize(("framework_name", "precision"), MATRIX)
def test_answers_agree_with_the_cpus(files, report, framework_name, precision):
    handle = load(files, framework_name, precision)
    try:
        found = row(framework_name, precision, handle, files[1])
    finally:
        handle.close()
    report.append(found)
    assert found["agreement"] >= LEAST_AGREEMENT[precision]
    assert found["error"] <= MOST_ERROR[precision]


def test_it_proves_where_it_runs(files, framework):
    handle = load(files, framework)
    assert DEVICE in handle.proof
    assert cuda_device(DEVICE).name in handle.proof
    if framework == "torch-cuda":
        assert "parameters on cuda:0" in handle.proof
        assert "CUDA graphs for batches of 1, 2, 4, 8, 16, 32, 64" in handle.proof
    elif framework == "tensorrt":
        assert "engine" in handle.proof
    else:
        assert ("nodes on" in handle.proof) or ("all nodes there" in handle.proof)
    handle.close()


def test_two_models_at_once_and_a_third_that_loads_meanwhile(files, framework):
    right = files[1].run_single(IMAGES[:LARGEST])[0]
    handles = [load(files, framework) for _ in range(2)]
    errors: list[float] = []
    stop = threading.Event()

    def work(handle: Handle, n: int) -> None:
        while not stop.is_set():
            errors.append(error(handle.run_single(IMAGES[:n])[0], right[:n]))

    threads = [threading.Thread(target=work, args=(h, n)) for h, n in zip(handles, (7, 64), strict=True)]
    for thread in threads:
        thread.start()
    try:
        third = load(files, framework)
        assert error(third.run_single(IMAGES[:LARGEST])[0], right) <= MOST_ERROR["fp32"]
        third.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert len(errors) > 2
    assert max(errors) <= MOST_ERROR["fp32"]
    for handle in handles:
        handle.close()


def test_batches_at_a_time_share_one_copy_of_the_weights(files, framework):
    handle = load(files, framework)
    if handle.one_at_a_time:
        pytest.skip(f"{framework}: {handle.one_at_a_time}")
    right = files[1].run_single(IMAGES[:LARGEST])[0]
    both = threading.Barrier(2, timeout=60.0)

    def work(n: int) -> float:
        both.wait()
        return max(error(handle.run_single(IMAGES[:n])[0], right[:n]) for _ in range(50))

    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(work, (7, LARGEST)))
    assert max(errors) <= MOST_ERROR["fp32"]
    handle.close()


def test_memory_comes_back(files, framework):
    from services.shell.host.accelerators import cuda_memory_used_mb

    load(files, framework).close()  # the framework's own part stays
    before = cuda_memory_used_mb(DEVICE)
    for _ in range(5):
        handle = load(files, framework)
        assert handle.memory_mb >= 0.0
        handle.close()
    assert cuda_memory_used_mb(DEVICE) < before + 200


def test_a_model_kept_in_host_memory_comes_back_sooner_than_it_loads(files):
    """Paper 001, section 3.4.1: without initialisation, at the speed of the bus."""
    from services.shell.host.accelerators import cuda_memory_used_mb

    load(files, "torch-cuda").close()
    began = time.perf_counter()
    handle = load(files, "torch-cuda")
    load_s = time.perf_counter() - began
    right = files[1].run_single(IMAGES[:LARGEST])[0]
    there = cuda_memory_used_mb(DEVICE)
    transfers = []
    for _ in range(5):
        handle.demote()
        assert handle.memory_mb == 0.0
        assert cuda_memory_used_mb(DEVICE) <= there
        began = time.perf_counter()
        handle.promote()
        transfers.append(time.perf_counter() - began)
        assert error(handle.run_single(IMAGES[:LARGEST])[0], right) <= MOST_ERROR["fp32"]
    print(f"\nload {1e3 * load_s:.1f} ms, from host memory {1e3 * min(transfers):.1f} ms ({handle.host_mb:.1f} MB)")
    assert min(transfers) < load_s / 2
    handle.close()


def test_models_come_and_go_beside_each_other(files):
    """As an executor makes several at a time: none disturbs another one while its graphs are captured."""
    load(files, "torch-cuda").close()  # makes the files
    right = files[1].run_single(IMAGES[:LARGEST])[0]

    def stay(n: int) -> float:
        handle = load(files, "torch-cuda")
        errors = []
        for _ in range(4):
            errors.append(error(handle.run_single(IMAGES[:n])[0], right[:n]))
            assert "CUDA graphs" in handle.proof
            handle.demote()
            handle.promote()
        handle.close()
        return max(errors)

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(stay, (7, LARGEST, 8, 33, 64, 5, 16, 9))) <= MOST_ERROR["fp32"]


def test_each_model_has_a_stream_of_its_own_and_closed_ones_leave_theirs() -> None:
    """Torch itself deals 32 streams: another model's batch would be recorded into the graphs of the 33rd."""
    works("torch-cuda")
    from services.executor.backends.cuda import CudaStream

    streams = [CudaStream(pytest.importorskip("torch"), DEVICE) for _ in range(70)]
    pointers = {one.pointer for one in streams}
    assert len(pointers) == 70
    streams.clear()
    assert CudaStream(pytest.importorskip("torch"), DEVICE).pointer in pointers


def test_an_engine_is_built_once(files, tmp_path):
    works("tensorrt")
    path = tmp_path / "model.onnx"
    path.write_bytes((files[0] / "fp32.onnx").read_bytes())
    spec = LoadSpec(device=DEVICE, max_batch=8, signature=SIGNATURE)
    for said in ("engine built", "engine from the cache"):
        handle = backend("tensorrt").load(path, spec)
        assert said in handle.proof
        handle.close()


def test_there_is_no_device_beyond_the_last(files, framework):
    beyond = f"cuda:{sum(one.kind == 'gpu' for one in accelerators())}"
    with pytest.raises(BackendUnavailable, match=beyond):
        backend(framework).probe(beyond)
    with pytest.raises((BackendUnavailable, LoadFailed)):
        backend(framework).load(files[0] / "fp32.onnx", LoadSpec(device=beyond, signature=SIGNATURE))


def test_what_a_foreign_process_computes_on_the_gpu_is_seen() -> None:
    """A process that is none of ours keeps the GPU busy; the monitor's sample of the machine shows it."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    code = "import torch\nx = torch.randn(4096, 4096, device='cuda:0')\nwhile True: (x @ x).sum().item()"
    edge = MachineEdge(gpus=(DEVICE,))

    def busy() -> float:
        sample: MachineSample = edge.inline(SampleMachine())
        return sample.gpus[DEVICE]

    before = min(busy() for _ in range(5))
    with subprocess.Popen([sys.executable, "-c", code]) as burner:
        try:
            assert eventually(lambda: busy() > max(0.8, before))
        finally:
            burner.kill()


def test_what_is_booked_is_what_the_device_gains(framework, tmp_path):
    """Row 85: of models of 1 to 400 MB, what a load reports is within a tenth of what the device gives away, once batches were computed."""
    from services.shell.host.accelerators import cuda_memory_used_mb
    from tests.live import test_memory as models

    formats = backend(framework).formats
    onnx = "onnx" in formats
    table = {}
    for mb in (0.5, *models.SIZES["ort"][1:]):  # the first brings what the framework keeps for all
        side, path = models.side_of(mb), tmp_path / f"{mb}.{'onnx' if onnx else 'pt2'}"
        rng = np.random.default_rng(0)
        matrices = [rng.normal(size=(side, side)).astype("f4") / side for _ in range(models.layers_of(mb))]
        (models.build_onnx if onnx else models.build_torch)(path, matrices)
        before = cuda_memory_used_mb(DEVICE)
        spec = LoadSpec(
            device=DEVICE, max_batch=models.BATCH, format="onnx" if onnx else "pt2", signature=models.signature(side)
        )
        handle = backend(framework).load(path, spec)
        for _ in range(5):
            handle.run_single(np.ones((models.BATCH, side), "f4"))
        table[mb] = handle.memory_mb, cuda_memory_used_mb(DEVICE) - before
    # Drivers hand memory out in pages of 2 MB.
    wrong = {mb for mb, (booked, gained) in list(table.items())[1:] if abs(booked - gained) > max(4.0, 0.1 * gained)}
    assert not wrong, f"by MB of the model: booked, gained\n{table}"
