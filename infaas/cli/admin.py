"""`infaas admin VERB`: an operator's changes to a running system, sent as `infaas.admin.<verb>` on the bus.

Verbs, options and their help are those of the messages in bus/messages/verbs.py.
"""

from collections.abc import Iterator
from dataclasses import fields as options_of
from typing import Annotated, Any, get_origin

from cyclopts import Parameter
from msgspec import NODEFAULT, Struct

from bus.fields import Field, fields_of
from bus.messages.verbs import ADMIN_VERBS, AdminVerb, body_of
from infaas.cli.options import DataDir, Json, Names, Whole, json_or_text, names, options_class
from infaas.cli.output import meant, render_done, show, usage
from infaas.connecting import with_client

Flag = Annotated[bool, Parameter(negative="")]
NAMES_OF = {"version": ["--version", "--model-version"]}


def _in_options(verb: type[AdminVerb]) -> bool:
    """Whether options can say all that it takes; other verbs take files (infaas/cli/pipeline.py)."""
    kinds = (one.type for one in fields_of(verb).values())
    return not any(get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Struct)) for kind in kinds)


VERBS = {verb: kind for verb, kind in ADMIN_VERBS.items() if _in_options(kind)}


def _split(verb: type[AdminVerb]) -> tuple[list[str], list[str]]:
    """The fields that a verb needs, and those that it may have."""
    fields = body_of(verb)
    needed = [name for name, one in fields.items() if one.default is NODEFAULT]
    return needed, [name for name in fields if name not in needed]


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _taken_back(verb: type[AdminVerb]) -> list[str]:
    return [f"no_{field}" for field in verb.taken_back]


def _type_of(field: Field) -> Any:
    if field.type is int:
        return Whole | None
    if field.type is bool:
        return Flag
    if get_origin(field.type) is list:
        return Names
    return str | None if field.type is Any else field.type | None


def _help_of(name: str) -> str:
    """What the verbs that have a field say of it. Where they differ, with the verb."""
    said: dict[str, list[str]] = {}
    for verb, kind in VERBS.items():
        if name in fields_of(kind):
            said.setdefault(fields_of(kind)[name].meaning, []).append(verb)
    if len(said) == 1:
        return next(iter(said))
    return " ".join(f"{meaning.removesuffix('.')} ({', '.join(verbs)})." for meaning, verbs in said.items())


def _options() -> Iterator[tuple[str, Any, Any]]:
    """An option for each field of any verb, beside `app`, which may also stand right after the verb."""
    made: set[str] = {"app"}
    for kind in VERBS.values():
        for field in fields_of(kind).values():
            name = field.name
            if name not in made:
                made.add(name)
                parameter = Parameter(name=NAMES_OF.get(name), help=_help_of(name))
                yield name, Annotated[_type_of(field), parameter], False if field.type is bool else None
            if name in kind.taken_back and f"no_{name}" not in made:
                made.add(f"no_{name}")
                yield f"no_{name}", Annotated[Flag, Parameter(help=kind.taken_back[name])], False


VerbOptions: Any = options_class("VerbOptions", [*_options()])
NO_OPTIONS = VerbOptions()


def admin(
    verb: str,
    /,
    app: str | None = None,
    *,
    options: VerbOptions = NO_OPTIONS,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Change a running system: its apps, the models that they serve, how batches are formed, and quarantined variants. Prints `done`.

    Nothing restarts. The verbs, with the options that each needs and may have:

    VERBS

    The app may also stand right after the verb.

    Example: `infaas admin set-version digits --model cnn --version 1`

    Example: `infaas admin set-selection digits --policy exp4 --members mlp cnn --cache-mb 64`

    Parameters
    ----------
    verb
        What to change.
    app
        Name of the app.

    """
    if verb not in VERBS:
        usage(f"there is no verb {verb!r}: use {', '.join(VERBS)}{meant(verb, VERBS)}")
    kind = VERBS[verb]
    values = {"app": app} | {one.name: getattr(options, one.name) for one in options_of(options)}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    needed, possible = _split(kind)
    known = (*needed, *possible, *_taken_back(kind))
    unused = [_option(name) for name in given if name not in known]
    if unused:
        usage(f"{verb} takes no {', '.join(unused)}")
    back = {name.removeprefix("no_"): None for name in _taken_back(kind) if given.pop(name, False)}
    for field in back:
        if field in given:
            usage(f"{_option(field)} and {_option(f'no_{field}')}: give one of both")
    given = {name: _value(fields_of(kind)[name], value) for name, value in given.items()} | back
    missing = [_option(name) for name in needed if name not in given]
    if missing:
        usage(f"{verb} needs {' and '.join(missing)}")
    if kind.one_of and sum(name in given for name in kind.one_of) != 1:
        usage(f"{verb} needs exactly one of {', '.join(map(_option, kind.one_of))}")
    show(with_client(data_dir, lambda client: client.admin(verb, **given)), json, render_done)
    return 0


def _value(field: Field, value: Any) -> Any:
    """What an option means."""
    if field.type is Any:
        return json_or_text(value)
    return [*names(_option(field.name), value, "names")] if get_origin(field.type) is list else value


def _line(verb: str, kind: type[AdminVerb]) -> str:
    """A verb in the help: what it does, and its options."""
    needed, possible = _split(kind)
    possible = [name for name in possible if name not in kind.one_of] + _taken_back(kind)
    said = [f"`{_option(name)}`" for name in needed]
    said += [f"one of {', '.join(f'`{_option(name)}`' for name in kind.one_of)}"] if kind.one_of else []
    takes = ", ".join(said) + (f"; may have {', '.join(f'`{_option(name)}`' for name in possible)}" if possible else "")
    words = " ".join((kind.__doc__ or "").split())
    return f"* {verb}: {takes}. {words}"


admin.__doc__ = (admin.__doc__ or "").replace("VERBS", "\n    ".join(_line(*one) for one in VERBS.items()))
