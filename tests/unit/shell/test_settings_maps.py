"""Settings that are maps, written in a variable; and devices that settings ask for."""

from pathlib import Path

import pytest

from services.shell.machine import devices_of
from services.shell.settings import SettingsError, WorkerSettings, load


def test_a_variable_holds_pairs() -> None:
    settings = load(
        environ={"INFAAS_WORKER__SIMULATE": "gpu=1, inferentia=2", "INFAAS_PRICES__PER_HOUR": "cpu=0.1,gpu=2"}
    )
    assert settings.worker.simulate == {"gpu": 1, "inferentia": 2}
    assert settings.prices.per_hour == {"cpu": 0.1, "gpu": 2.0}


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text("[worker]\nsimulate = { gpu = 3 }\n")
    assert load(file, {}).worker.simulate == {"gpu": 3}
    assert load(file, {"INFAAS_WORKER__SIMULATE": "inferentia=1"}).worker.simulate == {"inferentia": 1}


@pytest.mark.parametrize("text", ["gpu", "gpu:1", "=1", "gpu=", "gpu=x", "gpu=1.5", "gpu=-1", "gpu=1000", "tpu=1"])
def test_nonsense_is_refused_with_the_setting(text: str) -> None:
    with pytest.raises(SettingsError, match=r"worker\.simulate"):
        load(environ={"INFAAS_WORKER__SIMULATE": text})


def test_a_worker_has_its_cpu_and_what_it_simulates() -> None:
    devices = devices_of(WorkerSettings(cores=2, memory_mb=4000, gpus=0, simulate={"gpu": 1}))
    assert [(d.name, d.cores, d.simulated) for d in devices] == [("cpu", 2, False), ("gpu-0", 1, True)]
    assert len(devices_of(WorkerSettings(cores=2, gpus=0))) == 1
