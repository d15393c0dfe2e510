"""Options that several commands share."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from infaas.cli.output import usage

if TYPE_CHECKING:
    from infaas.queries import Needs


def whole(_: type, tokens: Sequence[Any]) -> int:
    """As it stands: cyclopts would round 1.5 to 2 without a word. It puts the option's name before what this says."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, not {text!r}") from None


Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document and nothing else.")]
DataDir = Annotated[
    Path | None, Parameter(name="--data-dir", help="Directory of the `infaas up` system to use; else INFAAS_DATA_DIR.")
]
Whole = Annotated[int, Parameter(converter=whole)]
Names = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]


def names(option: str, values: list[str] | None, what: str) -> tuple[str, ...]:
    """What follows an option, nothing where it was left out; ends the command where it stands there alone.

    what: that must follow it, as "names of policies".
    """
    if values is not None and not values:
        usage(f"{option}: which? Write {what} after it")
    return tuple(values or ())


def json_or_text(text: str) -> Any:
    """A value as JSON; a text that is none stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- Moments as options say them: a date, a time, or so long ago.

_AGO = re.compile(r"-(\d+(?:\.\d+)?)(s|m|min|h|d|w)\Z")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def moment(text: str, option: str, now: datetime) -> float:
    """Unix seconds. A date is its midnight; what names no time zone is local time. Ends the command where it makes no sense."""
    text = text.strip()
    if text == "now":
        return now.timestamp()
    if ago := _AGO.match(text):
        try:
            return (now - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])).timestamp()
        except OverflowError:
            usage(f"{option} {text}: is too long ago")
    try:
        found = datetime.fromisoformat(text)
        return (found.astimezone() if found.tzinfo is None else found).timestamp()
    except (ValueError, OverflowError):
        usage(f"{option} {text}: is no time: write 2026-11-17, 2026-11-17T08:00, 2026-11-17T08:00Z, -24h or now")


# -- The requirements of a query as options, the same for `query`, `explain` and `bench`; and how a refusal is told.


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NeedOptions:
    """What a query demands; what is left out is not demanded."""

    latency_ms: Annotated[float | None, Parameter(help="Answer within so many milliseconds.")] = None
    accuracy: Annotated[float | None, Parameter(help="Measured accuracy of at least this, 0 to 1.")] = None
    cost: Annotated[float | None, Parameter(help="At most so many US$ per 1,000 queries.")] = None
    model: Annotated[str | None, Parameter(help="Only this model.")] = None
    model_version: Annotated[str | None, Parameter(help="Only this version of the model.")] = None
    variant: Annotated[str | None, Parameter(help="Only this variant.")] = None
    context: Annotated[str | None, Parameter(help="Key for personalised selection.")] = None
    priority: Annotated[Whole | None, Parameter(help="1 (highest) to 9.")] = None

    def to_needs(self) -> "Needs":
        """The requirements as the client takes them."""
        from infaas.queries import Needs  # noqa: PLC0415  (most commands send no query)

        return Needs(
            latency_ms=self.latency_ms,
            accuracy=self.accuracy,
            cost=self.cost,
            model=self.model,
            version=self.model_version,
            variant=self.variant,
            context=self.context,
            priority=self.priority,
        )


NO_NEEDS = NeedOptions()
