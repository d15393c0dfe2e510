"""Nonsense in settings is refused at start, with file or variable, setting, reason and remedy; every setting has a rule."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.shell.budget import check_budget, least_per_hour, place_of
from services.shell.checks import RULES, Number, faults, leaves
from services.shell.prices import load_prices
from services.shell.sections import listed
from services.shell.settings import PriceSettings, Settings, SettingsError, load
from tests.support.servers.processes import infaas


def patterns(kind: Any, key: str = "") -> list[tuple[str, bool]]:
    """All settings there may be, names in maps written *; and whether each is a number."""
    if isinstance(kind, msgspec.inspect.StructType):
        return [found for field in kind.fields for found in patterns(field.type, f"{key}.{field.name}".lstrip("."))]
    if isinstance(kind, msgspec.inspect.DictType):
        return patterns(kind.value_type, f"{key}.*")
    alternatives = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    kinds = [of.item_type if isinstance(of, msgspec.inspect.VarTupleType) else of for of in alternatives]
    return [(key, any(isinstance(of, msgspec.inspect.IntType | msgspec.inspect.FloatType) for of in kinds))]


ALL = patterns(msgspec.inspect.type_info(Settings))


@pytest.mark.parametrize(("key", "number"), ALL)
def test_every_setting_has_a_rule(key: str, number: bool) -> None:
    """A new setting needs a line in services/shell/checks.py."""
    assert key in RULES
    assert isinstance(RULES[key], Number) or not number


def test_no_rule_is_left_over() -> None:
    assert set(RULES) == {key for key, _ in ALL}


def test_defaults_are_right() -> None:
    assert list(faults(Settings())) == []
    assert {pattern for _, pattern, _ in leaves(Settings())} <= set(RULES)


@pytest.mark.parametrize("key", [key for key, number in ALL if number])
@pytest.mark.parametrize("value", ["-1", "-1e300", "1e300", "1" + "0" * 400, "nan", "inf"])
def test_no_number_may_be_nonsense(key: str, value: str, tmp_path: Path) -> None:
    *above, name = (
        key.replace("simulate.*", "simulate.gpu")
        .replace("accelerators.*", "accelerators.gpu")
        .replace("per_hour.*", "per_hour.gpu")
        .split(".")
    )
    table = ".".join(above).replace("*", "some")
    file = tmp_path / "infaas.toml"
    listed = f"[{value}]" if key in ("registrar.threads", "registrar.max_batches") else value
    needed = "variant = 'v'" if table.startswith("autoscaler.choice") else ""
    file.write_text(f"[{table}]\n{needed}\n{name} = {listed}\n")
    with pytest.raises(
        SettingsError,
        match=f"^{re.escape(str(file))}: {re.escape(table)}.{name}: (must be|expected|number out of range)",
    ):
        load(file, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[monitor]\nsample_s = 0", "monitor.sample_s: must be above 0 and at most 3600, not 0; left out, it is 2"),
        ("[monitor]\noverloaded_slo_share = 1.5", "monitor.overloaded_slo_share: must be above 0 and at most 1, not 1.5"),
        ("[monitor]\ninterfered_ratio = 0.9", "monitor.interfered_ratio: must be 0 (by hardware), or above 1"),
        ("[monitor]\ninterfered_ratio = 2\nclear_ratio = 2", "monitor.clear_ratio: must be below monitor.interfered_ratio"),
        ("[autoscaler]\npolicy = 'clever'", "autoscaler.policy: must be infaas or "),
        ("[autoscaler]\nsolver = 'gurobi'", "autoscaler.solver: must be greedy or ilp, not 'gurobi'"),
        ("[autoscaler]\nobjective = 'least'", "autoscaler.objective: must be additive or multiplicative"),
        ("[autoscaler]\nslack = 0", "autoscaler.slack: must be above 0"),
        ("[autoscaler]\nbudget_per_hour = -1", "autoscaler.budget_per_hour: must be at least 0 (0: no limit) and at most 1e+09, not -1"),
        ("[autoscaler]\nslak = 1", "autoscaler.slak: there is no such setting; did you mean slack?"),
        ("[autoscaler.choice.a]\ninstances = 1", "autoscaler.choice.a.variant: is missing"),
        ("[autoscaler.choice.a]\nvariant = 'a b'", "autoscaler.choice.a.variant: must be 1 to 64 letters, digits"),
        ("[machines]\nprovider = 'aws'", "machines.provider: must be command or local or off or simulated or swarm, not 'aws'"),
        ("[machines]\nlease_s = 0", "machines.lease_s: must be at least 0.2"),
        ("[machines.kinds.a]\nminimum = 2\nmaximum = 1", "machines.kinds.a.minimum: must be at most machines.kinds.a.maximum (1)"),
        ("[machines.kinds.'a b']\nmaximum = 1", "machines.kinds.a b: the name must be 1 to 64 letters"),
        ("[machines.kinds.a]\nsimulate = { tpu = 1 }", "machines.kinds.a.simulate.tpu: the name must be a kind that can be"),
        ("[prices]\nper_hour = { gpu = 'much' }", "prices.per_hour.gpu: expected a number, got text"),
        ("[dispatcher]\npolicy = 'best'", "dispatcher.policy: must be infaas, round-robin, brute-force or module:Class"),
        ("[dispatcher]\ndispatch = 'random'", "dispatcher.dispatch: must be auto, spread or pack, not 'random'"),
        ("[dispatcher]\nmax_inline = 8388608", "dispatcher.max_inline: must be below bus.max_payload"),
        ("[dispatcher]\ncount = 1.5", "dispatcher.count: expected a whole number, got a number"),
        ("[dispatcher]\ncount = true", "dispatcher.count: expected a whole number, got true or false"),
        ("[monitor]\nheartbeat_s = 2", "dispatcher.failure_timeout_s: must be above monitor.heartbeat_s (2), not 2"),
        ("[jobs]\nchunk_kb = 65536", "jobs.chunk_kb: must be below bus.max_payload"),
        ("[registrar]\nthreads = []", "registrar.threads: must name at least one number"),
        ("[worker]\ngpus = 'some'", "worker.gpus: must be a whole number or auto, not 'some'"),
        ("[worker]\nname = 'a.b'", "worker.name: must be empty, or 1 to 64 letters"),
        ("dispatcher = 3", "dispatcher: expected a table, got a whole number"),
        ("prefix = 'a.>'", "prefix: must be 1 to 64 letters"),
        ("log_level = 'LOUD'", "log_level: must be DEBUG, INFO"),
        ("[montor]\nsample_s = 1", "montor: there is no such setting; did you mean monitor?"),
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
        ("INFAAS_MONITOR__SAMPLE_S", "soon", "(monitor.sample_s): expected a number, got text; left out, it is 2"),
        ("INFAAS_MONITOR__SAMPLE", "1", "(monitor.sample): there is no such setting; did you mean sample_s?"),
        ("INFAAS_MONTOR__SAMPLE_S", "1", "(montor): there is no such setting; did you mean monitor?"),
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


def test_a_host_to_register_from_may_come_with_its_address() -> None:
    """As docs/rest.md has it."""
    named = load(None, {"INFAAS_GATEWAY__REGISTER_HOSTS": "models.example.org, store.internal=10.1.2.3, [::1]:8080"})
    assert listed(named.gateway.register_hosts) == ("models.example.org", "store.internal=10.1.2.3", "[::1]:8080")


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
    assert load_prices(PriceSettings(per_hour={"tpu": 2.0, "gpu": 1.0}))["tpu"] == 2.0
    assert caplog.text == ""
    load_prices(PriceSettings(per_hour={"inferenta": 2.0}))
    assert "did you mean inferentia? (known: cpu, gpu, inferentia)" in caplog.text


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
