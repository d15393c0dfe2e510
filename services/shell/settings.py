"""Reads settings: defaults < TOML file < INFAAS_SECTION__FIELD < INFAAS_SECTION__FIELD_FILE (secrets). Called once in __main__.

`services.core.settings` says which settings there are. A refusal names the file or variable, the setting, the reason and the default.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct

from bus.fields import faults, fields_of, hints_of, meant, parts_of
from bus.login import VARIABLES, Login
from services.core.settings import BusSettings, Settings


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
_WORDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`null`": "nothing",
}


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Build the settings. Raises SettingsError with a line for each that is wrong: the file or variable, the setting, why and the remedy."""
    tree, origins = _gathered(path, os.environ if environ is None else environ)
    wrong: list[tuple[str, str, Any]] = []
    right = _right(Settings, tree, "", wrong)
    said = [origins.of_invalid(Settings, *one) for one in wrong]
    settings = msgspec.convert({} if right is UNSET else right, Settings, strict=False)
    said += [origins.refusal(Settings, fault.key, fault.reason) for fault in faults(settings)]
    if said:
        raise SettingsError("\n".join(said))
    return settings


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
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not valid TOML: {error}") from error
        except RecursionError as error:
            raise SettingsError(f"{path} is not valid TOML: it is nested too deeply") from error
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

    def of_invalid(self, settings: type[Struct], key: str, reason: str, kind: Any) -> str:
        """The same for a value that msgspec does not take. reason: its words. kind: of the value."""
        unknown = re.search(r"unknown field `(.*)`", reason)
        if unknown:
            name = unknown.group(1)
            key = f"{key}.{name}".lstrip(".")
            return f"{self._where(key)}: there is no such setting{meant(name, hints_of(kind))}"
        missing = re.search(r"missing required field `(.*)`", reason)
        if missing:
            key, reason = f"{key}.{missing.group(1)}".lstrip("."), "is missing"
        invalid = re.fullmatch(r"Invalid enum value (.*)", reason)
        if invalid:
            kinds = [parts_of(one)[0] for one in (kind, *get_args(kind))]
            known = ["a whole number" for one in kinds if one is int]
            known += sorted(str(value) for one in kinds if get_origin(one) is Literal for value in get_args(one))
            reason = f"must be {' or '.join(known) if known else 'something else'}, not {invalid.group(1)}"
        for theirs, ours in _WORDS.items():
            reason = reason.replace(theirs, ours)
        return self.refusal(settings, key, reason[:1].lower() + reason[1:])

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
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _right(hint: Any, value: Any, key: str, wrong: list[tuple[str, str, Any]]) -> Any:
    """The value without what is wrong by itself; UNSET if nothing is left. wrong: gets keys, what msgspec says, and types. hint: of the value."""
    kind = parts_of(hint)[0]
    right, before = value, len(wrong)
    if isinstance(value, dict):
        right = {}
        for name, one in value.items():
            inside = _inside(kind, name)
            if inside is None and isinstance(kind, type) and issubclass(kind, Struct):
                wrong.append((key, f"Object contains unknown field `{name}`", kind))
            elif (
                kept := one if inside is None else _right(inside, one, f"{key}.{name}".lstrip("."), wrong)
            ) is not UNSET:
                right[name] = kept
    try:
        msgspec.convert(right, kind, strict=False)
    except msgspec.ValidationError as error:
        if right == value or len(wrong) == before:  # else it is missing because it was wrong
            wrong.append((key, str(error).partition(" - at ")[0], kind))
        return UNSET
    return right


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
