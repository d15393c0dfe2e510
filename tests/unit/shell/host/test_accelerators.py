"""Which GPUs a worker gets, and what it is told when there are none."""

import pytest

from services.core.settings import WorkerSettings
from services.shell.host.accelerators import (
    Accelerator,
    DriverError,
    accelerators,
    cuda_device,
    processor_of,
    visible,
    why_no_gpu,
)
from services.shell.host.machine import devices_of
from services.shell.settings import SettingsError, load

GPUS = [
    Accelerator(address=f"cuda:{n}", kind="gpu", name="NVIDIA T4", memory_mb=15360.0, uuid=f"GPU-{letter}{letter}1")
    for n, letter in enumerate("abc")
]


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [
        (None, ["GPU-aa1", "GPU-bb1", "GPU-cc1"]),
        ("", []),
        ("2,0", ["GPU-cc1", "GPU-aa1"]),
        (" GPU-b , 0", ["GPU-bb1", "GPU-aa1"]),
        ("1,7,0", ["GPU-bb1"]),
        ("-1", []),
        ("1,1", ["GPU-bb1"]),
        ("GPU-", []),
    ],
)
def test_the_visible_ones_are_renumbered_as_cuda_does(chosen, uuids):
    left = visible(GPUS, chosen)
    assert [one.uuid for one in left] == uuids
    assert [one.address for one in left] == [f"cuda:{n}" for n in range(len(uuids))]


def test_devices_have_address_memory_and_the_settings_number() -> None:
    cpu, *devices = devices_of(WorkerSettings(cores=2), GPUS[:2])
    assert (cpu.name, cpu.address) == ("cpu", "cpu")
    assert [(d.name, d.kind, d.address, d.cores, d.memory_mb, d.simulated) for d in devices] == [
        ("gpu-0", "gpu", "cuda:0", 1, 15360.0, False),
        ("gpu-1", "gpu", "cuda:1", 1, 15360.0, False),
    ]
    assert [d.name for d in devices_of(WorkerSettings(cores=2, gpus=1), GPUS)] == ["cpu", "gpu-0"]
    assert [d.name for d in devices_of(WorkerSettings(cores=2, gpus=0), GPUS)] == ["cpu"]
    with pytest.raises(SettingsError, match=r"worker\.gpus is 4, but 3 GPUs"):
        devices_of(WorkerSettings(cores=2, gpus=4), GPUS)


def test_simulated_devices_go_on_counting_after_the_real_ones():
    devices = devices_of(WorkerSettings(cores=2, simulate={"gpu": 2, "inferentia": 1}), GPUS[:1])
    assert [(d.name, d.simulated) for d in devices[1:]] == [
        ("gpu-0", False),
        ("gpu-1", True),
        ("gpu-2", True),
        ("inferentia-0", True),
    ]


@pytest.mark.parametrize(("text", "gpus"), [("auto", "auto"), ("0", 0), ("3", 3)])
def test_the_setting_comes_from_the_environment_too(text, gpus):
    assert load(None, {"INFAAS_WORKER__GPUS": text}).worker.gpus == gpus


@pytest.mark.parametrize("text", ["-1", "all"])
def test_nonsense_is_refused_with_the_setting(text):
    with pytest.raises(SettingsError, match="gpus"):
        load(None, {"INFAAS_WORKER__GPUS": text})


def test_a_machine_without_a_driver_says_so():
    if any(one.kind == "gpu" for one in accelerators()):
        pytest.skip("this machine has a GPU")
    assert why_no_gpu()
    with pytest.raises(DriverError, match=r"driver|GPU"):
        cuda_device("cuda:0")


# -- How a processor adds small integers, from what Linux says of it.


@pytest.mark.parametrize(
    ("flags", "machine", "isa", "arithmetic"),
    [
        ("fpu sse2 avx2", "x86_64", "avx2", "saturating"),
        ("avx2 avx512f avx512bw", "x86_64", "avx512f", "saturating"),
        ("avx2 avx512f avx512_vnni", "x86_64", "avx512_vnni", "exact"),
        ("avx2 avx_vnni", "x86_64", "avx_vnni", "exact"),
        ("asimd asimddp", "aarch64", "asimddp", "exact"),
    ],
)
def test_without_vnni_an_x86_saturates(flags: str, machine: str, isa: str, arithmetic: str) -> None:
    name = "Features" if machine == "aarch64" else "flags"
    found = processor_of(f"processor : 0\nmodel name : A Chip\n{name} : {flags}\n\nflags : other\n", machine)
    assert (found.model, found.isa, found.arithmetic) == ("A Chip", isa, arithmetic)


def test_a_silent_system_is_not_taken_for_an_exact_one() -> None:
    assert processor_of("", "x86_64").arithmetic == "saturating"
