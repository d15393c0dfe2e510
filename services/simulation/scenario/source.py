"""Reading a scenario's file as TOML."""

import tomllib
from pathlib import Path
from typing import Any

from services.simulation.scenario.place import Place

_LARGEST = 8 * 2**20  # bytes; reading as much as TOML takes seconds


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content; raises ScenarioError that names the file, and the line where its syntax is wrong."""
    place = Place(str(path))
    try:
        with path.open("rb") as opened:
            content = opened.read(_LARGEST + 1)  # the file may be a device that never ends
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        place.refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(content) > _LARGEST:
        place.refuse(
            f"is larger than {_LARGEST >> 20} MiB, which no scenario needs: long lists of counts or times are their own files"
        )
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        place.refuse(f"is not valid TOML: byte {error.start} is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        place.refuse(f"is not valid TOML: {error}")
    except RecursionError:
        place.refuse("is not valid TOML: it is nested too deeply")
    except ValueError as error:  # a number of too many digits
        place.refuse(f"cannot be read: {error}")
