"""What the Neuron backend decides without a chip."""

import pytest

from services.executor.backends import backend
from services.executor.backends.base import BackendUnavailable, LoadFailed, LoadSpec
from services.executor.backends.neuron import core_of, program_key
from services.shell.host.accelerators import Accelerator, DriverError, neuron_devices


def test_programs_are_kept_by_artifact_compiler_and_bucket():
    keys = {program_key(d * 64, c, n) for d in "ab" for c in ("2.15", "2.16") for n in (1, 8)}
    assert len(keys) == 8
    assert all("/" not in key and key.startswith(("aaaaaaaaaaaa-b", "bbbbbbbbbbbb-b")) for key in keys)


def test_models_take_the_cores_of_their_chip_in_turn():
    chip = Accelerator(address="neuron:2", kind="inferentia", name="n", memory_mb=8192.0, cores=4)
    cores = [core_of(chip) for _ in range(8)]
    assert sorted(cores[:4]) == sorted(cores[4:]) == [8, 9, 10, 11]


def test_without_a_chip_it_says_what_is_missing(tmp_path):
    try:
        neuron_devices()
    except DriverError as error:
        reason = str(error)
    else:
        pytest.skip("this machine has a Neuron device")
    with pytest.raises(BackendUnavailable) as refused:
        backend("neuron").load(tmp_path / "x", LoadSpec(device="neuron:0", format="pt2"))
    assert str(refused.value) == reason
    with pytest.raises(LoadFailed, match="onnx"):
        backend("neuron").load(tmp_path / "x", LoadSpec(device="neuron:0", format="onnx"))
    with pytest.raises(BackendUnavailable, match="neuron:0"):
        backend("neuron").probe("cuda:0")
