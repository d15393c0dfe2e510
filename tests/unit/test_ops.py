"""The stack of ops/ fits together: settings, secrets, names. What it does when it runs is tests/swarm's."""

import contextlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infaas.cli.run import known
from infaas.credentials import FIRST
from services.shell.child import kill_group
from services.shell.settings import load
from tests.support.servers.processes import eventually

yaml = pytest.importorskip("yaml")
OPS = Path(__file__).resolve().parents[2] / "ops"
STACK: dict[str, Any] = yaml.safe_load((OPS / "stack.yml").read_text())
TEXT = (OPS / "stack.yml").read_text()
DEPLOY = (OPS / "deploy.sh").read_text()
OURS = {name: service for name, service in STACK["services"].items() if service.get("command", [""])[0] == "run"}
ONE = re.compile(r"\$\{([A-Z_]+)(?::?-([^}]*)|:\?[^}]*)?\}")


def environment(service: dict[str, Any]) -> dict[str, str]:
    """As its process has it, variables left out and templates filled in."""
    found = {}
    for name, value in service["environment"].items():
        found[name] = ONE.sub(lambda match: match[2] or "", str(value)).replace("{{.Node.Hostname}}", "n1")
    return found


@pytest.mark.parametrize("name", OURS)
def test_the_services_are_known_and_their_variables_are_settings(name: str, tmp_path: Path) -> None:
    service = OURS[name]
    assert service["command"][1] in known()
    variables = environment(service)
    for key in [key for key in variables if key.endswith("_FILE")]:
        secret = tmp_path / Path(variables[key]).name
        secret.write_text("postgresql://x@db/infaas" if "dsn" in secret.name else "secret")
        variables[key] = str(secret)
    config = OPS / "infaas.toml" if "--config" in service["command"] else None
    assert load(config, variables).metrics.port == 9100 or name == "dashboard"


@pytest.mark.parametrize("name", STACK["services"])
def test_every_container_gives_up_what_it_does_not_need(name: str) -> None:
    service = STACK["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert re.fullmatch(r"[1-9]\d*:.+", service["user"])
    assert {"limits", "reservations"} <= set(service["deploy"]["resources"])
    assert service["logging"]["options"]["max-size"]
    bound = [mount["source"] for mount in service.get("volumes", ()) if mount["type"] == "bind"]
    assert bool(bound) == (name == "engine-proxy")
    assert not STACK["services"][name].get("ports") or name == "gateway"


@pytest.mark.parametrize(
    "name", [name for name in STACK["services"] if name not in ("nats", "timescaledb", "prometheus")]
)
def test_what_a_service_reads_is_mounted(name: str) -> None:
    service = STACK["services"][name]
    mounted = {f"/run/secrets/{secret['target']}" for secret in service.get("secrets", ())}
    mounted |= {config["target"] for config in service.get("configs", ())}
    words = [*map(str, service["environment"].values()), *service.get("command", ())]
    assert {word for word in words if word.startswith(("/run/secrets/", "/etc/infaas/"))} <= mounted
    assert {secret["source"] for secret in service.get("secrets", ())} <= set(STACK["secrets"])


@pytest.mark.parametrize(
    ("name", "program", "held"), [("nats", "nats-server", "lock"), ("timescaledb", "docker-entrypoint.sh", ".")]
)
def test_a_server_waits_until_the_one_before_it_has_let_go_of_their_volume(
    name: str, program: str, held: str, tmp_path: Path
) -> None:
    service, volume, bin_ = STACK["services"][name], tmp_path / "volume", tmp_path / "bin"
    mounted = next(mount["target"] for mount in service["volumes"] if mount["type"] == "volume")
    words = [
        word.replace(mounted, str(volume)).replace("$$", "$") for word in service["entrypoint"] + service["command"]
    ]
    started = tmp_path / "started"
    volume.mkdir()
    bin_.mkdir()
    (bin_ / program).write_text(f'#!/bin/sh\necho "$*" >> {started}\nexec sleep 1000\n')
    (bin_ / program).chmod(0o755)

    def begun() -> list[str]:
        return started.read_text().splitlines() if started.exists() else []

    def waits() -> bool:
        inode = f":{(volume / held).stat().st_ino} "
        return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())

    path = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    with contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(words, env=path, start_new_session=True))
            stack.callback(kill_group, process.pid)
            return process

        one = start()
        assert eventually(lambda: len(begun()) == 1)
        start()
        assert eventually(waits)
        assert begun() == [" ".join(service["command"])]
        one.terminate()
        assert eventually(lambda: len(begun()) == 2)


def test_each_role_has_only_its_own_key() -> None:
    users = {"worker-cpu": {"executor", "monitor", "supervisor"}, "worker-gpu": {"executor", "monitor", "supervisor"}}
    for name, service in OURS.items():
        keys = {secret["source"] for secret in service.get("secrets", ())} & set(FIRST)
        assert keys == users.get(name, {name} & set(FIRST)), name


def test_secrets_and_configs_are_named_by_their_content() -> None:
    for kind in ("secrets", "configs"):
        for key, entry in STACK[kind].items():
            variable = f"H_{key.upper().replace('-', '_')}"
            assert f"${{{variable}:-0}}" in entry["name"], key
    computed = subprocess.run(
        ["bash", "-c", f"hash_of() {{ echo H_$1; }}; SECRETS=.; {_hashing()}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(re.findall(r"\$\{(H_[A-Z_]+)", TEXT)) == set(computed)


def _hashing() -> str:
    """The lines of the script that compute hashes."""
    start = DEPLOY.index("hash_of SETTINGS")
    return DEPLOY[start : DEPLOY.index("\n# ----", start)]


def test_every_variable_of_the_stack_is_explained_or_set_by_the_script() -> None:
    example = (OPS / "deploy.env.example").read_text()
    files = [TEXT, *(file.read_text() for file in OPS.glob("stack.*.yml"))]
    for name in {match[1] for text in files for match in ONE.finditer(text)}:
        assert name.startswith("H_") or name in example or name in DEPLOY, name


def test_prometheus_asks_services_that_there_are() -> None:
    page = yaml.safe_load((OPS / "prometheus" / "swarm.yml").read_text())
    names = page["scrape_configs"][0]["dns_sd_configs"][0]["names"]
    with_pages = {name for name, service in OURS.items() if name != "dashboard"}
    assert {name.removeprefix("tasks.") for name in names} == with_pages
    assert all("metrics" in OURS[name]["networks"] for name in with_pages)


def test_only_what_must_reach_out_is_on_a_network_that_does() -> None:
    inner = {name for name, network in STACK["networks"].items() if (network or {}).get("internal")}
    assert set(STACK["networks"]) - inner == {"edge"}
    assert {name for name, service in STACK["services"].items() if "edge" in service["networks"]} == {"gateway", "jobs"}
    assert {name for name, service in STACK["services"].items() if "db" in service["networks"]} == {
        *("timescaledb", "prepare", "registrar", "recorder", "jobs", "dashboard")
    }


def test_nats_servers_have_one_connection_to_each_other() -> None:
    """What a dispatcher asks them and what its executors say then keep their order (bus/natsbehind.py)."""
    assert re.search(r"^  pool_size: -1$", (OPS / "nats" / "cluster.conf").read_text(), re.MULTILINE)


def test_the_scripts_are_bash() -> None:
    for script in OPS.glob("*.sh"):
        assert script.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", script], check=True)
