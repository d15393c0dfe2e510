"""services/gateway/http/access.py: who may do what."""

import os
from pathlib import Path

import pytest

from services.core.settings import GatewaySettings
from services.gateway.http.access import (
    AccessControl,
    BadTokens,
    KnownTokens,
    Right,
    Tokens,
    allowed,
    bearer,
    digest_of,
    is_loopback,
)
from services.shell.settings import load

USER, OPERATOR = {digest_of("user"): "u"}, {digest_of("operator"): "o"}
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


def test_management_off_and_in_reach_of_others() -> None:
    assert allowed(Right.OPERATE, "Bearer operator", BOTH, admin=False).status == 403
    assert allowed(Right.QUERY, "Bearer user", BOTH, admin=False).status == 0
    assert allowed(Right.OPERATE, None, NONE, loopback=False).status == 403
    assert allowed(Right.QUERY, None, NONE, loopback=False).status == 0
    assert allowed(Right.OPERATE, "Bearer operator", BOTH, loopback=False).status == 0


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
        digest_of("abc"): "token-1",
        digest_of("def"): "ann",
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


def test_an_emptied_file_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one")
    tokens = Tokens("gateway.tokens", (str(file),))
    file.write_text("")
    tokens._read_at = float("-inf")
    assert tokens.current() == {}
    assert allowed(Right.QUERY, "Bearer one", KnownTokens(users=tokens.current())).status == 401


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadTokens, match=r"gateway\.operator_tokens: cannot read .*none"):
        AccessControl(GatewaySettings(operator_tokens=(str(tmp_path / "none"),)))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTokens, match="it is not a text"):
        AccessControl(GatewaySettings(tokens=str(tmp_path / "bytes")))


def test_access_control_has_the_settings() -> None:
    access = AccessControl(GatewaySettings(operator_tokens="o1, o2"))
    assert access.free(Right.QUERY)
    assert access.operators
    assert access.verdict(Right.OPERATE, "Bearer o2").status == 0
    assert AccessControl(GatewaySettings(address="0.0.0.0")).verdict(Right.OPERATE, None).status == 403
    assert AccessControl(GatewaySettings(admin=False)).verdict(Right.OPERATE, None).status == 403


def test_loopback() -> None:
    assert [is_loopback(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(name) for name in ("0.0.0.0", "::", "10.0.0.1", "models.example.org")] == [False] * 4


def test_a_file_named_by_a_variable_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who may ask\nann:one\n")
    settings = load(environ={"INFAAS_GATEWAY__TOKENS_FILE": str(file)}).gateway
    access = AccessControl(settings)
    assert access.verdict(Right.QUERY, "Bearer one").status == 0
    assert access.verdict(Right.QUERY, "Bearer ask").status == 401
    file.write_text("ann:another")
    access._users._read_at = float("-inf")
    assert access.verdict(Right.QUERY, "Bearer one").status == 401
    assert access.verdict(Right.QUERY, "Bearer another").status == 0
