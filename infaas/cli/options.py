"""Options that several commands share, and how their values are read."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

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
    """The value of a JSON text; a text that is no JSON stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NeedOptions:
    """The requirements of a query, for `query`, `explain` and `bench`. None: no such requirement."""

    latency_ms: Annotated[float | None, Parameter(help="Latency objective of a query, in milliseconds.")] = None
    accuracy: Annotated[
        float | None, Parameter(help="Least accuracy of the variant, 0 to 1, as measured at registration.")
    ] = None
    mae: Annotated[
        float | None,
        Parameter(help="Largest mean absolute error, in the unit of the labels, where models are measured by mae."),
    ] = None
    rmse: Annotated[
        float | None,
        Parameter(
            help="Largest root of the mean squared error, in the unit of the labels, where models are measured by rmse."
        ),
    ] = None
    cost: Annotated[
        float | None, Parameter(help="Highest cost, in US$ per 1,000 answers: a thousandth of the tables' US$/million.")
    ] = None
    model: Annotated[str | None, Parameter(help="Use only this model.")] = None
    version: Annotated[
        str | None, Parameter(name=["--version", "--model-version"], help="Use only this version of the model.")
    ] = None
    variant: Annotated[str | None, Parameter(help="Use only this variant.")] = None
    context: Annotated[str | None, Parameter(help="Key for personalised selection.")] = None
    confidence: Annotated[
        float | None, Parameter(help="Least share of an ensemble's models that agree with the answer, 0 to 1.")
    ] = None
    priority: Annotated[
        Whole | None,
        Parameter(
            validator=Number(gte=1, lte=9),
            help="Priority, 1 (highest) to 9. Where not all queries can be in time, those with the larger number give way.",
        ),
    ] = None

    def to_needs(self) -> "Needs":
        """The requirements as the client takes them."""
        from infaas.queries import Needs  # noqa: PLC0415  (most commands send no query)

        return Needs(
            latency_ms=self.latency_ms,
            accuracy=self.accuracy,
            mae=self.mae,
            rmse=self.rmse,
            cost=self.cost,
            model=self.model,
            version=self.version,
            variant=self.variant,
            context=self.context,
            confidence=self.confidence,
            priority=self.priority,
        )


NO_NEEDS = NeedOptions()
