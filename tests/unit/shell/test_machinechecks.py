"""Settings of machines that are others than this one: what is refused, and what becomes of what is right."""

from pathlib import Path

import pytest

from services.autoscaler.vms.__main__ import kinds_of
from services.shell.machinechecks import words
from services.shell.sections import listed
from services.shell.settings import Settings, SettingsError, load

KIND = "[machines.kinds.cpu]\nmaximum = 2\ncores = 4\nmemory_mb = 8000\n"
SWARM = "[machines]\nprovider = 'swarm'\n[machines.swarm]\nhosts = ['tcp://engine-proxy:2375']\n"


def loaded(text: str, tmp_path: Path) -> Settings:
    file = tmp_path / "infaas.toml"
    file.write_text(text)
    return load(file, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[machines]\nprovider = 'swarm'", r"machines\.swarm\.hosts: must name the Docker API of at least one manager"),
        ("[machines.swarm]\nhosts = ['manager']", r"machines\.swarm\.hosts: must be addresses as tcp://engine-proxy:2375"),
        ("[machines.swarm]\nhosts = ['ssh://a']", r"machines\.swarm\.hosts: must be addresses as"),
        ("[machines.swarm]\ntimeout_s = 0", r"machines\.swarm\.timeout_s: must be at least 0.1"),
        ("[machines.swarm]\nadd = ['a']", r"machines\.swarm\.remove: must be a command, too.*what is bought must be given back"),
        ("[machines.swarm]\nremove = ['a']", r"machines\.swarm\.add: must be a command, too.*nothing to remove"),
        ("[machines.swarm]\nadd = 'a \"b'\nremove = 'a'", r"machines\.swarm\.add: cannot be split .*: no closing quotation"),
        ("[machines]\nprovider = 'command'", r"machines\.command\.add: must be the command that starts a machine"),
        ("[machines.command]\nadd = ['a']", r"machines\.command\.remove: must be a command, too"),
        (f"{SWARM}[machines.kinds.cpu]\nmemory_mb = 1", r"machines\.kinds\.cpu\.cores: must be said with machines.provider swarm"),
        (f"{SWARM}[machines.kinds.cpu]\ncores = 1", r"machines\.kinds\.cpu\.memory_mb: must be said"),
        (f"{KIND}accelerators = {{ gpu = 1 }}", r"machines\.kinds\.cpu\.accelerators: is for machines of the providers swarm and"),
        (f"{SWARM}{KIND}accelerators = {{ tpu = 1 }}", r"accelerators\.tpu: the name must be a kind of accelerator"),
        (f"{SWARM}{KIND}accelerators = {{ gpu = 99 }}", r"accelerators\.gpu: must be at least 0 and at most 16, not 99"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        loaded(text, tmp_path)


def test_a_kind_of_machine_elsewhere_has_what_is_said_of_it(tmp_path: Path) -> None:
    gpu = "[machines.kinds.gpu]\nmaximum = 1\ncores = 8\nmemory_mb = 32000\nboot_s = 90\naccelerators = { gpu = 2 }\n"
    kinds = kinds_of(loaded(f"{SWARM}{KIND}{gpu}accelerator_mb = 80000\n", tmp_path))
    assert [(d.name, d.kind, d.cores, d.memory_mb, d.simulated) for d in kinds["gpu"].devices] == [
        ("cpu", "cpu", 8, 32000.0, False),
        ("gpu-0", "gpu", 1, 80000.0, False),
        ("gpu-1", "gpu", 1, 80000.0, False),
    ]
    assert kinds["gpu"].boot_s == 90.0
    assert kinds["gpu"].price_per_hour == pytest.approx(8 * 0.048 + 2 * 3.06)
    assert [(d.kind, d.cores) for d in kinds["cpu"].devices] == [("cpu", 4)]
    [*_, usual] = kinds_of(loaded(f"{SWARM}{gpu}", tmp_path))["gpu"].devices
    assert usual.memory_mb == 16384.0


def test_variables_may_say_all_of_it() -> None:
    environ = {
        "INFAAS_MACHINES__PROVIDER": "swarm",
        "INFAAS_MACHINES__SWARM__HOSTS": "tcp://a:2375, unix:///run/docker.sock",
        "INFAAS_MACHINES__SWARM__ADD": "/opt/machine 'a b' on",
        "INFAAS_MACHINES__SWARM__REMOVE": "/opt/machine off",
        "INFAAS_MACHINES__SWARM__DRY_RUN": "true",
        "INFAAS_MACHINES__KINDS__GPU__CORES": "4",
        "INFAAS_MACHINES__KINDS__GPU__MEMORY_MB": "8000",
        "INFAAS_MACHINES__KINDS__GPU__ACCELERATORS": "gpu=1",
    }
    found = load(environ=environ).machines
    assert listed(found.swarm.hosts) == ("tcp://a:2375", "unix:///run/docker.sock")
    assert words(found.swarm.add) == ("/opt/machine", "a b", "on")
    assert found.swarm.dry_run
    assert found.kinds["gpu"].accelerators == {"gpu": 1}


def test_what_concerns_another_provider_is_left_alone(tmp_path: Path) -> None:
    assert loaded("[machines.swarm]\nhosts = ['tcp://a:1']\n[machines.kinds.a]\nmaximum = 1", tmp_path).machines.kinds
