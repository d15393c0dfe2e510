"""Options that several commands share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from infaas.cli.output import usage


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
