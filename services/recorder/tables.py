"""The SQL table of each kind of event, and an event as one row of it. The columns have the names of the event's fields."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from bus.messages.events import EVENTS, Event
from bus.messages.public import MOST_TEXT

E = TypeVar("E", bound=Event)

NAMES = {
    "state": "infaas.state_events",
    "outcome": "infaas.query_outcomes",
    "cost": "infaas.cost_events",
    "scaling": "infaas.scaling_events",
    "shadow": "infaas.shadow_events",
    "worker": "infaas.worker_events",
    "worker-sample": "infaas.worker_samples",
    "instance-sample": "infaas.instance_samples",
    "feedback": "infaas.feedback",
    "selection": "infaas.selection_events",
    "objective": "infaas.objective_events",
    "pipeline": "infaas.pipeline_events",
    "drift": "infaas_internal.drift_rows",
    "release": "infaas.release_events",
    "client-error": "infaas.client_errors",
    "registration": None,  # only its last status is kept
    "job": None,  # the same
}
# By field type: the column's type, and the type whose binary form is sent. Binary COPY checks no types: a timestamptz may come as its
# microseconds since 2000 and a uuid as its 16 bytes, without a datetime and a UUID in between, which saves 2 us a row. Integers are int8:
# psycopg's binary int4 silently wraps numbers that are too large, its int8 raises an error.
_TYPES = {
    "str": ("text", "text"),
    "int": ("int8", "int8"),
    "float": ("float8", "float8"),
    "bool": ("bool", "bool"),
    "bytes": ("uuid", "bytea"),
}
_EPOCH = 946684800.0  # 2000-01-01 UTC in Unix seconds
# Texts that users or programs make up. PostgreSQL takes no NUL, and no row may get lost because it contains one.
_FREE = (
    "app",
    "id",
    "context",
    "input_digest",
    "label",
    "reason",
    "input",
    "output",
    "pipeline",
    "vertex",
    "column_name",
)
_MOMENTS = ("since", "ended", "asked")  # beside the first column; of tables with rows


class Batch(Struct, Generic[E], frozen=True):
    """The body of an event message. id: unique among all batches of all senders, for ever."""

    id: str
    rows: list[E]


class EventTable(Struct, frozen=True):
    """One kind of event.

    types: PostgreSQL's, by column. sent: the types that `values` has them in, for binary COPY. decode: of a message's body;
    raises what msgspec raises.
    """

    kind: str
    name: str | None
    columns: tuple[str, ...]
    types: tuple[str, ...]
    sent: tuple[str, ...]
    decode: Callable[[bytes], Batch[Any]]
    values: Callable[[Sequence[Event]], list[tuple[Any, ...]]]


def moment(seconds: float) -> datetime:
    """Unix seconds as PostgreSQL takes them; raises ValueError or OverflowError for what is no time."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except OSError as error:
        raise OverflowError(f"{seconds} is no time") from error


def printable(text: str) -> str:
    """The text without NUL, which PostgreSQL does not take."""
    return text.replace("\0", "\ufffd")


def _values(columns: tuple[str, ...], types: tuple[str, ...]) -> Callable[[Sequence[Event]], list[tuple[Any, ...]]]:
    ids = [i for i, kind in enumerate(types) if kind == "uuid"]
    free = [i for i, column in enumerate(columns) if column in _FREE]
    moments = [i for i, kind in enumerate(types) if i and kind == "timestamptz"]
    fields = msgspec.structs.astuple

    def values(events: Sequence[Event]) -> list[tuple[Any, ...]]:
        """The events in the types `sent`; raises ValueError or OverflowError for a time or uid that is none."""
        rows = [(round((row[0] - _EPOCH) * 1e6), *row[1 : len(columns)]) for row in map(fields, events)]
        for i in moments:
            rows = [(*row[:i], row[i] and round((row[i] - _EPOCH) * 1e6), *row[i + 1 :]) for row in rows]
        for i in ids:
            lengths = {len(row[i]) for row in rows if row[i] is not None}
            if lengths - {16}:
                raise ValueError(f"{columns[i]} has {max(lengths - {16})} bytes, not 16")
        for i in free:
            texts = [row[i] for row in rows if row[i]]
            if "\0" in "".join(texts) or max(map(len, texts), default=0) > MOST_TEXT:
                rows = [(*row[:i], row[i] and printable(row[i][:MOST_TEXT]), *row[i + 1 :]) for row in rows]
        return rows

    return values


def _table(event: type[Event]) -> EventTable:
    columns = tuple(name for name in event.__struct_fields__ if name != "mistake")  # it is last, and decides the table
    assert columns[0] == "time"
    types, sent = ["timestamptz"], ["int8"]
    for field in msgspec.structs.fields(event)[1 : len(columns)]:
        kinds = [kind for kind in getattr(field.type, "__args__", (field.type,)) if kind is not type(None)]
        column, binary = ("timestamptz", "int8") if field.name in _MOMENTS else _TYPES[kinds[0].__name__]
        types.append(column)
        sent.append(binary)
    decode = msgspec.msgpack.Decoder(Batch[event]).decode  # type: ignore[valid-type]
    values = _values(columns, tuple(types))
    return EventTable(event.kind, NAMES[event.kind], columns, tuple(types), tuple(sent), decode, values)


TABLES: dict[str, EventTable] = {event.kind: _table(event) for event in EVENTS}
