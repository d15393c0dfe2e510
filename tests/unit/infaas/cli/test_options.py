"""Moments as people write them."""

from datetime import UTC, datetime, timedelta

import pytest

from infaas.cli.options import moment
from infaas.cli.output import Failure

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-17T08:00Z", datetime(2026, 11, 17, 8, tzinfo=UTC)),
        ("2026-11-17T08:00:30.5+02:00", datetime(2026, 11, 17, 6, 0, 30, 500000, tzinfo=UTC)),
        ("2026-11-17 08:00", datetime(2026, 11, 17, 8).astimezone()),
        ("2026-11-17", datetime(2026, 11, 17).astimezone()),
        ("now", NOW),
        ("-24h", NOW - timedelta(hours=24)),
        ("-90m", NOW - timedelta(minutes=90)),
        ("-1.5d", NOW - timedelta(hours=36)),
        ("-2w", NOW - timedelta(weeks=2)),
    ],
)
def test_a_moment(text, expected):
    assert moment(text, "--from", NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "yesterday", "24h", "-h", "2026-13-01", "-1e9y", "-99999999999w", "nan"])
def test_what_is_none_names_option_and_remedy(text):
    with pytest.raises(Failure, match=r"--to .*: is (no time: write 2026-11-17|too long ago)") as refused:
        moment(text, "--to", NOW)
    assert refused.value.code == 2
