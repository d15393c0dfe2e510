"""services/gateway/http/access.py: who may do what."""

import os
import time
from pathlib import Path

import pytest

from infaas.credentials import CredentialError, CredentialStore
from services.core.settings import GatewaySettings
from services.gateway.http.access import (
    AccessControl,
    BadTokens,
    KnownTokens,
    Right,
    Token,
    Tokens,
    allowed,
    bearer,
    digest_of,
    is_loopback,
)
from services.gateway.http.checks import bare_host, host_allowed, origin_allowed, path_fault
from services.shell.settings import load

USER, OPERATOR = {digest_of("user"): Token("u")}, {digest_of("operator"): Token("o")}
BOTH, USERS, OPERATORS, NONE = (
    KnownTokens(USER, OPERATOR),
    KnownTokens(users=USER),
    KnownTokens(operators=OPERATOR),
    KnownTokens(),
)


@pytest.mark.parametrize(
    ("right", "keys", "nobody", "wrong", "user", "operator"),
    [
        (Right.NONE, BOTH, 0, 0, 0, 0),
        (Right.QUERY, NONE, 0, 0, 0, 0),
        (Right.OPERATE, NONE, 0, 0, 0, 0),
        (Right.QUERY, BOTH, 401, 401, 0, 0),
        (Right.OPERATE, BOTH, 401, 401, 403, 0),
        (Right.QUERY, USERS, 401, 401, 0, 401),
        (Right.OPERATE, USERS, 401, 401, 403, 401),
        (Right.QUERY, OPERATORS, 0, 0, 0, 0),
        (Right.OPERATE, OPERATORS, 401, 401, 401, 0),
    ],
)
def test_the_rule(right: Right, keys: KnownTokens, nobody: int, wrong: int, user: int, operator: int) -> None:
    credentials = (None, "Bearer guess", "Bearer user", "bearer  operator")
    assert [allowed(right, one, keys).status for one in credentials] == [nobody, wrong, user, operator]


def test_rights_follow_settings_management_and_reach() -> None:
    assert allowed(Right.OPERATE, "Bearer operator", BOTH, admin=False).status == 403
    assert allowed(Right.QUERY, "Bearer user", BOTH, admin=False).status == 0
    assert allowed(Right.OPERATE, None, NONE, loopback=False).status == 403
    assert allowed(Right.QUERY, None, NONE, loopback=False).status == 0
    assert allowed(Right.OPERATE, "Bearer operator", BOTH, loopback=False).status == 0
    access = AccessControl(GatewaySettings(operator_tokens="o1, o2"))
    assert access.free(Right.QUERY)
    assert access.operators
    assert access.verdict(Right.OPERATE, "Bearer o2").status == 0
    assert AccessControl(GatewaySettings(address="0.0.0.0")).verdict(Right.OPERATE, None).status == 403
    assert AccessControl(GatewaySettings(admin=False)).verdict(Right.OPERATE, None).status == 403
    assert [is_loopback(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(name) for name in ("0.0.0.0", "::", "10.0.0.1", "models.example.org")] == [False] * 4


@pytest.mark.parametrize(
    ("credential", "token"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic dTpw", None),
        ("token", None),
        ("BEARER t", "t"),
        ("Bearer a b", "a b"),
    ],
)
def test_bearer(credential: str | None, token: str | None) -> None:
    assert bearer(credential) == token


def test_tokens_as_written() -> None:
    assert Tokens("gateway.tokens", ()).current() is None
    assert Tokens("gateway.tokens", ("abc", "ann:def")).current() == {
        digest_of("abc"): Token("token-1"),
        digest_of("def"): Token("ann"),
    }
    with pytest.raises(BadTokens, match=r"gateway\.tokens: there is no token"):
        Tokens("gateway.tokens", ("ann:",))


def test_tokens_of_files_change_with_them(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who may ask\nann:one\n\ntwo\n")
    tokens = Tokens("gateway.tokens", (str(file), "three"))

    def now() -> set[str]:
        tokens._read_at = float("-inf")
        found = tokens.current()
        assert found is not None
        return {word for word in ("one", "two", "three", "four") if digest_of(word) in found}

    assert now() == {"one", "two", "three"}
    file.write_text("four")
    assert now() == {"three", "four"}
    (tmp_path / "next").write_text("ann:one")
    os.replace(tmp_path / "next", file)
    assert now() == {"one", "three"}
    file.unlink()
    assert now() == {"one", "three"}, "who had a token keeps it while the file is away"
    file.write_text("")
    assert now() == {"three"}


def test_tokens_are_as_written_and_files_read_again_until_missing_or_emptied(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who may ask\nann:one\n")
    access = AccessControl(load(environ={"INFAAS_GATEWAY__TOKENS_FILE": str(file)}).gateway)
    assert access.verdict(Right.QUERY, "Bearer one").status == 0
    assert access.verdict(Right.QUERY, "Bearer ask").status == 401
    file.write_text("ann:another")
    access._users._read_at = float("-inf")
    assert access.verdict(Right.QUERY, "Bearer one").status == 401
    assert access.verdict(Right.QUERY, "Bearer another").status == 0
    file = tmp_path / "tokens"
    file.write_text("one")
    tokens = Tokens("gateway.tokens", (str(file),))
    file.write_text("")
    tokens._read_at = float("-inf")
    assert tokens.current() == {}
    assert allowed(Right.QUERY, "Bearer one", KnownTokens(users=tokens.current())).status == 401
    with pytest.raises(BadTokens, match=r"gateway\.operator_tokens: cannot read .*none"):
        AccessControl(GatewaySettings(operator_tokens=(str(tmp_path / "none"),)))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTokens, match="it is not a text"):
        AccessControl(GatewaySettings(tokens=str(tmp_path / "bytes")))


def test_tokens_of_the_command_are_for_an_app_end_and_can_be_revoked(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.begin("infaas")
    file = tmp_path / "gateway-tokens"
    access = AccessControl(load(environ={"INFAAS_GATEWAY__TOKENS_FILE": str(file)}).gateway)

    def asked(token: str) -> tuple[int, str]:
        access._users._read_at = float("-inf")
        status, _, app = access.verdict(Right.QUERY, f"Bearer {token}")
        return status, app

    assert asked("") == (401, ""), "where nobody has a token yet, nobody may query"
    web = store.add_token("web", "digits", time.time() + 3600.0)
    boss, old = store.add_token("boss", "", None), store.add_token("old", "digits", time.time() - 1.0)
    assert web not in file.read_text()
    assert [asked(token) for token in (web, boss, old)] == [(0, "digits"), (0, ""), (401, "")]
    assert "was valid until" in access.verdict(Right.QUERY, f"Bearer {old}").message
    assert access.verdict(Right.OPERATE, f"Bearer {web}").status == 403
    with pytest.raises(CredentialError, match="there is 'web' already"):
        store.add_token("web", "faces", None)
    assert store.revoke_token("web") and not store.revoke_token("web")
    assert [asked(token)[0] for token in (web, boss)] == [401, 0]
    file.write_text("web app=digits until=never sha256=1\n")
    assert asked(boss)[0] == 0, "a file that cannot be read takes no token away"


# -- services/gateway/http/checks.py: paths, hosts and origins.


@pytest.mark.parametrize(
    "path", [b"/", b"/v2/models/a.b.c/infer", b"/v2/models/a/versions/2.0", b"/caf%C3%A9", b"/%41"]
)
def test_paths_that_are_fine(path: bytes) -> None:
    assert path_fault(path) is None


@pytest.mark.parametrize(
    "path",
    [
        b"/v2/../admin",
        b"/v2/./x",
        b"/v2/%2e%2e/admin",
        b"/v2/%2E./x",
        b"/v2/models/a%2fb/infer",
        b"/v2/models/%2Fetc/infer",
        b"/v2//models",
        b"//host/x",
        b"/v2/a%00b",
        b"/v2/a%0d%0ab",
        b"/v2/a\\b",
        b"/v2/a%5cb",
        b"/v2/%ff",
        b"/v2/%c0%ae%c0%ae/x",
        b"/v2/%e2%80%ae",
        b"/..",
        b"/%2e%2e",
    ],
)
def test_paths_that_lead_elsewhere(path: bytes) -> None:
    assert path_fault(path)


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("models.example.org:8000", "models.example.org"),
        ("A.example.", "a.example"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("", None),
        (":80", None),
        ("a b", None),
        ("a/b", None),
        ("a@b", None),
        ("a:b", None),
        ("a:80:80", None),
        ("[::1", None),
        ("[x]:1", None),
        ("[::1]80", None),
        ("é.example", None),
        ("a:٣", None),
    ],
)
def test_hosts_are_read(value: str, host: str | None) -> None:
    assert bare_host(value) == host


def test_which_hosts_are_ours() -> None:
    for value in ("localhost:8000", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "app.localhost"):
        assert host_allowed(value, ())
    for value in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "a/b", "127.0.0.1@evil"):
        assert not host_allowed(value, ())
    assert host_allowed("Models.example.org:1", {"models.example.org"})
    assert not host_allowed("x.models.example.org", {"models.example.org"})
    assert host_allowed("x.models.example.org", {"*.models.example.org"})
    assert not host_allowed("xmodels.example.org", {"*.models.example.org"})
    assert host_allowed("anything.example", {"*"})
    assert not host_allowed("a b", {"*"})


@pytest.mark.parametrize(
    ("origin", "site", "origins", "fine"),
    [
        ("", "", (), True),
        ("", "none", (), True),
        ("", "same-origin", (), True),
        ("", "cross-site", (), False),
        ("", "same-site", (), False),
        ("http://localhost:8000", "same-origin", (), True),
        ("HTTP://LOCALHOST:8000", "", (), True),
        ("http://localhost:9000", "same-site", (), False),
        ("http://evil.example", "cross-site", (), False),
        ("null", "cross-site", (), False),
        ("null", "", (), False),
        ("http://page.example", "cross-site", ("http://page.example",), True),
        ("https://page.example", "cross-site", ("http://page.example",), False),
        ("http://evil.example", "cross-site", ("*",), True),
    ],
)
def test_which_pages_may_ask(origin: str, site: str, origins: tuple[str, ...], fine: bool) -> None:
    assert origin_allowed(origin, "localhost:8000", site, origins) is fine
