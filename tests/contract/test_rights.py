"""Every verb through every door for every role, against a real server with the configuration that `infaas auth` writes."""

import asyncio
import inspect
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bus.messages.events import EVENTS
from bus.natsbus import NatsBus
from bus.port import BusError, Delivery, Forbidden
from bus.rights import ROLES, STORE_RIGHTS, SUBJECT_RIGHTS, Identity, rights
from bus.subjects import Subjects, matches
from infaas.client import Client
from infaas.credentials import FIRST
from infaas.demo import digits
from infaas.errors import Refused
from infaas.registering import register
from tests.support.clients.responders import until
from tests.support.servers.processes import infaas
from tests.support.servers.secured_nats import Secured, ignored, secured

SUBJECTS = Subjects()
NOBODY = Identity("nobody", ())
COMMANDS = [
    SUBJECTS.execute("w1", "cpu"),
    SUBJECTS.executor("w1", "cpu", "load"),
    SUBJECTS.executor("w1", "cpu", "unload"),
    SUBJECTS.executor("w1", "cpu", "demote"),
    SUBJECTS.worker("w1", "load"),
    SUBJECTS.worker("w1", "release"),
    SUBJECTS.worker("w1", "drain"),
    SUBJECTS.machines("start"),
    SUBJECTS.machines("stop"),
    SUBJECTS.workshop("w1", "build"),
    SUBJECTS.controller("ask"),
]
ADMIN = [SUBJECTS.admin("delete-app"), SUBJECTS.register()]
STORED = [
    "$JS.API.STREAM.DELETE.KV_infaas-catalog",
    "$JS.API.STREAM.PURGE.KV_infaas-catalog",
    "$JS.API.STREAM.MSG.DELETE.KV_infaas-catalog",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.STREAM.SNAPSHOT.KV_infaas-catalog",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.NAMES",
    "$JS.API.CONSUMER.CREATE.INFAAS_OUTCOMES.mine",
    "$KV.infaas-control.controller",
    "$SYS.REQ.SERVER.PING",
    "_INBOX.anybody",
]
CATALOG = "$KV.infaas-catalog.app.faces"


def identities(server: Secured) -> dict[str, Identity]:
    return {user.name: user.identity for user in server.credentials.users()}


def concrete(pattern: str) -> str:
    """One subject that the pattern means."""
    return pattern.replace("*", "x").replace(">", "x.y")


def allowed(subject: str, patterns: tuple[str, ...]) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


async def denied_to_publish(bus: NatsBus, errors: list[Exception], subjects: list[str]) -> set[str]:
    """Those that the server did not let through."""
    said: set[str] = set()
    for subject in subjects:
        bus.publish(subject, b"")
    await bus.flush()
    for error in errors:
        text = str(error)
        assert "Permissions Violation for Publish" in text, text
        said.add(text.split('"')[1])
    errors.clear()
    return said


async def denied_to_subscribe(bus: NatsBus, subjects: list[str]) -> set[str]:
    said = set()
    for subject in subjects:
        try:
            await (await bus.subscribe(subject, lambda _: None)).drain()
        except Forbidden:
            said.add(subject)
    return said


# ---- the table


def test_every_subject_store_and_event_has_its_line() -> None:
    names = {name for name, _ in inspect.getmembers(Subjects) if not name.startswith("_")} - {"prefix"}
    assert names == {line.name for line in SUBJECT_RIGHTS} | {store.name for store in STORE_RIGHTS}
    events = [
        p for line in SUBJECT_RIGHTS if line.publish and line.name == "event" for p in line.patterns(SUBJECTS, NOBODY)
    ]
    assert sorted(events) == sorted(SUBJECTS.event(event.kind) for event in EVENTS)


def test_what_is_published_somebody_may_hear() -> None:
    # These go into a stream and to a server's client library: nobody subscribes them.
    to_streams = {"event", "job_chunks"}
    for line in SUBJECT_RIGHTS:
        assert line.subscribe or line.name in to_streams, line.name
        # The server's 503 comes on the first; the second is for who hears events of all kinds.
        assert line.publish or line.name in ("undelivered", "event") or "unheard" in line.of, line.name


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_everything(role: str) -> None:
    mine = rights(Identity("n", (role,), app="faces" if role == "client" else ""), SUBJECTS)  # type: ignore[arg-type]
    for pattern in (*mine.publish, *mine.subscribe):
        first, *_ = pattern.split(".")
        assert first not in (">", "*"), pattern
        assert pattern not in ("$JS.>", "$JS.API.>", "$KV.>", "$O.>", "infaas.>"), pattern
        assert "STREAM.DELETE" not in pattern, pattern


# ---- the matrix


async def test_the_server_allows_each_user_what_the_table_says_and_nothing_else(server: Secured) -> None:
    users = identities(server)
    everything = [rights(user, SUBJECTS) for user in users.values()]
    published = sorted({concrete(p) for r in everything for p in r.publish} | {*COMMANDS, *ADMIN, *STORED, CATALOG})
    heard = sorted({p for r in everything for p in r.subscribe} | {"infaas.>", ">", "_INBOX.>", "_INBOX_.>", "$JS.>"})

    for name, user in users.items():
        mine = rights(user, SUBJECTS)
        errors: list[Exception] = []
        bus = await server.bus(name, errors.append)
        try:
            wanted = {subject for subject in published if not allowed(subject, mine.publish)}
            assert await denied_to_publish(bus, errors, published) == wanted, name
            wanted = {subject for subject in heard if not allowed(subject, mine.subscribe)}
            assert await denied_to_subscribe(bus, heard) == wanted, name
        finally:
            await bus.close()


# What must hold whatever the table says: written out by hand.
MAY = {
    "infaas.query.faces": {"phone", "tablet", "gateway", "operator", "dashboard"},
    "infaas.cancel.faces": {"phone", "tablet", "gateway", "operator", "dashboard"},
    "infaas.cancel.numbers": {"thief", "gateway", "operator", "dashboard"},
    "infaas.query.numbers": {"thief", "gateway", "operator", "dashboard"},
    "infaas.query._": {"gateway", "operator", "dashboard"},
    "infaas.job.faces": {"phone", "gateway", "operator"},
    "infaas.feedback.faces": {"phone", "gateway", "operator"},
    "infaas.explain.faces": {"phone", "gateway", "operator", "dashboard"},
    "infaas.list.apps": {"thief", "gateway", "operator", "dashboard", "supervisor"},
    **{subject: {"operator"} for subject in ADMIN},
    SUBJECTS.register(): {"operator", "container"},
    SUBJECTS.registration_cancel("r1"): {"operator", "dashboard"},
    CATALOG: {"registrar", "backup"},
    "$KV.infaas-control.controller": {"registrar", "vm-autoscaler", "supervisor", "backup"},
    # the runner of offline jobs is beside the monitor, and in a container
    SUBJECTS.execute("w1", "cpu"): {"dispatcher", "monitor", "container"},
    SUBJECTS.executor("w1", "cpu", "load"): {"monitor", "container"},  # a container is a worker of its own
    SUBJECTS.executor("w1", "gpu-0", "demote"): {"monitor", "container"},
    # An operator's order comes by the registrar, a container's is of its own worker, when it is stopped.
    SUBJECTS.worker("w1", "drain"): {"vm-autoscaler", "supervisor", "container", "registrar"},
    SUBJECTS.machines("stop"): {"vm-autoscaler"},
    SUBJECTS.workshop("w1", "build"): {"registrar"},
    SUBJECTS.exited("w1", "cpu"): {"supervisor"},
    SUBJECTS.monitor("w1", "loaded"): {"executor", "container"},
    SUBJECTS.monitor("w7", "loaded"): {"executor", "worker-7", "container"},
    SUBJECTS.worker_heartbeat("w1"): {"monitor", "container"},
    "_INBOX_.faces.phone.x": {"dispatcher", "executor", "worker-7", "registrar", "jobs", "container"},
    "_SERVICE_.registrar.x": {"supervisor"},
    "_INBOX.x": set(),
    "$JS.API.STREAM.DELETE.KV_infaas-catalog": set(),
    "$JS.API.STREAM.CREATE.KV_infaas-catalog": {"registrar"},
    "$JS.API.STREAM.UPDATE.INFAAS_OUTCOMES": {"recorder"},
    "$JS.API.CONSUMER.MSG.NEXT.INFAAS_OUTCOMES.recorder": {"recorder", "operator"},
    "$SYS.REQ.SERVER.PING": set(),
    "$SYS.REQ.ACCOUNT.PING.CONNZ": set(),
    "$SYS.REQ.ACCOUNT.PING.STATZ": {"dispatcher"},
}
HEAR = {
    "_INBOX_.faces.phone.>": {"phone"},
    "_INBOX_.numbers.thief.>": {"thief"},
    "_INBOX_.>": set(),
    "_INBOX.>": set(),
    "infaas.query.*": {"dispatcher"},
    "infaas.query.faces": {"dispatcher"},
    "infaas.job-status.*": {"gateway", "operator", "jobs"},
    "infaas.admin.*": {"registrar"},
    "infaas.execute.w1.cpu": {"executor", "container"},
    "infaas.execute.w7.cpu": {"executor", "worker-7", "container"},
    "infaas.event.*": {"operator"},
    "infaas.>": set(),
    ">": set(),
}


async def test_who_may_do_what_as_written_by_hand(server: Secured) -> None:
    may: dict[str, set[str]] = {subject: set() for subject in MAY}
    hear: dict[str, set[str]] = {subject: set() for subject in HEAR}
    for name in identities(server):
        errors: list[Exception] = []
        bus = await server.bus(name, errors.append)
        try:
            for subject in set(MAY) - await denied_to_publish(bus, errors, list(MAY)):
                may[subject].add(name)
            for subject in set(HEAR) - await denied_to_subscribe(bus, list(HEAR)):
                hear[subject].add(name)
        finally:
            await bus.close()
    for subject, users in (may | hear).items():  # what shares a process may what its services may
        assert ("control" in users) == (not users.isdisjoint(FIRST["control"])), subject
    assert {subject: users - {"control"} for subject, users in may.items()} == MAY
    assert {subject: users - {"control"} for subject, users in hear.items()} == HEAR


@pytest.mark.parametrize("user", ["executor", "worker-7", "phone", "thief", "dashboard", "recorder"])
async def test_who_must_not_command_cannot_through_any_door(server: Secured, user: str) -> None:
    """Publishing, asking, and writing where commands come from."""
    errors: list[Exception] = []
    bus = await server.bus(user, errors.append)
    orders = [*COMMANDS, *ADMIN, *STORED, CATALOG]
    if user == "recorder":
        orders.remove("$JS.API.CONSUMER.CREATE.INFAAS_OUTCOMES.mine")  # it reads that stream
    try:
        assert await denied_to_publish(bus, errors, orders) == set(orders)
        for subject in orders:
            with pytest.raises(Forbidden):
                await bus.request(subject, b"", 5.0)
        with pytest.raises(BusError):
            await bus.publish_durable(SUBJECTS.admin("add-app"), b"", "1")
    finally:
        await bus.close()


# ---- who nobody is


async def test_no_credentials_and_foreign_ones_are_refused(server: Secured, tmp_path: Path) -> None:
    from infaas.credentials import new_pair

    ca = server.login("phone").options()["tls"]
    with pytest.raises(BusError, match="refuses"):
        await NatsBus.connect(server.url, name="nobody", tls=ca, timeout=30)
    with pytest.raises(BusError, match="nkey"):
        await server.bus("phone", nkeys_seed_str=new_pair().seed, timeout=30)
    with pytest.raises(BusError):
        await server.bus("phone", user="phone", password="x", nkeys_seed_str=None, timeout=30)


def test_commands_say_which_right_or_key_is_missing_and_who_gives_it(server: Secured, tmp_path: Path) -> None:
    commands: list[tuple[str, dict[str, str], str]] = [
        ("registrations", {}, "forbidden: our credentials have no right to the list of registrations: ask an"),
        ("doctor", {}, "forbidden: .* ask an operator for the right"),
        ("apps", {"INFAAS_NKEY_SEED": ""}, "or a key of `infaas auth`"),
        ("apps", {"INFAAS_NKEY_SEED": "/nowhere.nk"}, "from '/nowhere.nk': No such file.*; ask an operator for a key"),
        ("apps", {"INFAAS_TLS_CA": ""}, "is not trusted here: .*INFAAS_TLS_CA"),
    ]

    def said(words: str, changed: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return infaas(words, cwd=tmp_path, **(server.environ("phone") | changed))

    with ThreadPoolExecutor() as pool:  # some wait for seconds
        ended = [pool.submit(said, words, changed) for words, changed, _ in commands]
    for (_, _, told), one in zip(commands, ended, strict=True):
        assert one.result().returncode == 1
        assert re.search(told, one.result().stderr), one.result().stderr
        assert one.result().stderr.count("\n") == 1


@pytest.mark.slow
async def test_a_server_without_tls_or_of_another_authority_is_not_talked_to(
    server: Secured, nats_url: str, tmp_path: Path
) -> None:
    from infaas.credentials import certify

    with pytest.raises(BusError, match="no TLS"):
        await NatsBus.connect(nats_url, name="t", timeout=5, on_error=ignored, **server.login("phone").options())
    other = certify(tmp_path, ["localhost"])[0]
    import ssl

    with pytest.raises(BusError):
        tls = ssl.create_default_context(cafile=str(other))
        await server.bus("phone", ignored, tls=tls, timeout=1)


# ---- keys come and go


async def test_a_rotated_key_is_good_until_it_is_revoked(tmp_path: Path) -> None:
    with secured(tmp_path) as server:
        old = server.login("phone").options()
        server.credentials.rotate("phone")
        server.reload()
        for options in (old, server.login("phone").options()):
            await (await server.bus("phone", **options)).close()
        server.credentials.revoke("phone")
        await (await server.bus("phone", **old)).close()  # not before the server has read it
        server.reload()
        with pytest.raises(BusError, match="revoked"):
            await server.bus("phone", **old, timeout=30)
        connected = await server.bus("phone", ignored)
        said: list[str] = []
        connected.on_status(said.append)
        server.credentials.revoke("phone", wholly=True)
        server.reload()
        await until(lambda: "disconnected" in said)
        await connected.close()


async def test_who_was_denied_before_is_heard_once_it_is_allowed(server: Secured) -> None:
    bus = await server.bus("thief", ignored)
    try:
        # As the server says it after a reconnect, when the client library subscribes anew.
        bus._complained(Exception('Permissions Violation for Subscription to "_INBOX_.numbers.thief.mine"'))
        heard: list[Delivery] = []
        await bus.subscribe("_INBOX_.numbers.thief.mine", heard.append)
    finally:
        await bus.close()


async def test_a_denied_request_says_so_at_once(server: Secured) -> None:
    bus = await server.bus("thief")
    heard: list[Delivery] = []
    try:
        with pytest.raises(Forbidden, match=r"infaas\.query\.faces"):
            await bus.request(SUBJECTS.query("faces"), b"", 5.0)
        with pytest.raises(Forbidden, match=r"infaas\.execute"):
            await bus.subscribe(SUBJECTS.execute("w1", "cpu"), heard.append)
        took = []
        while not took or (min(took) >= 4.0 and len(took) < 20):  # what else the machine does only adds to it
            began = time.monotonic()
            with pytest.raises(BusError):
                await bus.key_value(SUBJECTS.catalog_bucket, create=False)
            took.append(time.monotonic() - began)
        assert min(took) < 4.0, "it is not waited for a reply"
    finally:
        await bus.close()


async def test_who_has_no_right_to_large_things_hears_so_at_once(server: Secured, tmp_path: Path) -> None:
    validation = digits.save_validation(tmp_path / "validation.npz")

    gateway, phone = await server.bus("gateway", ignored), await server.bus("phone", ignored)
    try:
        async with asyncio.timeout(30):  # services wait longer than this for buckets that others make
            with pytest.raises(Refused, match=r"no right to infaas\.register") as caught:
                await register(gateway, SUBJECTS, digits.models()["logreg"], app="a", model="m", validation=validation)
            assert caught.value.code == "forbidden"
            client = await Client(phone).open()
            with pytest.raises(Refused, match="use the gateway") as caught:
                await client.query("faces", np.zeros((1, 10**6), np.float32))
            assert caught.value.code == "forbidden"
            await client.close()
    finally:
        await gateway.close()
        await phone.close()


async def test_who_may_not_make_a_bucket_waits_for_who_may(server: Secured) -> None:
    errors: list[Exception] = []
    dispatcher, registrar = await server.bus("dispatcher", errors.append), await server.bus("registrar")
    try:
        dispatcher.streams.patience_s = 0.1
        with pytest.raises(BusError, match="we may not make it: is the service that does"):
            await dispatcher.key_value(SUBJECTS.catalog_bucket)
        dispatcher.streams.patience_s = 10
        opening = asyncio.create_task(dispatcher.key_value(SUBJECTS.catalog_bucket))
        await dispatcher.flush()
        await (await registrar.key_value(SUBJECTS.catalog_bucket)).put("app.faces", b"1")
        bucket = await opening
        assert await bucket.keys() == ["app.faces"]
        seen: list[object] = []
        watch = await bucket.watch(seen.append)
        await until(lambda: len(seen) == 2)
        with pytest.raises(Forbidden):
            await bucket.put("app.faces", b"2")
        await watch.drain()
        assert errors == []
    finally:
        await dispatcher.close()
        await registrar.close()
