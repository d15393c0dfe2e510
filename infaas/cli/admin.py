"""`infaas app|model|worker|job VERB`: commands grouped by what they are about, and `infaas admin VERB`, an operator's changes by their full names.

Operators' verbs, their options and help are those of the messages in bus/messages/verbs.py, which are sent as `infaas.admin.<verb>`. Which
other commands a group has says the table of commands (infaas/cli/__init__.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields as options_in
from pathlib import Path
from typing import Annotated, Any, get_origin

from cyclopts import App, Parameter
from msgspec import NODEFAULT, Struct

from bus.fields import Field, fields_of
from bus.messages.verbs import ADMIN_VERBS, AdminVerb, body_of
from infaas.cli import COMMANDS
from infaas.cli.options import DataDir, Json, Names, Whole, Wide, json_or_text, names, options_class
from infaas.cli.output import Column, fail, print_table, render_done, show, usage, when
from infaas.connecting import with_client

Flag = Annotated[bool, Parameter(negative="")]
NAMES_OF = {"version": ["--version", "--model-version"]}


def _in_options(verb: type[AdminVerb]) -> bool:
    """Whether options can say all that it takes; other verbs take files (infaas/cli/pipeline.py), or nothing but switches (infaas/cli/parts.py)."""
    kinds = [one.type for one in fields_of(verb).values()]
    return kinds != [bool] and not any(
        get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Struct)) for kind in kinds
    )


VERBS = {verb: kind for verb, kind in ADMIN_VERBS.items() if _in_options(kind)}


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _type_of(field: Field) -> Any:
    if field.type is int:
        return Whole | None
    if field.type is bool:
        return Flag
    if get_origin(field.type) is list:
        return Names if field.type == list[str] else str | None
    return str | None if field.type is Any else field.type | None


def _help_of(kind: type[AdminVerb], field: Field) -> str:
    """What an option means, and whether the verb needs it."""
    if field.name in kind.one_of:
        return f"{field.meaning} Needed: one of {', '.join(map(_option, kind.one_of))}."
    return f"{field.meaning}{' Needed.' * (field.default is NODEFAULT)}"


def _options(kind: type[AdminVerb], leave: str) -> Any:
    """The options of a verb: its fields but one, and what null takes back."""
    made: list[tuple[str, Any, Any]] = []
    for field in fields_of(kind).values():
        if field.name != leave:
            parameter = Parameter(name=NAMES_OF.get(field.name), help=_help_of(kind, field))
            made.append((field.name, Annotated[_type_of(field), parameter], False if field.type is bool else None))
        if field.name in kind.taken_back:
            about = Parameter(help=kind.taken_back[field.name])
            made.append((f"no_{field.name}", Annotated[Flag, about], False))
    return options_class(f"{kind.__name__}Options", made)


def command_of(verb: str, first: str) -> Callable[..., int]:
    """The command of an operator's verb. first: the field that may also stand right after the verb, without its option."""
    kind = VERBS[verb]
    options = _options(kind, first)
    empty = options()

    def run(
        target: str | None = None, *, options: Any = empty, data_dir: Path | None = None, json: bool = False
    ) -> int:
        values = {first: target} | {one.name: getattr(options, one.name) for one in options_in(options)}
        body = _body(verb, kind, values)
        show(with_client(data_dir, lambda client: client.admin(verb, **body)), json, render_done)
        return 0

    about = Parameter(name=NAMES_OF.get(first, _option(first)), help=_help_of(kind, fields_of(kind)[first]))
    hints = {"target": Annotated[str | None, about], "options": options, "data_dir": DataDir, "json": Json}
    run.__annotations__ = {**hints, "return": int}
    run.__doc__ = f"{kind.__doc__}\n\nPrints `done`. Nothing restarts."
    return run


def _body(verb: str, kind: type[AdminVerb], values: dict[str, Any]) -> dict[str, Any]:
    """The body of a request. Ends the command (bad usage) if something is missing or is said twice."""
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    back = {name: None for name in kind.taken_back if given.pop(f"no_{name}", False)}
    for field in back:
        if field in given:
            usage(f"{_option(field)} and {_option(f'no_{field}')}: give one of both")
    body = {name: _value(fields_of(kind)[name], value) for name, value in given.items()} | back
    missing = [_option(name) for name, one in body_of(kind).items() if one.default is NODEFAULT and name not in body]
    if missing:
        usage(f"{verb} needs {' and '.join(missing)}: write {' and '.join(f'{one} VALUE' for one in missing)}")
    if kind.one_of and sum(name in body for name in kind.one_of) != 1:
        usage(f"{verb} needs exactly one of {', '.join(map(_option, kind.one_of))}")
    if kind.taken_back and set(body) == {"app"}:
        usage(f"{verb} needs at least one of {', '.join(_option(name) for name in body_of(kind) if name != 'app')}")
    return body


def _value(field: Field, value: Any) -> Any:
    """What an option means."""
    if field.type is Any:
        return json_or_text(value)
    if field.type == list[float]:
        try:
            return [float(one) for one in value.split(",")]
        except ValueError:
            usage(f"{_option(field.name)} {value}: must be numbers with commas between them")
    return [*names(_option(field.name), value, "names")] if get_origin(field.type) is list else value


# -- releases: `infaas release list` and `show`

Item = dict[str, Any]
_EMPTY = "no releases yet: `infaas release start APP --model M` begins one"
_WIDTH = 41  # characters of the picture


def releases(app: str | None = None, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """List the last release of each app: its versions, state and share of the queries, and what it waits for.

    Parameters
    ----------
    app
        List only this app's.

    """
    items = with_client(data_dir, lambda client: client.releases(app=app))
    show({"items": items}, json, lambda document: print_table(document["items"], _RELEASES, _EMPTY, wide=wide))
    return 0


def show_release(app: str, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """Show how the new version of an app's release does beside the old one: each measure of each step, with the interval of the difference.

    More is better in all of them: the shares of right answers by labels, of answers without an error, of those in time, of those
    that are as fast as the old version's, of those of the class (or of all others) whose share differs most, and of those that are as the old
    version's. Step 0 is the mirror. All intervals hold together, at every moment, with a probability of 99 %.

    Example: `infaas release show digits`

    Parameters
    ----------
    app
        The app.

    """
    found = with_client(data_dir, lambda client: client.releases(app=app))
    if not found:
        fail(f"{app} has had no release: `infaas release start {app} --model M` begins one")
    show(found[0], json, lambda item: _render(item, wide))
    return 0


def _render(item: Item, wide: bool) -> None:
    at = f", step {item['step'] + 1} of {len(item['steps'])}" if item["state"] in ("step", "paused") else ""
    at = f" of a share of {item['mirror']:g}" if item["state"] == "mirror" else at
    print(f"{item['app']}: {item['model']} version {item['old_version']} -> {item['version']}: {item['state']}{at}")
    print(f"share {item['share']:g} of the queries, since {when(item['since'])}: {item['reason']}")
    if item["lacks"]:
        print(f"waits for {item['lacks']}")
    reach = max((abs(one[end]) for one in item["figures"] for end in ("low", "high")), default=1.0)
    rows = [one | {"picture": _picture(one, min(1.0, reach))} for one in item["figures"]]
    print_table(rows, _FIGURES, "nothing was counted yet", wide=wide)


def _picture(one: Item, reach: float) -> str:
    """The interval on a line from -reach to reach: : is no difference, | the margin."""
    line = [" "] * _WIDTH

    def place(value: float) -> int:
        return round((min(max(value / reach, -1.0), 1.0) + 1.0) / 2.0 * (_WIDTH - 1))

    for i in range(place(one["low"]), place(one["high"]) + 1):
        line[i] = "-"
    line[place(-one["margin"])], line[place(0.0)] = "|", ":"
    line[place(one["new"] - one["old"])] = "o"
    return "".join(line).rstrip()


_RELEASES = (
    Column("app", "app"),
    Column("model", "model", rank=3),
    Column("old", "old_version", rank=1),
    Column("new", "version"),
    Column("state", "state"),
    Column("share", "share"),
    Column("since", lambda item: when(item["since"]), rank=4),
    Column("waits for, or reason", lambda item: item["lacks"] or item["reason"], flows=True),
)
_FIGURES = (
    Column("step", "step"),
    Column("measure", lambda one: f"{one['measure']} ({one['of']})" if one["of"] else one["measure"]),
    Column("new", "new"),
    Column("of", "new_n", rank=2),
    Column("old", "old"),
    Column("of ", "old_n", rank=3),
    Column("difference", lambda one: f"{one['low']:+.4f} to {one['high']:+.4f}"),
    Column("margin", "margin", rank=4),
    Column("", "picture", rank=5),
)


# -- the groups


def _first(kind: type[AdminVerb], wanted: str) -> str:
    return wanted if wanted in fields_of(kind) else next(iter(body_of(kind)))


def _group(noun: str, verbs: Mapping[str, Callable[..., int] | str]) -> App:
    """The commands about one kind of thing: those of the table, then operators' verbs."""
    group = App(name=noun, help=COMMANDS[noun].summary, version_flags=[], result_action="return_value")
    found = ([*place.split(" "), one.function] for one in COMMANDS.values() for place in one.places)
    own: dict[str, Any] = {verb: function for kind, verb, function in found if kind == noun}
    for order, (verb, function) in enumerate({**own, **verbs}.items()):
        group.command(function, name=verb, sort_key=order, version_flags=[])
        group[verb]  # imports it, so that the group's help says what it does
    return group


def _of(noun: str, **own: Any) -> App:
    kinds = {verb: kind for verb, kind in VERBS.items() if kind.noun == noun}
    verbs = {one.removesuffix(f"-{noun}"): command_of(one, _first(kind, noun)) for one, kind in kinds.items()}
    return _group(noun, {**own, **verbs})


app, model, worker, job = map(_of, ("app", "model", "worker", "job"))
payloads = _group("payloads", {"export": "infaas.cli.payloads:export", "delete": "infaas.cli.payloads:delete"})
release = _of("release", list=releases, show=show_release)
admin = _group("admin", {verb: command_of(verb, _first(kind, "app")) for verb, kind in VERBS.items()})
