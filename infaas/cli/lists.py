"""`infaas apps`, `models`, `variants`, `selection`, `workers` and `status`: what exists, its state, and the figures that decisions use."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bus.fields import meant
from bus.messages.catalog import is_error, value_of
from bus.port import BusError, Forbidden
from infaas.cli.history import with_history
from infaas.cli.options import DataDir, Json, Wide
from infaas.cli.output import (
    COMPUTED,
    Column,
    context_words,
    drifted,
    fail,
    found_words,
    hardware_of,
    in_words,
    missed_words,
    number,
    print_table,
    print_variants,
    quality_of,
    show,
    usage,
    when,
)
from infaas.client import Client
from infaas.connecting import with_client
from infaas.errors import Refused, denied

Item = dict[str, Any]


def apps(app: str | None = None, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """List the apps with their models, inputs, outputs, latency objective, and the share of queries answered in time beside its target.

    A pipeline has vertices instead of models. An app that is a stage of pipelines is asked by them, too: such visits are parts of the pipelines'
    queries, and no figure of the app itself counts them.

    Parameters
    ----------
    app
        List only this app.

    """

    async def ask(client: Client) -> list[Item]:
        return await _known(client, await with_history(client.apps(app=app), data_dir, {}), app)

    return _list(data_dir, json, wide, _APPS, _none("apps", app), ask)


def models(
    app: str | None = None,
    *,
    model: str | None = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """List the registered models and their versions.

    Parameters
    ----------
    app
        List only versions that were registered for this app, or that it may serve.
    model
        List only this model.

    """

    async def ask(client: Client) -> list[Item]:
        return await _known(client, await client.models(app=app, model=model), app, model)

    return _list(data_dir, json, wide, _MODELS, _none("models", app), ask)


def variants(
    app: str | None = None,
    *,
    model: str | None = None,
    context: str | None = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """List the variants with their measured accuracy, latency, memory, throughput and price.

    Computed US$/1,000: what 1,000 queries cost by the profile and the prices, without idle time. `infaas sql` has what was charged.

    Example: `infaas variants digits`

    Parameters
    ----------
    app
        List only variants that may answer this app.
    model
        List only variants of this model.
    context
        The accuracy that counts in this context, of an app whose contexts have weights of their own.

    """
    if context is not None and app is None:
        usage("--context: give the app, too")

    async def ask(client: Client) -> list[Item]:
        return await _known(client, await client.variants(app=app, model=model, context=context), app, model)

    empty = _none("variants", app)
    return _list(data_dir, json, wide, _VARIANTS, empty, ask, partial(print_variants, _VARIANTS, empty))


def selection(
    app: str, *, context: str | None = None, data_dir: DataDir = None, wide: Wide = False, json: Json = False
) -> int:
    """Show what feedback has taught about the members of an app's selection: their weights, and the probability that each is asked.

    Example: `infaas selection digits`

    Parameters
    ----------
    app
        The app.
    context
        Of this context, if the app's policy learns each context by itself. Default: of queries without a context; found is that of all.

    """
    empty = f"{app} has no selection policy: `infaas admin set-selection` gives it one"
    return _list(data_dir, json, wide, _SELECTION, empty, lambda c: c.selection(app, context=context))


def workers(*, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """List the workers with their devices and the instances that are loaded on them."""
    return _list(data_dir, json, wide, (), "", lambda c: c.workers(), _render_workers)


def registrations(app: str | None = None, *, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """List the registrations with their progress, those that failed with the reason. `infaas cancel ID` cancels one, or dismisses a failed one.

    Parameters
    ----------
    app
        List only registrations for this app, or the one with this id.

    """

    async def ask(client: Client) -> list[Item]:
        found = [one for one in await _registrations(client) if app in (None, one.get("app"), one.get("registration"))]
        if not found and app is not None and app not in (apps := [one["app"] for one in await client.apps()]):
            fail(f"no app and no registration {app!r}: `infaas registrations --wide` lists them{meant(app, apps)}")
        return found

    return _list(data_dir, json, wide, _REGISTRATIONS, "no registrations", ask)


async def _known(client: Client, found: list[Item], app: str | None, model: str | None = None) -> list[Item]:
    """What was found. Ends the command where that is nothing since there is no such app or model. Raises Refused."""
    if not found and app is not None:
        await client.variants(app=app)
    if not found and model is not None:
        known = [one["model"] for one in await client.models(app=app)]
        of_app = f" of app {app}" if app else ""
        fail(f"no model {model!r}{of_app}: `infaas models` lists them{meant(model, known)}")
    return found


def _none(what: str, app: str | None) -> str:
    """What a list prints that has nothing to show."""
    return (
        f"no {what} of app {app!r}: `infaas apps` lists the apps"
        if app
        else f"no {what} yet: `infaas register` makes the first"
    )


def _list(
    data_dir: Path | None, as_json: bool, wide: bool, columns: tuple[Column, ...], empty: str,
    ask: Callable[[Client], Awaitable[list[Item]]], render: Callable[[list[Item], bool], None] | None = None,
) -> int:  # fmt: skip
    def table(document: Item) -> None:
        if render is None:
            print_table(document["items"], columns, empty, wide=wide)
        else:
            render(document["items"], wide)

    show({"items": with_client(data_dir, ask)}, as_json, table)
    return 0


def _render_workers(items: list[Item], wide: bool) -> None:
    devices = [
        device
        | {
            "worker": item["worker"],
            "machine": item.get("kind") or item.get("hardware", ""),
            "worker_state": item["state"],
        }
        for item in items
        for device in item["devices"]
    ]
    device_columns = (
        Column("worker", "worker"),
        Column("machine", "machine", rank=4),
        Column("state", "worker_state"),
        Column("device", "device", rank=1),
        Column("kind", lambda d: f"{d['kind']}{' (simulated)' * bool(d.get('simulated'))}", rank=3),
        Column("alive", "alive", rank=2),
        Column("utilisation", lambda d: f"{d['utilisation']:.0%}"),
        Column("foreign", lambda d: f"{d.get('foreign_use', 0.0):.0%}", rank=3),
        Column("cores", lambda d: f"{d['cores_used']:.3g} of {d['cores']}"),
        Column("memory MB", lambda d: f"{d['memory_used_mb']:.0f} of {d['memory_mb']:.0f}", rank=1),
        Column("Warm MB", lambda d: f"{d.get('host_used_mb', 0.0):.0f}", rank=6),
        Column("US$/h", "price_per_hour", rank=5),
    )
    print_table(devices, device_columns, "no workers", wide=wide)
    instances = [one | {"worker": item["worker"]} for item in items for one in item["instances"]]
    if instances:
        print()
        instance_columns = (
            Column("instance of", "variant"),
            Column("worker", "worker"),
            Column("device", "device", rank=1),
            Column("state", lambda one: f"{one['state']}{' (reclaimable)' * bool(one.get('reclaimable'))}"),
            Column("queued", "queued", rank=2),
            Column("items/s", "load"),
            Column("compute ms", "latency_ms"),
            Column("mean batch", "mean_batch", rank=4),
        )
        print_table(instances, instance_columns, "", wide=wide)


def _spec(spec: Item) -> str:
    axes = ", ".join("any" if axis == -1 else str(axis) for axis in spec["shape"])
    return f"{spec['name']}: {spec['datatype']}[n{', ' if axes else ''}{axes}]"


def _state(item: Mapping[str, Any]) -> str:
    instances, reclaimable = item.get("instances") or 0, item.get("reclaimable") or 0
    notes = [f"x{instances}"] * (instances > 1)
    notes += [f"{reclaimable} reclaimable" if instances > 1 else "reclaimable"] * bool(reclaimable)
    notes += ["dominated"] * bool(item.get("dominated"))
    suffix = f" ({', '.join(notes)})" if notes else ""
    return f"{item.get('state')}{suffix}"


# `infaas status`: the whole system on one page.

_SYNC_S = 5.0  # within which the last statuses of all registrations arrive


async def overview(client: Client, data_dir: Path | None = None) -> Item:
    """The lists of apps, variants, workers and registrations, and what of the history they lack. Raises what the client's lists raise."""
    lacks: dict[str, str] = {}
    shown = with_history(client.apps(), data_dir, lacks)
    apps, variants, workers = await asyncio.gather(shown, client.variants(), client.workers())
    registrations = []
    with suppress(Refused):  # who may list apps need not see registrations
        registrations = await _registrations(client)
    return {"apps": apps, "variants": variants, "workers": workers, "registrations": registrations, "lacks": lacks}


def render_overview(found: Item, *, wide: bool = False) -> None:
    """Print the page."""
    apps, variants, workers = found["apps"], found["variants"], found["workers"]
    for app in apps:
        if app.get("unserved"):
            print(f"nobody can serve {app['app']}: {app['unserved']}")
        if missed := missed_words(app):
            print(missed)
        if app.get("drift"):
            print(drifted(app["app"], app["drift"]))
    instances = [instance for worker in workers for instance in worker["instances"]]
    ready = sum(worker["state"] == "Ready" for worker in workers)
    pipelines = sum(app.get("pipeline") is not None for app in apps)
    print(
        f"{ready} of {len(workers)} workers ready, {len(apps)} apps{f' ({pipelines} of them pipelines)' * bool(pipelines)},"
        f" {len({one['variant'] for one in variants})} variants, {len(instances)} instances"
    )
    for worker in workers:
        devices = ", ".join(f"{d['device']} {d['utilisation']:.0%}" for d in worker["devices"])
        free = sum(bool(one.get("reclaimable")) for one in worker["instances"])
        note = f" ({free} reclaimable)" * bool(free)
        print(f"  {worker['worker']}: {worker['state']}, {devices}, {len(worker['instances'])} instances{note}")
    if apps:
        print()
        print_table([_app(app, variants) for app in apps], _APP_COLUMNS, "", wide=wide)
    unfinished = [r for r in found["registrations"] if r.get("state") not in ("done", "failed", "cancelled")]
    failed = [r for r in found["registrations"] if r.get("state") == "failed"]
    if unfinished or failed:
        print()
    for one in unfinished:
        print(
            f"registering {one.get('model')} for {one.get('app')}: {one.get('state')}, {100 * one.get('progress', 0):.0f} %"
        )
    for one in failed:
        print(f"registration of {one.get('model')} for {one.get('app')} failed: {one.get('reason')}")


def _interval(item: Mapping[str, Any]) -> str | None:
    """The confidence interval of a variant's accuracy, or of its error in the unit of the labels."""
    low, high = item.get("accuracy_low"), item.get("accuracy_high")
    if low is None or high is None:
        return None
    metric = str(item.get("metric") or "top1")
    if not is_error(metric) and metric != "r2":
        return f"{low:.3f}..{high:.3f}"
    return "..".join(number(one) for one in sorted(value_of(one, metric) for one in (high, low)))


def _p99(item: Mapping[str, Any]) -> str | None:
    """P99 of a single item with its interval, such as "1.2 (1.1..)": too few calls to tell its upper end."""
    low, p99, high = (item.get("p99_ms") or {}).get("1") or (None, None, None)
    ends = "" if low is None else f" ({number(low)}..{'' if high is None else number(high)})"
    return None if p99 is None else f"{number(p99)}{ends}"


def _found(item: Mapping[str, Any]) -> str | None:
    """What labels or references say of a variant."""
    live = item.get("live")
    return None if live is None else found_words(live)


def _right(item: Mapping[str, Any]) -> str | None:
    """What labels say of an app's answers."""
    return found_words(found) if (found := item.get("quality")) and "variant" not in found else None


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.5g} %"


def _capacity(item: Mapping[str, Any]) -> float | None:
    """Items/s that the loaded instances can carry in time."""
    expected, headroom = item.get("forecast"), item.get("headroom")
    return None if expected is None or headroom is None else expected * headroom


_OBJECTIVE = (
    Column("target", lambda item: _percent(item.get("slo_target")), rank=2),
    Column("right", _right, rank=4),
    Column("in time, 1 h", lambda item: _percent(item.get("attainment_1h"))),
    Column("5 min", lambda item: _percent(item.get("attainment_5m")), rank=3),
    Column("expected/s", "forecast", rank=4),
    Column("can carry/s", _capacity, rank=4),
)
_APP_COLUMNS = (
    Column("app", "app"),
    Column("models", "models"),
    Column("variants", "variants", rank=3),
    Column("states", "states", rank=2),
    Column("accuracy", "accuracy"),
    Column("compute ms", "latency"),
    Column(COMPUTED, "cost"),
    *_OBJECTIVE,
)


def _app(app: Item, variants: list[Item]) -> Item:
    own = [variant for variant in variants if variant["app"] == app["app"]]
    states = Counter(variant["state"] for variant in own)
    if app.get("pipeline"):
        return {**app, "models": f"{len(app['pipeline']['vertex'])} vertices", "variants": None}
    return {
        **app,
        "models": len(app["models"]),
        "variants": len(own),
        "states": ", ".join(f"{count} {state}" for state, count in states.most_common()),
        "accuracy": _qualities(own),
        "latency": _range(own, "latency_ms"),
        "cost": _range(own, "cost_per_1000"),
    }


def _vertices(item: Mapping[str, Any]) -> str | None:
    """Of a pipeline, as "lang -> nmt, asr -> whisper": its vertices with the apps that answer for them. None: it is none."""
    pipeline = item.get("pipeline")
    if pipeline is None:
        return None
    return ", ".join(
        one["name"] if one["name"] == one["app"] else f"{one['name']} -> {one['app']}" for one in pipeline["vertex"]
    )


def _least(item: Mapping[str, Any]) -> str:
    """Instances that the app keeps, then those of single models."""
    replicas: dict[str, int] = item.get("replicas") or {}
    return ", ".join([str(item.get("min_instances")), *(f"{model}: {count}" for model, count in replicas.items())])


def _selection(selection: Item | None) -> str | None:
    """As "exp4, cache 64 MB"."""
    if selection is None:
        return None
    words = [selection["policy"]] if selection["policy"] else []
    return ", ".join([*words, f"cache {selection['cache_mb']:g} MB"] if selection["cache_mb"] else words)


def _qualities(items: list[Item]) -> str | None:
    """The range of variants' accuracy, in their metric and unit."""
    known = [item for item in items if item.get("accuracy") is not None]
    metric = str(known[0].get("metric") or "top1") if known else ""
    found = _range([{"value": value_of(item["accuracy"], metric)} for item in known], "value")
    return found and in_words(found, known[0])


def _range(items: list[Item], name: str) -> str | None:
    values = [float(item[name]) for item in items if item.get(name) is not None]
    return " .. ".join(dict.fromkeys(f"{end:.3g}" for end in (min(values), max(values)))) if values else None


# What the lists show.

_APPS = (
    Column("app", "app"),
    Column("models", lambda item: _vertices(item) or item["models"]),
    Column("stage of", lambda item: item.get("stage_of") or None, rank=5),
    Column("variants", lambda item: None if item.get("pipeline") else item["variants"], rank=3),
    Column("latency ms", "latency_ms"),
    *_OBJECTIVE[:4],
    Column("least instances", _least, rank=4),
    Column("selection", lambda item: _selection(item.get("selection")), rank=4),
    Column("inputs", lambda item: [_spec(spec) for spec in item.get("inputs") or []], rank=3),
    Column("outputs", lambda item: [_spec(spec) for spec in item.get("outputs") or []], rank=3),
)
_MODELS = (
    Column("model", "model"),
    Column("version", "version"),
    Column("made for", "app", rank=2),
    Column("apps", "apps", rank=3),
    Column("serves", "serving"),
    Column("variants", "variants", rank=3),
    Column("metric", "metric", rank=3),
    Column("format", "format", rank=4),
    Column("registered", lambda item: when(item.get("created")), rank=5),
)
_VARIANTS = (
    Column("app", "app", rank=2),
    Column("variant", "variant"),
    Column("state", _state),
    Column("hardware", hardware_of, rank=1),
    Column("accuracy", quality_of),
    Column("found", _found, rank=3),
    Column("95 %", _interval, rank=6),
    Column("compute ms", "latency_ms"),
    Column("p99 ms", _p99, rank=6),
    Column("load ms", "load_ms", rank=3),
    Column("init ms", "init_ms", rank=8),
    Column("transfer ms", "transfer_ms", rank=8),
    Column("memory MB", "memory_mb", rank=4),
    Column("host MB", "host_mb", rank=8),
    Column("items/s", "saturation_qps", rank=2),
    Column("batching", "batching", rank=7),
    Column("US$/h", "price_per_hour", rank=5),
    Column(COMPUTED, "cost_per_1000"),
)
_SELECTION = (
    Column("member", "member"),
    Column("weight", "weight"),
    Column("asked with probability", "probability"),
    Column("feedbacks", "n"),
    Column("found", context_words, rank=2),
)
_REGISTRATIONS = (
    Column("model", "model"),
    Column("app", "app", rank=1),
    Column("version", "version", rank=2),
    Column("state", "state"),
    Column("done", lambda item: f"{item.get('progress', 0.0):.0%}"),
    Column("variants", lambda item: len(item.get("variants") or ()), rank=2),
    Column("id", "registration"),
    Column("step, or reason", lambda item: item.get("reason") or item.get("step"), flows=True),
)


async def _registrations(client: Client) -> list[Item]:
    """The last status of every registration; empty if the system has no registrar yet. Raises Refused without the right to read them."""
    try:
        async with asyncio.timeout(_SYNC_S):
            bucket = await client.bus.key_value(client.subjects.status_bucket, create=False)
            entries = sorted(await bucket.entries("registration"), key=lambda entry: entry.key)
    except Forbidden as error:
        raise denied("the list of registrations") from error
    except (BusError, TimeoutError):
        return []
    found: list[Item] = []
    for entry in entries:
        with suppress(msgspec.DecodeError):
            found.append(msgspec.msgpack.decode(entry.value or b"", type=Item))
    return found
