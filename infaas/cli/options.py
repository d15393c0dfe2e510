"""Options that several commands share, and how their values are read."""

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from datetime import datetime, timedelta
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter
from msgspec import Struct

from bus.fields import Field, fields_of, meant
from bus.messages.catalog import METRICS, is_error
from bus.messages.public import Requirements
from infaas.cli.output import usage

if TYPE_CHECKING:
    from infaas.queries import Needs


def whole(_: type, tokens: Sequence[Any]) -> int:
    """A whole number. cyclopts itself would silently round 1.5 to 2. It puts the option's name before this error's text."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, not {text!r}") from None


def imported(named: str) -> Any:
    """What MODULE:FUNCTION names, also of a module in the working directory. Ends the command (bad usage) if there is none."""
    module, _, function = named.partition(":")
    if not module or not function:
        usage(f"{named!r} names no function: write MODULE:FUNCTION, as drivers:cascade for drivers.py here")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return attrgetter(function)(import_module(module))
    except (Exception, SystemExit) as error:  # the module is the user's own code
        usage(f"cannot import {named}: {type(error).__name__}: {error}")


Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document and nothing else.")]
Wide = Annotated[
    bool, Parameter(name="--wide", negative="", help="Show all columns, also beyond the terminal's width.")
]
DataDir = Annotated[
    Path | None,
    Parameter(
        name="--data-dir",
        help="Data directory of the system to use. Default: INFAAS_DATA_DIR, INFAAS_NATS_URL, ./.infaas, then the default ports.",
    ),
]
Whole = Annotated[int, Parameter(converter=whole)]
Names = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]


def names(option: str, values: list[str] | None, what: str) -> tuple[str, ...]:
    """The values of an option; none if it was left out. Ends the command if the option has no value.

    what: the kind of values that it takes, as "names of policies".
    """
    if values is not None and not values:
        usage(f"{option} needs a value: write {what} after it")
    return tuple(values or ())


def json_or_text(text: str) -> Any:
    """The value of a JSON text; a text that is no JSON stands for itself. One that begins as a list or an object is one."""
    try:
        return json.loads(text)
    except ValueError as error:
        if text.lstrip()[:1] in ("{", "["):
            usage(f"{text} is no JSON ({error}): close what it opens, and put names into double quotes")
        return text


_AGO = re.compile(r"-(\d+(?:\.\d+)?)(s|m|min|h|d|w)\Z")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def moment(text: str, option: str, now: datetime) -> float:
    """A point in time of an option, in Unix seconds. A date means its midnight; a time without zone is local time.

    Ends the command (bad usage) if the text is no time.
    """
    text = text.strip()
    if text == "now":
        return now.timestamp()
    if ago := _AGO.match(text):
        try:
            return (now - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])).timestamp()
        except OverflowError:
            usage(f"{option} {text}: is too long ago: use a smaller number")
    try:
        found = datetime.fromisoformat(text)
        return (found.astimezone() if found.tzinfo is None else found).timestamp()
    except (ValueError, OverflowError):
        usage(f"{option} {text}: is no time: write 2026-11-17, 2026-11-17T08:00, 2026-11-17T08:00Z, -24h or now")


Verbs = Mapping[str, tuple[str | None, Collection[str]]]  # what the argument of each is, and the options that it takes


def check_verb(verb: str, target: str | None, verbs: Verbs, given: Mapping[str, Any]) -> None:
    """End the command (bad usage) unless there is this verb, with such an argument and options. given: options of some verbs, by name."""
    if verb not in verbs:
        usage(f"there is no verb {verb!r}: use {', '.join(verbs)}{meant(verb, verbs)}")
    what, options = verbs[verb]
    for option, value in given.items():
        if value and option not in options:
            takers = " and ".join(one for one, (_, others) in verbs.items() if option in others)
            usage(f"{verb} takes no {option}: it is an option of {takers}")
    if (what is None) != (target is None):
        usage(f"{verb} needs {what}" if target is None else f"{verb} takes no argument")


def options_of(
    message: type[Struct], *names: str, leave: Collection[str] = (), named: Mapping[str, list[str]] = {}
) -> list[tuple[str, Any, Any]]:
    """Options for the fields of a message, as `make_dataclass` takes fields: their meanings are the helps, their bounds are checked.

    names: of which fields; none: of all. leave: fields without an option. named: other names of options.
    """
    fields = fields_of(message)
    found = []
    for field in (fields[name] for name in names or fields if name not in leave):
        kind = Whole if field.type is int else field.type
        parameter = Parameter(
            name=named.get(field.name),
            help=field.meaning,
            validator=_within(field),
            negative="",
            consume_multiple=field.type == list[str],
        )
        default = None if field.absent else field.default
        found.append((field.name, Annotated[kind | None if field.absent else kind, parameter], default))
    return found


def options_class(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """A class of options, with which a command has all of them as one argument."""
    made = make_dataclass(name, fields, namespace={"__module__": __name__}, frozen=True, kw_only=True)
    return Parameter(name="*")(made)


def _within(field: Field) -> Callable[[type, Any], None]:
    """The validator of an option: cyclopts puts the option's name before the error's text."""

    def check(_: type, value: Any) -> None:
        for one in value if isinstance(value, list) else [value]:
            wrong = None if field.rule is None or one is None else field.rule.refuse(one)
            if wrong is not None:
                raise ValueError(wrong)

    return check


_BY_NAME = [(name, what) for name, what in METRICS.items() if name not in ("top1", "top5")]
_of_needs: Any = make_dataclass(
    "_of_needs",
    [
        *options_of(Requirements, leave=["deadline"], named={"version": ["--version", "--model-version"]}),
        *(
            (
                name,
                Annotated[float | None, Parameter(help=f"{'Largest' if is_error(name) else 'Least'} {name}: {what}.")],
                None,
            )
            for name, what in _BY_NAME
        ),
    ],
    frozen=True,
    kw_only=True,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NeedOptions(_of_needs):  # type: ignore[misc]  # made of the message's fields
    """The requirements of a query, for `query`, `explain` and `bench`: those of its message. None: no such requirement."""

    def to_needs(self) -> "Needs":
        """The requirements as the client takes them."""
        return cast("Needs", asdict(self))


NO_NEEDS = NeedOptions()
