"""Which SQL table each kind of event goes to, and an event as one row of it. Columns are the event's fields, by name."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from bus.messages.events import EVENTS, Event

E = TypeVar("E", bound=Event)

NAMES = {
    "state": "infaas.state_events",
    "outcome": "infaas.query_outcomes",
    "cost": "infaas.cost_events",
    "scaling": "infaas.scaling_events",
    "worker": "infaas.worker_events",
    "worker-sample": "infaas.worker_samples",
    "instance-sample": "infaas.instance_samples",
    "registration": None,  # only the last status is kept
}
# Integers are int8: psycopg's binary int4 silently wraps what is too large, its int8 raises.
_TYPES = {"str": "text", "int": "int8", "float": "float8", "bool": "bool", "bytes": "uuid"}
# Texts that users write or programs make up: PostgreSQL takes no NUL, and nobody's row may get lost for having one.
_FREE = ("id", "context", "input_digest", "reason")


class Batch(Struct, Generic[E], frozen=True):
    """The body of an event message. id: unique for ever, of all batches of all senders."""

    id: str
    rows: list[E]


class Table(Struct, frozen=True):
    """One kind of event. types: PostgreSQL's, by column. decode: of a message's body; raises what msgspec raises."""

    kind: str
    name: str | None
    columns: tuple[str, ...]
    types: tuple[str, ...]
    decode: Callable[[bytes], Batch[Any]]
    values: Callable[[Event], list[Any]]


def moment(seconds: float) -> datetime:
    """Unix seconds as PostgreSQL takes them; raises ValueError or OverflowError for what is no time."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except OSError as error:
        raise OverflowError(f"{seconds} is no time") from error


def _values(columns: tuple[str, ...], types: tuple[str, ...]) -> Callable[[Event], list[Any]]:
    ids = [i for i, kind in enumerate(types) if kind == "uuid"]
    free = [i for i, column in enumerate(columns) if column in _FREE]
    fields = msgspec.structs.astuple

    def values(event: Event) -> list[Any]:
        """The event as psycopg takes it; raises ValueError or OverflowError for a time or uid that is none."""
        row = list(fields(event))
        row[0] = moment(row[0])
        for i in ids:
            if row[i] is not None:
                row[i] = UUID(bytes=row[i])
        for i in free:
            text = row[i]
            if text is not None and "\0" in text:
                row[i] = text.replace("\0", "\ufffd")
        return row

    return values


def _table(event: type[Event]) -> Table:
    columns = event.__struct_fields__
    assert columns[0] == "time"
    types = ["timestamptz"]
    for field in msgspec.structs.fields(event)[1:]:
        kinds = [kind for kind in getattr(field.type, "__args__", (field.type,)) if kind is not type(None)]
        types.append(_TYPES[kinds[0].__name__])
    decode = msgspec.msgpack.Decoder(Batch[event]).decode  # type: ignore[valid-type]
    return Table(event.kind, NAMES[event.kind], columns, tuple(types), decode, _values(columns, tuple(types)))


TABLES: dict[str, Table] = {event.kind: _table(event) for event in EVENTS}
