"""Nonsense in settings is refused at start, with file or variable, setting, reason and remedy; every setting says what it means."""

import re
from pathlib import Path

import pytest

from bus.fields import faults
from bus.subjects import Subjects
from services.autoscaler.vms.__main__ import kinds_of
from services.autoscaler.vms.actor import make_controller
from services.core.settings import PriceSettings, Settings, WorkerSettings, described, listed, words
from services.shell.host.machine import devices_of
from services.shell.policies import load_policy
from services.shell.prices import check_budget, least_per_hour, load_prices, place_of
from services.shell.settings import SettingsError, deciding, load
from tests.support.servers.processes import infaas

ALL = list(described(Settings))
NUMBERS = [f"{one.key}.gpu" if one.kind.startswith("map") else one.key for one in ALL if "number" in one.kind]


def test_every_setting_has_a_meaning_bounds_and_a_right_default() -> None:
    assert len({one.key for one in ALL}) == len(ALL)
    for one in ALL:
        assert one.meaning.endswith("."), one.key
        assert one.bounds or "number" not in one.kind, one.key
    assert list(faults(Settings())) == []


@pytest.mark.parametrize("value", ["-1", "-1e300", "1e300", "1" + "0" * 400, "nan", "inf"])
def test_no_number_may_be_nonsense(value: str, tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    for key in NUMBERS:
        table, _, name = key.rpartition(".")
        written = f"[{value}]" if key in ("registrar.threads", "registrar.max_batches") else value
        needed = "variant = 'v'" if table.startswith("autoscaler.choice") else ""
        file.write_text(f"[{table}]\n{needed}\n{name} = {written}\n")
        with pytest.raises(
            SettingsError,
            match=f"^{re.escape(str(file))}: {re.escape(table)}.{name}(\\[0\\])?: must be",
        ):
            load(file, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[executor]\nremote_hosts = ["http://a.test"]\n', "executor.remote_hosts[0]: must be names or addresses of hosts"),
        ('[executor]\nremote_hosts = ["a.test:x"]\n', "executor.remote_hosts: 'a.test:x': 'x' is no port"),
        ("[monitor]\nsample_s = 0", "monitor.sample_s: must be above 0 and at most 3600, not 0; left out, it is 2"),
        ("[monitor]\noverloaded_slo_share = 1.5", "monitor.overloaded_slo_share: must be above 0 and at most 1, not 1.5"),
        ("[monitor]\ninterfered_ratio = 0.9", "monitor.interfered_ratio: must be 0 (by hardware), or above 1"),
        ("[monitor]\ninterfered_ratio = 2\nclear_ratio = 2", "monitor.clear_ratio: must be below monitor.interfered_ratio"),
        ("[autoscaler]\npolicy = 'clever'", "autoscaler.policy: must be infaas, replicate, static, off or module:Class"),
        ("[autoscaler]\nslo_target = 1", "autoscaler.slo_target: must be above 0 and below 1, not 1; left out, it is 0.99"),
        ("[autoscaler]\nslo_target = 0.0", "autoscaler.slo_target: must be above 0 and below 1, not 0"),
        ("[autoscaler]\nslo_target = 1.5", "autoscaler.slo_target: must be above 0 and below 1, not 1.5"),
        ("[autoscaler]\nslo_target = nan", "autoscaler.slo_target: must be above 0 and below 1, not nan"),
        ("[autoscaler]\nslack = 0", "autoscaler.slack: must be above 0"),
        ("[autoscaler]\nbudget_per_hour = -1", "autoscaler.budget_per_hour: must be at least 0 (0: no limit) and at most 1e+09, not -1"),
        ("[autoscaler]\nslak = 1", "autoscaler.slak: there is no such key; did you mean slack?"),
        ("[autoscaler.choice.a]\ninstances = 1", "autoscaler.choice.a.variant: is missing"),
        ("[autoscaler.choice.a]\nvariant = 'a b'", "autoscaler.choice.a.variant: must be 1 to 64 letters, digits"),
        ("[machines]\nprovider = 'aws'", "machines.provider: there is no provider 'aws'; there are command, local, off, simulated, swarm; left out, it is local"),
        ("[machines]\nlease_s = 0", "machines.lease_s: must be at least 0.2"),
        ("[machines.kinds.a]\nminimum = 2\nmaximum = 1", "machines.kinds.a.minimum: must be at most machines.kinds.a.maximum (1)"),
        ("[machines.kinds.'a b']\nmaximum = 1", "machines.kinds.'a b': the name must be 1 to 64 letters"),
        ("[machines.kinds.a]\nsimulate = { tpu = 1 }", "machines.kinds.a.simulate.tpu: the name must be a kind that can be"),
        ("[prices]\nper_hour = { gpu = 'much' }", "prices.per_hour.gpu: must be a number, not 'much'"),
        ("[dispatcher]\npolicy = 'best'", "dispatcher.policy: must be infaas, round-robin, brute-force or module:Class"),
        ("[dispatcher]\ndispatch = 'random'", "dispatcher.dispatch: must be auto, spread or pack, not 'random'"),
        ("[dispatcher]\nmax_inline = 8388608", "dispatcher.max_inline: must be below bus.max_payload"),
        ("[dispatcher]\ncount = 1.5", "dispatcher.count: must be a whole number, not 1.5"),
        ("[dispatcher]\ncount = true", "dispatcher.count: must be a whole number, not true"),
        ("[monitor]\nheartbeat_s = 2", "dispatcher.failure_timeout_s: must be above monitor.heartbeat_s (2), not 2"),
        ("[jobs]\nchunk_kb = 65536", "jobs.chunk_kb: must be below bus.max_payload"),
        ("[registrar]\nthreads = []", "registrar.threads: must name at least one number"),
        ("[worker]\ngpus = 'some'", "worker.gpus: must be a whole number or auto, not 'some'"),
        ("[worker]\nname = 'a.b'", "worker.name: must be empty, or 1 to 64 letters"),
        ("dispatcher = 3", "dispatcher: must be a table, not 3"),
        ("prefix = 'a.>'", "prefix: must be 1 to 64 letters"),
        ("log_level = 'LOUD'", "log_level: must be DEBUG, INFO"),
        ("[montor]\nsample_s = 1", "montor: there is no such key; did you mean monitor?"),
    ],
)  # fmt: skip
def test_a_file_is_refused_with_place_reason_and_remedy(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=f"^{re.escape(str(file))}: .*{re.escape(said)}"):
        load(file, {})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("INFAAS_MONITOR__SAMPLE_S", "nan", "(monitor.sample_s): must be above 0"),
        ("INFAAS_MONITOR__SAMPLE_S", "soon", "(monitor.sample_s): must be a number, not 'soon'; left out, it is 2"),
        ("INFAAS_MONITOR__SAMPLE", "1", "(monitor.sample): there is no such key; did you mean sample_s?"),
        ("INFAAS_MONTOR__SAMPLE_S", "1", "(montor): there is no such key; did you mean monitor?"),
        ("INFAAS_PRICES__PER_HOUR", "gpu=-1", "(prices.per_hour.gpu): must be at least 0 and at most 1e+09, not -1"),
        ("INFAAS_PRICES__PER_HOUR", "gpu", ": prices.per_hour must be written kind=number"),
        ("INFAAS_LOG_LEVEL", "LOUD", "(log_level): must be DEBUG"),
        ("INFAAS_STORE__DSN_FILE", "/nowhere/dsn", ": cannot read the file of store.dsn_file: No such file"),
        (
            "INFAAS_MACHINES__KINDS__BIG__MINIMUM",
            "2",
            "(machines.kinds.big.minimum): must be at most machines.kinds.big",
        ),
    ],
)
def test_a_variable_is_named(name: str, value: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text("[monitor]\nheartbeat_s = 1\n")
    with pytest.raises(SettingsError, match=f"^{name}.*{re.escape(said)}"):
        load(file, {name: value})


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text("log_level = 'LOUD'\n[montor]\na = 1\n[monitor]\nsample_s = 'soon'\nsampl = 3\n")
    done = infaas("up", "--data-dir", str(tmp_path / "data"), "--config", str(file), INFAAS_JOBS__CHUNK_KB="0")
    assert done.returncode == 2
    told = {
        re.search(r"(montor|monitor\.\w+|log_level|jobs\.chunk_kb)\)?: ", line)[1] for line in done.stderr.splitlines()
    }  # type: ignore[index]
    assert told == {"montor", "monitor.sample_s", "monitor.sampl", "log_level", "jobs.chunk_kb"}
    assert len(done.stderr.splitlines()) == len(told)


def test_variables_hold_pairs_and_hosts_and_win_over_the_file(tmp_path: Path) -> None:
    """As docs/rest.md has it."""
    named = load(None, {"INFAAS_GATEWAY__REGISTER_HOSTS": "models.example.org, store.internal=10.1.2.3, [::1]:8080"})
    assert listed(named.gateway.register_hosts) == ("models.example.org", "store.internal=10.1.2.3", "[::1]:8080")
    settings = load(
        environ={"INFAAS_WORKER__SIMULATE": "gpu=1, inferentia=2", "INFAAS_PRICES__PER_HOUR": "cpu=0.1,gpu=2"}
    )
    assert settings.worker.simulate == {"gpu": 1, "inferentia": 2}
    assert settings.prices.per_hour == {"cpu": 0.1, "gpu": 2.0}
    file = tmp_path / "infaas.toml"
    file.write_text("[worker]\nsimulate = { gpu = 3 }\n")
    assert load(file, {}).worker.simulate == {"gpu": 3}
    assert load(file, {"INFAAS_WORKER__SIMULATE": "inferentia=1"}).worker.simulate == {"inferentia": 1}


def test_a_budget_pays_for_the_workers_that_must_run() -> None:
    """cpu: 0.048 US$/h a core; gpu: 3.06 a device."""
    environ = {
        "INFAAS_WORKER__CORES": "2",
        "INFAAS_WORKER__GPUS": "0",
        "INFAAS_MACHINES__KINDS__BIG__MINIMUM": "1",
        "INFAAS_MACHINES__KINDS__BIG__MAXIMUM": "3",
        "INFAAS_MACHINES__KINDS__BIG__SIMULATE": "gpu=1",
    }
    assert least_per_hour(load(environ=environ), 2) == pytest.approx(3 * 0.096 + 3.06)
    check_budget(load(environ=environ), 2)  # no budget
    check_budget(load(environ={**environ, "INFAAS_AUTOSCALER__BUDGET_PER_HOUR": "3.35"}), 2)
    with pytest.raises(SettingsError, match=r"budget_per_hour: 3 US\$/h does not pay for .* they cost 3.348; raise it"):
        check_budget(load(environ={**environ, "INFAAS_AUTOSCALER__BUDGET_PER_HOUR": "3"}), 2)
    place = place_of(Path("a.toml"), {})
    with pytest.raises(SettingsError, match=r"^a\.toml: autoscaler\.budget_per_hour: 3 US\$/h does not pay"):
        check_budget(load(environ={**environ, "INFAAS_AUTOSCALER__BUDGET_PER_HOUR": "3"}), 2, place)
    variable = "INFAAS_AUTOSCALER__BUDGET_PER_HOUR"
    assert place_of(Path("a.toml"), {variable: "3"}) == f"{variable} (autoscaler.budget_per_hour)"


def test_a_price_of_unknown_hardware_is_legal_and_a_likely_typo_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match=r"prices\.per_hour\.cpu must be a price in US\$ of at least 0, not -1"):
        load_prices(PriceSettings(per_hour={"cpu": -1.0}))
    assert load_prices(PriceSettings(per_hour={"tpu": 2.0, "gpu": 1.0}))["tpu"] == 2.0
    assert caplog.text == ""
    load_prices(PriceSettings(per_hour={"inferenta": 2.0}))
    assert "did you mean inferentia? (known: cpu, gpu, inferentia, remote)" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[monitor]\nsample_s = -1\n", "monitor.sample_s: must be above 0"),
        ("[autoscaler]\nbudget_per_hour = 0.0001\n", "autoscaler.budget_per_hour: 0.0001 US$/h does not pay"),
    ],
)
def test_up_does_not_start(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text(text)
    done = infaas("up", "--config", str(file), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


# ---- maps in variables, and the devices that settings ask for


@pytest.mark.parametrize("text", ["gpu", "gpu:1", "=1", "gpu=", "gpu=x", "gpu=1.5", "gpu=-1", "gpu=1000", "tpu=1"])
def test_nonsense_is_refused_with_the_setting(text: str) -> None:
    with pytest.raises(SettingsError, match=r"worker\.simulate"):
        load(environ={"INFAAS_WORKER__SIMULATE": text})


def test_workers_have_cpus_and_other_providers_are_left_alone(tmp_path: Path) -> None:
    devices = devices_of(WorkerSettings(cores=2, memory_mb=4000, gpus=0, simulate={"gpu": 1}))
    assert [(d.name, d.cores, d.simulated) for d in devices] == [("cpu", 2, False), ("gpu-0", 1, True)]
    assert len(devices_of(WorkerSettings(cores=2, gpus=0))) == 1
    assert loaded("[machines.swarm]\nhosts = ['tcp://a:1']\n[machines.kinds.a]\nmaximum = 1", tmp_path).machines.kinds


# ---- machines elsewhere

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
        ("[machines.swarm]\nhosts = ['manager']", r"machines\.swarm\.hosts\[0\]: must be addresses as tcp://engine-proxy:2375"),
        ("[machines.swarm]\nhosts = ['ssh://a']", r"machines\.swarm\.hosts\[0\]: must be addresses as"),
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


# ---- the goal: dispatchers and model-autoscalers read the same setting


def test_goals_come_from_file_or_variable_and_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "infaas.toml").write_text('goal = "accuracy"\n')
    assert load(environ={}).goal == "cost"
    for settings in (load(tmp_path / "infaas.toml", {}), load(environ={"INFAAS_GOAL": "accuracy"})):
        assert settings.goal == make_controller(settings, Subjects(), "vm-0", {})._planner.problems.goal == "accuracy"
        policy = load_policy(settings)
        assert getattr(policy, "goal") == "accuracy"  # noqa: B009  (not every policy has one)
    with pytest.raises(SettingsError, match=r"INFAAS_GOAL.*goal"):
        load(environ={"INFAAS_GOAL": "speed"})


def test_the_deciding_settings_hold_no_credentials() -> None:
    secret = "SUAKEPT"
    settings = load(
        environ={
            "INFAAS_BUS__NKEY_SEED": secret,
            "INFAAS_WORKER__EXECUTOR_NKEY": secret,
            "INFAAS_WORKER__MONITOR_NKEY": secret,
            "INFAAS_WORKER__KIND": "big",
        }
    )
    assert settings.worker.monitor_nkey == secret
    found = deciding(settings)
    assert found["worker"]["kind"] == "big"
    assert secret not in repr(found)


def test_a_refusal_shows_no_credentials(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[bus]\nnkey_seed = 815\nurl = ["nats://me:815@here"]\n[store]\ndsn = ["815"]\n')
    with pytest.raises(SettingsError) as refused:
        load(file, {})
    assert "815" not in str(refused.value)
    assert [line.split(": ")[1] for line in str(refused.value).splitlines()] == [
        "bus.nkey_seed",
        "bus.url",
        "store.dsn",
    ]
