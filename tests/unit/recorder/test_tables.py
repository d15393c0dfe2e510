from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from bus.codec import encode
from bus.messages.events import EVENTS, OutcomeEvent
from services.recorder.tables import TABLES
from tests.support.data.events import event, outcome


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.kind)
def test_a_batch_is_read_back_as_it_was_sent(kind: type) -> None:
    table = TABLES[kind.kind]
    rows = [event(kind), event(kind)]
    batch = table.decode(encode({"id": "b1", "rows": rows, "later": "addition"}))
    assert (batch.id, batch.rows) == ("b1", rows)
    assert len(table.values(rows)[0]) == len(table.columns) == len(table.types) == len(table.sent)


def test_rows_of_an_older_sender_lack_the_newer_fields() -> None:
    row = msgspec.to_builtins(outcome(), builtin_types=(bytes,))
    row.pop("stage", None)
    batch = TABLES["outcome"].decode(encode({"id": "b1", "rows": [row]}))
    assert batch.rows[0].stage is None


def test_times_are_sent_as_microseconds_since_2000_and_nul_goes() -> None:
    table = TABLES["outcome"]
    sent = outcome(time=1.5, uid=bytes(16), parent=None, id="a\0", context="fine")
    row = dict(zip(OutcomeEvent.__struct_fields__, table.values([outcome(), sent])[1], strict=True))
    since_2000 = datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)
    assert (row["time"], row["uid"]) == (since_2000 / timedelta(microseconds=1), bytes(16))
    assert (row["parent"], row["id"], row["context"]) == (None, "a\ufffd", "fine")


def test_of_texts_that_senders_make_up_a_thousand_characters_are_kept() -> None:
    rows = TABLES["outcome"].values([outcome(id="i" * 500_000, app="a\0" * 600), outcome(id="short")])
    first, second = (dict(zip(OutcomeEvent.__struct_fields__, row, strict=True)) for row in rows)
    assert (first["id"], first["app"]) == ("i" * 1000, "a\ufffd" * 500)
    assert second["id"] == "short"


@pytest.mark.parametrize(
    "bad", [{"uid": b"short"}, {"time": float("nan")}, {"time": float("inf")}, {"parent": b""}], ids=str
)
def test_what_is_no_time_or_uid_is_said_at_once(bad: dict[str, object]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        TABLES["outcome"].values([outcome(), outcome(**bad)])
