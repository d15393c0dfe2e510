"""`infaas admin VERB`: what operators change in a running system, as `infaas.admin.<verb>` does on the bus."""

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from infaas.cli.options import DataDir, Json, Whole, json_or_text
from infaas.cli.output import show, usage
from infaas.connecting import connect

# verb: what it must be told, what it may be told
VERBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "add-app": (("app",), ("latency_ms", "default_output", "min_instances", "input_type")),
    "set-app": (("app",), ("latency_ms", "default_output", "min_instances", "input_type")),
    "delete-app": (("app",), ()),
    "link-model": (("app", "model"), ("version", "latency_ms", "default_output")),
    "unlink-model": (("app", "model"), ()),
    "set-version": (("app", "model", "version"), ()),
    "set-replicas": (("app", "count"), ()),
    "delete-version": (("model", "version"), ()),
    "release-variant": (("variant",), ("worker",)),
}

InputType = Annotated[
    str | None, Parameter(help="What an item of the app's inputs is: integers, floats, doubles, bytes, strings.")
]


def admin(
    verb: str,
    /,
    *,
    app: str | None = None,
    model: str | None = None,
    model_version: str | None = None,
    variant: str | None = None,
    worker: str | None = None,
    latency_ms: float | None = None,
    default_output: str | None = None,
    min_instances: Whole | None = None,
    count: Whole | None = None,
    input_type: InputType = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Change the catalogue of a running system: apps, which models they serve in which version, quarantined variants.

    Prints `done`. Verbs: add-app, set-app, delete-app, link-model, unlink-model, set-version (to a newer or an older one: nothing
    restarts), set-replicas, delete-version, release-variant.

    Parameters
    ----------
    verb
        What to do.
    app
        The application.
    model
        The model.
    model_version
        The version of the model; link-model takes the newest where it is left out.
    variant
        The quarantined variant that may be loaded again (release-variant).
    worker
        Only on this worker (release-variant).
    latency_ms
        The app's latency objective, in milliseconds.
    default_output
        What the app answers, as JSON, where nothing better can come in time; a text that is no JSON stands for itself.
    min_instances
        How many instances the app keeps at least.
    count
        The same, of set-replicas.

    """
    if verb not in VERBS:
        usage(f"verb: {verb!r} is none of {', '.join(VERBS)}")
    fields: dict[str, Any] = {
        "app": app,
        "model": model,
        "version": model_version,
        "variant": variant,
        "worker": worker,
        "latency_ms": latency_ms,
        "default_output": None if default_output is None else json_or_text(default_output),
        "min_instances": min_instances,
        "count": count,
        "input_type": input_type,
    }
    given = {field: value for field, value in fields.items() if value is not None}
    needed, possible = VERBS[verb]
    missing = [_option(field) for field in needed if field not in given]
    if missing:
        usage(f"{verb} needs {' and '.join(missing)}")
    idle = [_option(field) for field in given if field not in (*needed, *possible)]
    if idle:
        usage(f"{verb} takes no {', '.join(idle)}")

    async def ask() -> dict[str, Any]:
        async with connect(data_dir=data_dir) as client:
            return await client.admin(verb, **given)

    show(asyncio.run(ask()), json, lambda _: print("done"))
    return 0


def _option(field: str) -> str:
    return "--model-version" if field == "version" else f"--{field.replace('_', '-')}"
