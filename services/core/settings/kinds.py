"""Bounds and types that several sections share, and texts that stand for lists."""

import shlex
from typing import Annotated

from bus.subjects import NAME
from services.core.emulation import KINDS, MOST
from services.core.settings.fields import Number, Text

DAY = 86400.0

_NAME = NAME.pattern.removesuffix(r"\Z")
TOKEN = Text(_NAME, "1 to 64 letters, digits, - or _, a letter or digit first")
NAME_OR_EMPTY = Text(f"({_NAME})?", "empty, or 1 to 64 letters, digits, - or _, a letter or digit first")
SOME_TEXT = Text(r"(?s).*\S.*", "some text")
SECONDS = Number(above=0, most=DAY)
WAIT = Number(most=365 * DAY)
SHARE = Number(most=1)
PART = Number(above=0, most=1)
COUNT = Number(1, 1e9)
AMOUNT = Number(most=1e9)
PORT = Number(1, 65535)
MEMORY = Number(most=1e8, zero="what the machine has")
CORES = Number(most=4096, zero="what the machine has")
_DEVICES = Number(most=MOST)

Texts = tuple[str, ...] | str  # a text in a variable: see `listed` and `words`
Named = Annotated[str, TOKEN]
Simulated = dict[
    Annotated[str, Text("|".join(KINDS), f"a kind that can be simulated ({', '.join(KINDS)})")],
    Annotated[int, _DEVICES],
]
Accelerators = dict[
    Annotated[str, Text("|".join(KINDS), f"a kind of accelerator ({', '.join(KINDS)})")], Annotated[int, _DEVICES]
]


def listed(value: Texts) -> tuple[str, ...]:
    """A setting that may be a list or, in a variable, a text with commas or white space between the items."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def words(command: Texts) -> tuple[str, ...]:
    """A command's words; where it is one text, as in a variable, split as a shell would. Raises ValueError."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command
