"""The stack's files by themselves, without Docker: what `docker stack` would drop silently, and what would only fail when deployed."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infaas.cli.run import known
from services.shell.settings import load
from tests.support.servers.processes import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is missing: the extra dev")

OPS = ROOT / "ops"
STACK: dict[str, Any] = yaml.safe_load((OPS / "stack.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
OVERLAYS = sorted(path for path in OPS.glob("stack.*.yml"))
# `docker stack deploy` leaves these out, the first two without a word.
DROPPED = {
    "tmpfs", "depends_on", "security_opt", "shm_size", "privileged", "devices", "ipc", "restart", "container_name", "build",
    "group_add", "dns_opt", "pids_limit", "mem_limit", "cpus", "links", "network_mode", "userns_mode", "cgroup_parent",
}  # fmt: skip
JOBS = {name for name, service in SERVICES.items() if "job" in service["deploy"].get("mode", "")}
# Prometheus' image comes with what it needs to tell that it runs, and nothing here waits for it.
UNCHECKED = JOBS | {"prometheus"}
each = pytest.mark.parametrize("name", SERVICES)


def references(service: dict[str, Any], kind: str) -> Iterator[str]:
    for entry in service.get(kind, []):
        yield entry["source"] if isinstance(entry, dict) else entry


@each
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    user = str(service["user"]).partition(":")[0]
    assert user.isdecimal(), "a user by number: the image need not know its name"
    assert int(user) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    binds = [volume["source"] for volume in service.get("volumes", []) if volume["type"] == "bind"]
    assert not binds or name == "engine-proxy", "nothing but the proxy sees a file of the machine"


@each
def test_a_service_is_limited_watched_and_updated_with_care(name: str) -> None:
    service, deploy = SERVICES[name], SERVICES[name]["deploy"]
    assert {"memory", "pids"} <= set(deploy["resources"]["limits"])
    assert "memory" in deploy["resources"]["reservations"]
    assert service["logging"]["options"]["max-size"], "logs do not fill the disk"
    if name not in UNCHECKED:
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    if name not in JOBS:
        assert deploy["update_config"]["failure_action"] in {"rollback", "pause"}
        assert deploy["update_config"]["parallelism"] == 1
        assert "rollback_config" in deploy


@each
def test_a_service_needs_no_virtual_ip_and_publishes_ports_of_its_machine_only(name: str) -> None:
    service = SERVICES[name]
    if name not in JOBS:
        assert service["deploy"]["endpoint_mode"] == "dnsrr"
    for port in service.get("ports", []):
        assert port["mode"] == "host"
        assert "edge" in service["networks"], "a task on internal networks alone is refused at its port"
        assert service["deploy"]["update_config"]["order"] == "stop-first", "two tasks cannot have the same port"


@each
def test_nothing_that_stack_files_drop_is_relied_on(name: str) -> None:
    service = SERVICES[name]
    assert not DROPPED & set(service)
    assert "devices" not in service["deploy"]["resources"].get("reservations", {})
    assert all(isinstance(volume, dict) for volume in service.get("volumes", [])), "long form"


@each
def test_an_image_has_a_version(name: str) -> None:
    image = SERVICES[name]["image"]
    default = re.fullmatch(r"\$\{\w+:-(.+)\}", image)
    if default is None:
        assert re.fullmatch(r"\$\{\w+:\?.+\}", image), "said by the operator"
    else:
        tag = default[1].rpartition("/")[2].partition(":")[2]
        assert re.search(r"\d", tag), image
        assert "latest" not in tag


@each
def test_what_a_service_refers_to_is_there(name: str) -> None:
    service = SERVICES[name]
    for kind in ("secrets", "configs"):
        assert set(references(service, kind)) <= set(STACK[kind])
    assert set(service["networks"]) <= set(STACK["networks"])
    named = {volume["source"] for volume in service.get("volumes", []) if volume["type"] == "volume"}
    assert named <= set(STACK["volumes"])
    secrets = {f"/run/secrets/{entry['target']}" for entry in service.get("secrets", [])}
    configs = {entry["target"] for entry in service.get("configs", [])}
    for variable, value in service.get("environment", {}).items():
        for path in re.findall(r"/(?:run/secrets|etc/infaas)/\S+", str(value)):
            assert path in secrets | configs, f"{variable}: {path} is not mounted"


@each
def test_services_and_settings_are_known(name: str) -> None:
    service = SERVICES[name]
    command = service.get("command", [])
    if "entrypoint" not in service and command[:1] == ["run"]:
        services = command[1 : command.index("--config")] if "--config" in command else command[1:]
        assert services
        assert set(services) <= set(known())
    ours = {key: str(value) for key, value in service.get("environment", {}).items() if key.startswith("INFAAS_")}
    prepared = {
        "INFAAS_STORE__SUPERUSER_DSN_FILE",
        "INFAAS_STORE__WRITER_PASSWORD_FILE",
        "INFAAS_STORE__READER_PASSWORD_FILE",
    }
    if name == "prepare":
        assert prepared <= set(ours)
        ours = {key: value for key, value in ours.items() if key not in prepared}
    if files := {key: value for key, value in ours.items() if key.endswith("_FILE")}:
        ours = {key: value for key, value in ours.items() if key not in files} | {
            key.removesuffix("_FILE"): "x" for key in files
        }
    # A template or a variable of deploy.sh stands for its default.
    plain = {
        key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value).replace("{{.Node.Hostname}}", "w0")
        for key, value in ours.items()
    }
    load(None, plain)


def test_every_secret_config_network_and_volume_is_used() -> None:
    for kind in ("secrets", "configs"):
        assert set(STACK[kind]) == {one for service in SERVICES.values() for one in references(service, kind)}
    assert set(STACK["networks"]) == {one for service in SERVICES.values() for one in service["networks"]}


def test_secrets_and_configs_are_named_by_their_content_and_files_of_ours_exist() -> None:
    script = (OPS / "deploy.sh").read_text()
    for kind in ("secrets", "configs"):
        for name, entry in STACK[kind].items():
            variable = re.search(r"\$\{(H_\w+):", entry["name"])
            assert variable, f"{name}: neither can change, so a new content needs a new name"
            assert f"H_{name.replace('-', '_').upper()}" == variable[1]
            path = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", entry["file"])
            if not path.startswith("./secrets"):
                assert (OPS / path).is_file(), path
    assert "hash_of" in script


def test_networks_are_internal_but_for_the_one_with_ports() -> None:
    for name, network in STACK["networks"].items():
        assert network["driver"] == "overlay"
        assert bool(network.get("internal")) is (name != "edge")


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_further_files_change_what_there_is(path: Path) -> None:
    more = yaml.safe_load(path.read_text())
    assert set(more.get("services", {})) <= set(SERVICES)
    for service in more.get("services", {}).values():
        assert not DROPPED & set(service)
        assert all(port["mode"] == "host" for port in service.get("ports", []))
    if "encrypted" in path.name:
        assert set(more["networks"]) == set(STACK["networks"]), "all of them, or traffic between machines is readable"


@pytest.mark.parametrize("script", sorted(OPS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_read_by_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert script.stat().st_mode & 0o111, "executable"
