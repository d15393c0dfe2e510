"""services/gateway/http/checks.py: paths, hosts and origins."""

import pytest

from services.gateway.http.checks import bare_host, host_allowed, origin_allowed, path_fault


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
