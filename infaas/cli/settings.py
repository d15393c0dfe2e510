"""`infaas settings`: every setting with its default, bounds and meaning, as a table, as JSON, or as a file for --config."""

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bus.fields import meant
from bus.login import SystemAddress
from infaas.cli.options import DataDir, Json
from infaas.cli.output import Column, line_width, print_json, print_table, show, usage
from infaas.connecting import data_place, read_endpoints
from services.core.settings import Setting, Settings, described
from services.core.settings.fields import NAME_IN_KEY
from services.core.toml import value_text
from services.shell.settings import given

_LEAST_WIDTH = 60
_INDENT = "    "
_LEFT_OUT = ("bus.url",)  # a file that names it has `infaas up` use that server instead of its own


def settings(
    section: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    toml: Annotated[bool, Parameter(name="--toml", negative="")] = False,
    running: Annotated[bool, Parameter(name="--running", negative="")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Print every setting with its default, bounds and meaning. Needs no system.

    Parameters
    ----------
    section
        Print only this section, as `monitor` or `machines.kinds`.
    toml
        Print a commented TOML file with all defaults, for `infaas up --config FILE`.
    running
        Print what the system on this machine was started with: value, default, where the value comes from, and what its file
        would make of it after a restart. All need one, but files that gateway.tokens and gateway.operator_tokens name, which are read again.

    """
    if toml and (json or running):
        usage(f"--toml and --{'json' if json else 'running'}: choose one")
    if running:
        rows = _running(read_endpoints(data_place(data_dir)), section or "", section is not None or json)
        titles = ("setting", "value", "default", "from", "after_restart")
        columns = [Column(one.replace("_", " "), one, flows=one == "from") for one in titles]
        show(rows, json, lambda rows: print_table(rows, columns, "every setting has its default"))
        return
    shown = [one for one in described(Settings) if section is None or f"{one.key}.".startswith(f"{section}.")]
    if not shown:
        usage(
            f"there is no section {section!r}: `infaas settings` shows them all{meant(section or '', {one.key.partition('.')[0] for one in described(Settings)})}"
        )
    if toml:
        print(as_toml(shown))
    elif json:
        print_json([{**one._asdict(), "variable": f"INFAAS_{one.key.upper().replace('.', '__')}"} for one in shown])
    else:
        for line in as_text(shown, line_width()):
            print(line)


def _running(address: SystemAddress, section: str, every: bool) -> list[dict[str, Any]]:
    """What was given at the start or is in the file now. every: all others as well. after_restart: where it would be another value."""
    file = Path(address.config) if address.config else None
    now = given(file, {}) if file is not None else {}
    rows: dict[str, dict[str, Any]] = {}
    for key, (value, origin) in address.given.items():
        rows[key] = {"setting": key, "value": value, "default": _default_of(key), "from": origin}
        if origin == address.config and (key not in now or now[key][0] != value):
            rows[key]["after_restart"] = now[key][0] if key in now else _default_of(key)
    for key, (value, _) in now.items():
        rows.setdefault(
            key,
            {
                "setting": key,
                "value": (was := _default_of(key)),
                "default": was,
                "from": "default",
                "after_restart": value,
            },
        )
    if every:
        for one in described(Settings):
            if NAME_IN_KEY not in one.key:
                rows.setdefault(
                    one.key, {"setting": one.key, "value": one.default, "default": one.default, "from": "default"}
                )
    return [row for row in rows.values() if not section or f"{row['setting']}.".startswith(f"{section}.")]


def _default_of(key: str) -> Any:
    """Also of a setting inside a map, with any name in its key."""
    return next(
        (one.default for one in described(Settings) if re.fullmatch(one.key.replace(NAME_IN_KEY, "[^.]+"), key)), None
    )


def as_text(shown: list[Setting], width: int) -> Iterator[str]:
    """Two lines a setting: key, default and bounds; beneath, its meaning. Where that is too wide, the bounds are beneath, too."""
    rows = [("key", "default", "bounds"), *((one.key, _default(one), one.bounds or one.kind) for one in shown)]
    first, second = (max(len(row[n]) for row in rows) for n in (0, 1))
    narrow = first + second + max(len(row[2]) for row in rows) + 4 > width
    for row, one in zip(rows, [None, *shown], strict=True):
        yield f"{row[0]}  {row[1]}" if narrow else f"{row[0]:{first}}  {row[1]:{second}}  {row[2]}"
        if one is not None:
            meaning = f"({row[2]}) {one.meaning}" if narrow else one.meaning
            yield from textwrap.wrap(
                meaning, max(_LEAST_WIDTH, width), initial_indent=_INDENT, subsequent_indent=_INDENT
            )


def as_toml(shown: list[Setting]) -> str:
    """A file that changes nothing.

    Settings inside maps are comments, with NAME for the name. So are those that change something when they are given at all.
    """
    lines = ["# Settings of INFaaS with their defaults. Keep the lines that you change, and leave the others out.", ""]
    for table, members in groupby(shown, key=lambda one: one.key.rpartition(".")[0]):
        off = "# " if NAME_IN_KEY in table else ""
        if table:
            lines.append(f"{off}[{table}]")
        for one in members:
            text = f"{one.meaning} ({one.bounds})" if one.bounds else one.meaning
            lines += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")
            mark = "# " if one.key in _LEFT_OUT else off
            lines.append(
                f"{mark}{one.key.rpartition('.')[2]} = {'...' if one.default is None else value_text(one.default)}"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def _default(one: Setting) -> str:
    return "(must be given)" if one.default is None else value_text(one.default)
