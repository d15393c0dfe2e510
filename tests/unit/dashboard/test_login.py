"""Who may see the dashboard once they have logged in."""

import pytest

from dashboard.login import allowed


@pytest.mark.parametrize(
    ("email", "allow", "may"),
    [
        ("ann@example.org", [], True),
        (None, [], True),
        ("ann@example.org", ["ann@example.org"], True),
        ("Ann@Example.org", ["ann@example.org"], True),
        ("ann@example.org", ["@example.org"], True),
        ("ann@evil-example.org", ["@example.org"], False),
        ("ann@example.org.evil.net", ["@example.org"], False),
        ("bob@example.org", ["ann@example.org"], False),
        (None, ["@example.org"], False),
        ("", ["ann@example.org"], False),
    ],
)
def test_who_is_allowed(email: str | None, allow: list[str], may: bool) -> None:
    assert allowed(email, allow) is may
