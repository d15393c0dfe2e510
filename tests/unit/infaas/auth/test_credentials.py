"""Users, keys and what is written for the servers."""

import json
import re
import socket
import stat
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bus.login import Login, login_from, merged
from bus.port import BusError
from bus.rights import ROLES, Identity, rights, sharing
from bus.subjects import Subjects
from infaas.credentials import CONFIG, FIRST, CertificateError, CredentialError, CredentialStore, User, certify
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError
from services.shell.settings import load
from tests.support.clients.commands import ran

PHONE = User(name="phone", roles=("client",), app="faces")


def public_keys(store: CredentialStore) -> list[str]:
    return re.findall(r"nkey: (U\w{55})", (store.directory / "nats-auth.conf").read_text())


@pytest.fixture
def store(tmp_path: Path) -> CredentialStore:
    store = CredentialStore(tmp_path / "auth")
    store.begin("infaas")
    return store


def test_a_new_book_has_a_user_for_every_role_but_clients(store: CredentialStore) -> None:
    assert {role for user in store.users() for role in user.roles} == set(ROLES) - {"client"}
    assert {user.name for user in store.users()} == set(FIRST)
    assert len(set(public_keys(store))) == len(FIRST)


def test_credentials_are_ours_alone_and_no_seed_is_anywhere_else(store: CredentialStore) -> None:
    store.add(PHONE)
    seeds = []
    for file in store.directory.rglob("*"):
        if file.suffix == ".nk":
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            seeds += re.findall(r"SU\w{56}", file.read_text())
    assert len(seeds) == len(FIRST) + 1
    others = "".join(f.read_text() for f in store.directory.rglob("*") if f.is_file() and f.suffix != ".nk")
    assert not re.search(r"\bS[UAO][A-Z2-7]{40,}", others)


def test_rotation_keeps_the_old_key_until_it_is_revoked(store: CredentialStore) -> None:
    store.add(PHONE)
    first = store.file_of("phone").read_text()
    old = store.users()
    user = store.rotate("phone")
    assert store.file_of("phone").read_text() != first
    assert [key.public for key in user.keys] == [
        k for k in public_keys(store) if k in {key.public for key in user.keys}
    ]
    assert user.keys[0] == next(u for u in old if u.name == "phone").keys[0]
    with pytest.raises(CredentialError, match="revoke it first"):
        store.rotate("phone")
    assert store.revoke("phone").keys == user.keys[1:]
    assert user.keys[0].public not in public_keys(store)
    store.revoke("phone")
    assert "phone" not in {user.name for user in store.users()}
    assert not store.file_of("phone").exists()
    assert public_keys(store) and user.keys[1].public not in public_keys(store)


def test_revoking_wholly_takes_both_keys_and_certificates_need_a_host(store: CredentialStore, tmp_path: Path) -> None:
    store.add(PHONE)
    store.rotate("phone")
    assert not store.revoke("phone", wholly=True).keys
    assert len(public_keys(store)) == len(FIRST)
    with pytest.raises(CertificateError, match="no name"):
        certify(tmp_path, ["a host"])


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (User(name="a.b", roles=("executor",)), "name"),
        (User(name="x", roles=()), "role"),
        (User(name="x", roles=("root",)), "role"),  # type: ignore[arg-type]
        (User(name="x", roles=("client",)), "--app"),
        (User(name="x", roles=("client", "operator"), app="faces"), "no other role"),
        (User(name="x", roles=("operator",), app="faces"), "client"),
        (User(name="x", roles=("client",), app="a.>"), "app"),
        (User(name="x", roles=("executor",), worker="w1.>"), "worker"),
        (User(name="x", roles=("client",), app="faces", verbs=("admin",)), "admin"),  # type: ignore[arg-type]
        (User(name="x", roles=("jobs",), buckets=("a.b",)), "bucket"),
        (User(name="x", roles=("client",), app="faces", worker="w1"), "worker: .* leave --worker out"),
        (User(name="x", roles=("executor",), verbs=("query",)), "may: .* leave --may out"),
        (User(name="operator", roles=("operator",)), "already"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(store: CredentialStore, user: User, said: str) -> None:
    before = (store.directory / "users.json").read_text()
    with pytest.raises(CredentialError, match=said):
        store.add(user)
    assert (store.directory / "users.json").read_text() == before
    assert len(list((store.directory / "users").iterdir())) == len(FIRST)


def test_a_book_is_begun_once_and_read_where_it_is(store: CredentialStore, tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match="already"):
        store.begin("infaas")
    with pytest.raises(CredentialError, match="infaas auth init"):
        CredentialStore(tmp_path / "nowhere").users()
    with pytest.raises(CredentialError, match="infaas auth init"):
        CredentialStore(tmp_path / "nowhere").rotate("x")
    with pytest.raises(CredentialError, match="no user 'x'"):
        store.rotate("x")
    (store.directory / "users.json").write_text("{")
    with pytest.raises(CredentialError, match="damaged"):
        store.users()


def test_the_servers_take_what_is_written(store: CredentialStore, tmp_path: Path) -> None:
    try:
        server = find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))
    store.add(PHONE)
    certify(store.directory, ["localhost", "127.0.0.1", "::1"])
    config = store.directory / "nats.conf"
    config.write_text(f'jetstream {{ store_dir: "{tmp_path}" }}\ninclude "nats-auth.conf"\ninclude "nats-tls.conf"\n')
    done = subprocess.run([server, "-t", "-c", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- who we are


def test_credentials_of_files_and_variables_are_given_in_their_order(store: CredentialStore) -> None:
    store.add(PHONE)
    path = store.file_of("phone")
    for given in (str(path), path.read_text()):
        options = Login(nkey_seed=given).options()
        assert options["nkeys_seed_str"] in path.read_text()
        assert options["inbox_prefix"] == "_INBOX_.faces.phone"
    assert Login(nkey_seed=str(path), inbox="_MINE").options()["inbox_prefix"] == "_MINE"
    assert Login().options() == {}
    path = str(store.file_of("operator"))
    assert login_from({"INFAAS_NKEY_SEED": path, "INFAAS_TLS_CA": "ca.pem"}) == Login(nkey_seed=path, tls_ca="ca.pem")
    assert login_from({"INFAAS_BUS__NKEY_SEED_FILE": path}).nkey_seed == path
    assert merged(Login(nkey_seed="a", tls_ca="b"), Login(nkey_seed="c")) == Login(nkey_seed="c", tls_ca="b")
    settings = load(environ={"INFAAS_BUS__NKEY_SEED_FILE": path, "INFAAS_TLS_CA": "ca.pem"})
    assert settings.bus.tls_ca == "ca.pem"
    assert Login(nkey_seed=settings.bus.nkey_seed).options()["inbox_prefix"] == "_INBOX_.@.operator"


def test_a_seed_with_a_typo_is_not_repeated() -> None:
    wrong = "SUACYX4UK4SNTTMONNHBPKSCLPAQ7QZDB32HWDTWQPJZGDFUTYQ5WF4XZ"
    with pytest.raises(BusError) as refused:
        Login(nkey_seed=wrong).options()
    assert wrong[:10] not in str(refused.value)
    with pytest.raises(BusError, match="/no/such/file"):
        Login(nkey_seed="/no/such/file").options()
    with pytest.raises(BusError, match="TLS"):
        Login(tls_ca="/no/such/ca.pem").options()


# ---- rights


def test_rights_grow_with_roles_and_shrink_with_worker_and_verbs() -> None:
    subjects = Subjects("p")
    both = rights(Identity("n", ("monitor", "offline")), subjects)
    for role in ("monitor", "offline"):
        one = rights(Identity("n", (role,)), subjects)  # type: ignore[arg-type]
        assert set(one.publish) <= set(both.publish)
    bound = rights(Identity("n", ("executor",), worker="w1"), subjects)
    assert "p.execute.w1.*" in bound.subscribe
    assert not [pattern for pattern in (*bound.publish, *bound.subscribe) if pattern.startswith("p.monitor.*")]
    asks = rights(Identity("n", ("client",), app="a", verbs=("explain",)), subjects)
    assert asks == (("p.explain.a",), ("_INBOX_.a.n.>",))
    with_bucket = rights(Identity("n", ("client",), app="a", verbs=(), buckets=("mine",)), subjects)
    assert with_bucket.publish and all("mine" in pattern for pattern in with_bucket.publish)
    assert not [pattern for pattern in with_bucket.publish if "CREATE.OBJ_mine" in pattern and "STREAM" in pattern]


def test_operators_make_the_buckets_of_clients(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.begin("p")
    store.add(User(name="phone", roles=("client",), app="a", buckets=("mine",)))
    may = {user.name: rights(user, Subjects("p")).publish for user in sharing(user.identity for user in store.users())}
    assert [name for name, publish in may.items() if "$JS.API.STREAM.CREATE.OBJ_mine" in publish] == ["operator"]
    assert [name for name, publish in may.items() if "$O.mine.C.*" in publish] == ["operator", "phone"]
    assert "$JS.API.STREAM.CREATE.OBJ_mine" in (tmp_path / CONFIG).read_text()
    for system in ("p", "p-inputs"):
        with pytest.raises(CredentialError, match="system's own"):
            store.add(User(name="thief", roles=("client",), app="a", buckets=(system,)))


# ---- the command


def test_the_command_tells_json_and_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--dir", str(tmp_path / "auth"))
    made = json.loads(ran(capsys, ["auth", "init", *place, "--json"]).out)
    assert {user["name"] for user in made["users"]} == set(FIRST)
    added = ["auth", "add", "phone", *place, "--role", "client", "--app", "faces", "--may", "query", "--json"]
    [phone] = json.loads(ran(capsys, added).out)["users"]
    assert phone["may"] == ["query"]
    assert phone["inbox"] == "_INBOX_.faces.phone"
    assert Path(phone["credentials"]).exists()
    shown = json.loads(ran(capsys, ["auth", "show", "phone", *place, "--json"]).out)
    assert shown["publish"] == ["infaas.cancel.faces", "infaas.query.faces"]
    of_another = (("add", "x", "--prefix", "p"), ("list", "--worker", "w1"), ("rotate", "phone", "--wholly"))
    for wrong, code in (
        *((words, 2) for words in of_another), (("steal",), 2), (("add",), 2), (("list", "x"), 2), (("revoke", "nobody"), 1)
    ):  # fmt: skip
        assert len(ran(capsys, ["auth", *wrong, *place], code).err.strip().splitlines()) == 1


def test_each_option_of_the_command_reaches_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--dir", str(tmp_path / "auth"), "--json")

    def said(*words: str) -> Any:
        return json.loads(ran(capsys, ["auth", *words, *place]).out)

    said("init", "--prefix", "mine", "--tls-host", "localhost", "127.0.0.1")
    store = CredentialStore(tmp_path / "auth")
    assert store.prefix == "mine"
    shown = ("openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", store.directory / "server.pem")
    named = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert "DNS:localhost, IP Address:127.0.0.1" in named
    said("add", "gpu-1", "--role", "executor", "--worker", "w1")
    assert "mine.execute.w1.*" in said("show", "gpu-1")["subscribe"]
    said("add", "phone", "--role", "client", "--app", "faces", "--bucket", "things")
    assert "$O.things.C.*" in said("show", "phone")["publish"]
    made = said("token", "web", "--app", "faces", "--days", "90")
    [token] = said("list")["tokens"]
    assert (token["name"], token["app"]) == ("web", "faces")
    assert 89 < (datetime.fromisoformat(token["until"]) - datetime.now(UTC)).total_seconds() / 86400 <= 90
    assert made["token"] not in (store.directory / "gateway-tokens").read_text()
    said("rotate", "phone")
    said("revoke", "phone", "--wholly")
    assert "phone" not in {user["name"] for user in said("list")["users"]}


def test_what_an_older_version_made_is_brought_up_to_this_one(
    store: CredentialStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add(PHONE)
    store.revoke("dashboard")  # on purpose: it stays away
    whole = (store.directory / CONFIG).read_text()
    assert not store.renew()
    assert (store.directory / CONFIG).read_text() == whole
    users, config = store.directory / "users.json", store.directory / CONFIG
    content = json.loads(users.read_text())
    del content["first"]  # as before it was written, with users that this version has in addition
    content["users"] = [user for user in content["users"] if user["name"] not in {"backup", "control"}]
    [old] = [user for user in content["users"] if user["name"] == "container"]
    old["roles"].remove("offline")  # its process had no runner
    users.write_text(json.dumps(content))
    kept = {user.name: user.keys for user in store.users()}
    config.write_text(re.sub(r', "[^"]*infaas-payloads[^"]*"', "", whole))
    place = ("--dir", str(store.directory))
    assert "this version now" in ran(capsys, ["auth", "renew", *place]).err
    assert "already" in ran(capsys, ["auth", "renew", *place]).err
    assert "infaas-payloads" in config.read_text()
    assert {user.name for user in store.users()} == set(FIRST) - {"dashboard"} | {"phone"}
    assert kept.items() <= {user.name: user.keys for user in store.users()}.items()
    assert store.file_of("control").exists()
    assert {user.name: set(user.roles) for user in store.users()}["container"] == set(FIRST["container"])


def test_up_brings_keys_up_to_this_version_but_in_no_newer_ones_directory(
    store: CredentialStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data, settings = store.directory / CONFIG, tmp_path / "data", tmp_path / "infaas.toml"
    now = config.read_text()
    config.write_text(old := now.replace("infaas-payloads", "nothing"))
    settings.write_text(f'[bus]\nauth = "{store.directory}"\n')
    data.mkdir()
    (data / "endpoints.json").write_text('{"schema": 9999}')
    with socket.create_server(("127.0.0.1", 0)) as busy:  # so that it goes no further
        start = ["up", "--data-dir", str(data), "--config", str(settings), "--port-base", str(busy.getsockname()[1])]
        assert "newer version" in ran(capsys, start, 1).err
        assert config.read_text() == old
        (data / "endpoints.json").unlink()
        assert "the rights of this version now" in ran(capsys, start, 1).err
    assert config.read_text() == now
