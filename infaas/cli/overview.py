"""A whole system on one page, for `infaas status`."""

import asyncio
from collections import Counter
from typing import Any

import msgspec

from bus.port import BusError, KeyValueEntry
from infaas.cli.table import Column, print_table
from infaas.client import Client

Item = dict[str, Any]
_SYNC = 5.0  # s for the registrations' last statuses to arrive


async def overview(client: Client) -> Item:
    """Apps, variants by state, workers and registrations. Raises what the client's lists raise."""
    apps, variants, workers, registrations = await asyncio.gather(
        client.apps(), client.variants(), client.workers(), _registrations(client)
    )
    return {"apps": apps, "variants": variants, "workers": workers, "registrations": registrations}


def render_overview(found: Item) -> None:
    """The page for people."""
    apps, variants, workers = found["apps"], found["variants"], found["workers"]
    instances = [instance for worker in workers for instance in worker["instances"]]
    ready = sum(worker["state"] == "Ready" for worker in workers)
    print(
        f"{ready} of {len(workers)} workers ready, {len(apps)} apps, {_count(variants, 'variant')}, {len(instances)} instances"
    )
    for worker in workers:
        devices = ", ".join(f"{d['device']} {d['utilisation']:.0%}" for d in worker["devices"])
        print(f"  {worker['worker']}: {worker['state']}, {devices}, {len(worker['instances'])} instances")
    if apps:
        print()
        print_table([_app(app, variants) for app in apps], _APP_COLUMNS, "")
    under_way = [r for r in found["registrations"] if r.get("state") not in ("done", "failed")]
    failed = [r for r in found["registrations"] if r.get("state") == "failed"]
    if under_way or failed:
        print()
    for one in under_way:
        print(
            f"registering {one.get('model')} for {one.get('app')}: {one.get('state')}, {100 * one.get('progress', 0):.0f} %"
        )
    for one in failed:
        print(f"registration of {one.get('model')} for {one.get('app')} failed: {one.get('reason')}")


_APP_COLUMNS = (
    Column("app", "app"),
    Column("models", "models"),
    Column("variants", "variants"),
    Column("states", "states"),
    Column("accuracy", "accuracy"),
    Column("latency ms", "latency"),
    Column("US$/1000", "cost"),
)


def _app(app: Item, variants: list[Item]) -> Item:
    own = [variant for variant in variants if variant["app"] == app["app"]]
    states = Counter(variant["state"] for variant in own)
    return {
        "app": app["app"],
        "models": len(app["models"]),
        "variants": len(own),
        "states": ", ".join(f"{count} {state}" for state, count in states.most_common()),
        "accuracy": _span(own, "accuracy"),
        "latency": _span(own, "latency_ms"),
        "cost": _span(own, "cost_per_1000"),
    }


def _span(items: list[Item], name: str) -> str | None:
    values = [float(item[name]) for item in items if item.get(name) is not None]
    return f"{min(values):.3g} .. {max(values):.3g}" if values else None


def _count(variants: list[Item], what: str) -> str:
    distinct = len({item[what] for item in variants})
    return f"{distinct} {what}s"


async def _registrations(client: Client) -> list[Item]:
    """The last status of every registration that the system remembers."""
    found: dict[str, Item] = {}
    complete = asyncio.Event()

    def heard(entry: KeyValueEntry | None) -> None:
        if entry is None:
            complete.set()
        elif entry.key.startswith("registration.") and entry.value is not None:
            try:
                found[entry.key] = msgspec.msgpack.decode(entry.value, type=dict[str, Any])
            except msgspec.DecodeError:
                return

    try:
        bucket = await client.bus.key_value(client.subjects.status_bucket, create=False)
        watching = await bucket.watch(heard)
        async with asyncio.timeout(_SYNC):
            await complete.wait()
        await watching.drain()
    except (BusError, TimeoutError):
        return []  # no registrar has been here yet
    return [found[key] for key in sorted(found)]
