"""Reads settings: defaults < TOML file < INFAAS_SECTION__FIELD < INFAAS_SECTION__FIELD_FILE (secrets). Called once in __main__.

`services.core.settings` says which settings there are. A refusal names the file or variable, the setting, the reason and the default.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Struct

from bus.fields import fields_of, hints_of, parts_of
from bus.login import VARIABLES, Login
from services.core.settings import BusSettings, Settings
from services.core.toml import Location, TomlError, checked_at


class SettingsError(Exception):
    """A setting is unknown or wrong. The text names it and says why."""


# Short names that the contract fixes, beside the general INFAAS_SECTION__FIELD.
_SHORT = {
    "INFAAS_NATS_URL": "bus.url",
    **{variable: f"bus.{name}" for name, variable in VARIABLES.items()},
    "INFAAS_SQL_DSN": "store.dsn",
    "INFAAS_DATA_DIR": "data_dir",
    "INFAAS_PREFIX": "prefix",
    "INFAAS_GOAL": "goal",
    "INFAAS_LOG_LEVEL": "log_level",
}
# lists that may name files: whoever uses them reads the files again
_READ_AGAIN = ("gateway.tokens", "gateway.operator_tokens")
_SECRET = re.compile(r"nkey|token|password|secret|dsn$")  # in the key of a credential
_MAPS = ("worker.simulate", "prices.per_hour")  # in a variable: kind=number,kind=number
_TWICE = re.compile(r"Cannot (overwrite a value|declare .* twice|mutate immutable namespace .*?)(?= \(at )")
_LARGEST = 8 * 2**20  # bytes; larger files take seconds to read


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content. Raises TomlError, which names the file, and the line of a syntax error."""
    location = Location(str(path))
    try:
        with path.open("rb") as opened:
            content = opened.read(_LARGEST + 1)  # the file may be a device that never ends
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        location.refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(content) > _LARGEST:
        location.refuse(
            f"is larger than {_LARGEST >> 20} MiB, which no such file needs: long lists of counts or times are their own files"
        )
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        location.refuse(f"is not valid TOML: byte {error.start} is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        location.refuse(
            f"is not valid TOML: {_TWICE.sub('this is there twice: keys and [tables] once, [[blocks]] each', str(error))}"
        )
    except RecursionError:
        location.refuse("is not valid TOML: it is nested too deeply")
    except ValueError as error:  # a number of too many digits
        location.refuse(f"cannot be read: {error}")


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Build the settings. Raises SettingsError with a line for each that is wrong: the file or variable, the setting, why and the remedy."""
    tree, origins = _gathered(path, os.environ if environ is None else environ)
    try:
        return checked_at(tree, Location("", lax=True), Settings)
    except TomlError as error:
        raise SettingsError(
            "\n".join(
                origins.refusal(
                    Settings,
                    at.key,
                    reason.partition(", not ")[0] if _SECRET.search(at.key) or "@" in reason else reason,
                )
                for at, reason in error.wrong
            )
        ) from error


def given(path: Path | None, environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """What a file and variables set: value and origin by key. Credentials are left out."""
    tree, origins = _gathered(path and path.absolute(), environ)
    found = {key: (value, origins.origin(key)) for key, value in _leaves(tree)}
    return {
        key: ("(hidden)" if _SECRET.search(key) or "@" in str(value) else value, where)
        for key, (value, where) in found.items()
    }


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{above}.{name}".lstrip(".")
        if isinstance(value, dict):
            yield from _leaves(value, key)
        else:
            yield key, value


def _gathered(path: Path | None, environ: Mapping[str, str]) -> "tuple[dict[str, Any], Origins]":
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = read_toml(path)
        except TomlError as error:
            raise SettingsError(str(error)) from error
    origins = Origins(str(path or ""))
    for name, value in environ.items():
        where = _SHORT.get(name) or _path(name)
        if where is None or not value:
            continue
        origins.from_variable(where, name)
        try:
            _put(tree, where.split("."), value)
        except SettingsError as error:
            raise SettingsError(f"{name}: {error}") from error
    return tree, origins


def _path(name: str) -> str | None:
    """INFAAS_DISPATCHER__COUNT -> dispatcher.count; other variables are not ours."""
    if not name.startswith("INFAAS_") or "__" not in name:
        return None
    return name.removeprefix("INFAAS_").lower().replace("__", ".")


def _put(tree: dict[str, Any], keys: list[str], value: str) -> None:
    *sections, last = keys
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{'.'.join(keys)}: {section} is a value, not a section")
    if last.endswith("_file"):
        name, path = last.removesuffix("_file"), Path(value)
        try:
            text = path.read_text().strip()
            tree[name] = [str(path.absolute())] if ".".join([*sections, name]) in _READ_AGAIN else text
        except OSError as error:
            raise SettingsError(f"cannot read the file of {'.'.join(keys)}: {error.strerror}") from error
    else:
        is_map = ".".join(keys) in _MAPS or (keys[:2] == ["machines", "kinds"] and last in ("simulate", "accelerators"))
        tree[last] = _pairs(value, keys) if is_map else value


def _pairs(value: str, keys: list[str]) -> dict[str, str]:
    """A map from text like gpu=1,inferentia=2; its numbers are checked with everything else."""
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(key.strip() and sign for key, sign, _ in pairs):
        raise SettingsError(f"{'.'.join(keys)} must be written kind=number,kind=number, not {value!r}")
    return {key.strip(): number.strip() for key, _, number in pairs}


# Sections whose settings decide what is scaled and served where, and what they hold beside that: credentials and programs.
DECIDING = ("goal", "dispatcher", "executor", "monitor", "worker", "autoscaler", "machines", "prices", "jobs")
BESIDE = {"machines": ("swarm", "command"), "worker": ("executor_nkey", "monitor_nkey")}


def deciding(settings: Settings) -> dict[str, Any]:
    """These settings as a tree, without credentials and other programs' access."""
    tree: dict[str, Any] = msgspec.to_builtins(settings)
    for section, keys in BESIDE.items():
        for key in keys:
            del tree[section][key]
    return {name: tree[name] for name in DECIDING}


def login_of(settings: BusSettings) -> Login:
    """The credentials and TLS files, as `NatsBus.connect` takes them."""
    return Login(**{name: getattr(settings, name) for name in Login.__struct_fields__})


class Origins(Struct, eq=False):
    """Where each setting was given, and refusals that say so. place: the file, for all that no variable sets."""

    place: str
    _variables: dict[str, str] = {}

    def from_variable(self, key: str, variable: str) -> None:
        self._variables[key.removesuffix("_file")] = variable

    def refusal(self, settings: type[Struct], key: str, reason: str) -> str:
        """One line about the setting of this key. settings: the type, whose default the line names."""
        default = _default(settings, key)
        instead = f"; left out, it is {default}" if default else ""
        return f"{self._where(key)}: {reason}{instead}"

    def origin(self, key: str) -> str:
        """The variable or file that sets this key."""
        return next((self._variables[known] for known in _upwards(key) if known in self._variables), self.place)

    def _where(self, key: str) -> str:
        """Where this key was given: itself, the map that holds it, or something inside an unknown section."""
        if (origin := self.origin(key)) != self.place:
            return f"{origin} ({key})"
        inside = next((name for known, name in self._variables.items() if known.startswith(f"{key}.")), None)
        if inside is not None:
            return f"{inside} ({key})"
        return f"{self.place}: {key}" if self.place else key


def _upwards(key: str) -> list[str]:
    """The key, and those of the tables around it: prices.per_hour.gpu, prices.per_hour, prices."""
    parts = key.partition("[")[0].split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _inside(kind: Any, name: str) -> Any:
    """The annotation of what has this name in a section or a map; None: there is nothing."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return hints_of(kind).get(name)
    return get_args(kind)[1] if get_origin(kind) is dict else None


def _default(settings: type[Struct], key: str) -> str | None:
    *above, name = key.split(".")
    kind: Any = settings
    for one in above:
        kind = parts_of(_inside(kind, one))[0]
    known = fields_of(kind) if isinstance(kind, type) and issubclass(kind, Struct) else {}
    default = known[name].default if name in known else None
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default) if isinstance(default, int | str) else None
