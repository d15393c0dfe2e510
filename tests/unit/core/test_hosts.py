"""Hosts that operators name, and URLs of http and https."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.hosts import BadHttpUrl, allowed_hosts, http_url


@pytest.mark.parametrize(
    ("url", "parts", "place"),
    [
        ("http://Engine.test:8000/v2", ("http", "engine.test", 8000, "/v2"), "engine.test:8000"),
        ("https://engine.test./a?b=c#d", ("https", "engine.test", 443, "/a?b=c"), "engine.test"),
        ("http://[::1]:90", ("http", "::1", 90, "/"), "[::1]:90"),
    ],
)
def test_the_parts_of_a_url(url: str, parts: tuple[str, str, int, str], place: str) -> None:
    found = http_url(url)
    assert tuple(found) == parts
    assert found.place == place


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_is_refused_with_a_reason(text: str) -> None:
    try:
        found = http_url(f"http://{text}")
    except BadHttpUrl as error:
        assert str(error)
        return
    assert found.host == found.host.lower()
    assert "@" not in found.host
    assert "/" not in found.host
    assert found.target.startswith(("/", "?"))


def test_an_entry_without_a_port_names_none() -> None:
    assert [one.port for one in allowed_hosts(("engine.test", "engine.test:1", "[::1]:2", "::1"))] == [None, 1, 2, None]
