"""`infaas expect` and `infaas recommend`: load that an operator knows of before it comes, and the machines that a load takes."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import floor, inf
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import convert

from infaas.cli.options import DataDir, Json
from infaas.cli.output import Column, fail, for_the_result, local_time, print_table, show, usage
from infaas.client import Client
from infaas.connecting import locate, with_client
from services.core.planning.capacity import instances_for
from services.core.planning.fleet import Infeasible, solve_fleet
from services.core.planning.problem import ClassNeed, FleetPlan, FleetProblem, Pool, PooledVariant
from services.core.settings import Settings

Rate = Annotated[float, Parameter(validator=Number(gte=0, lte=1e9))]
MOST = 10_000  # machines of a kind


def expect(
    app: str | None = None,
    /,
    *,
    qps: Rate | None = None,
    at: str | None = None,
    weekly: Annotated[bool, Parameter(negative="")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Say what load to expect: instances and machines are ready by then, and kept for a quarter of an hour. Without --qps, list what was said.

    Example: `infaas expect digits --qps 200 --at 09:00 --weekly`

    Parameters
    ----------
    app
        Name of the app. Default, of a list: all.
    qps
        Queries per second; 0 takes back what was said for that time.
    at
        When: 09:00, the next time that it is so here, or 2026-12-01T09:00.
    weekly
        Every seven days.

    """
    if qps is None:
        if at is not None or weekly:
            usage("expect needs --qps with --at and --weekly: write --qps N, or 0 to take it back")
        rows = with_client(data_dir, lambda client: client.apps(app=app))
        said = [{**one, "app": row["app"], "at": _iso(one["at"])} for row in rows for one in row.get("expects", ())]
        columns = (
            Column("app", "app"),
            Column("queries/s", "qps"),
            Column("at", lambda one: local_time(one["at"])),
            Column("weekly", "weekly"),
        )
        show({"expected": said}, json, lambda _: print_table(said, columns, "nothing is expected"))
        return 0
    if app is None or at is None:
        usage("expect needs an app and --at: infaas expect APP --qps N --at 09:00")
    moment, name = _moment(at), app
    with_client(data_dir, lambda client: client.admin("expect", app=name, qps=qps, at=moment, weekly=weekly))
    done: dict[str, Any] = {"app": app, "qps": qps, "at": _iso(moment), "weekly": weekly}
    words = f"expected from {local_time(done['at'])}" if qps else "taken back"
    show(done, json, lambda _: print(words))
    return 0


def _moment(text: str) -> float:
    """Unix seconds. Ends the command (bad usage)."""
    now = datetime.now().astimezone()
    try:
        if "-" in text:
            return datetime.fromisoformat(text).timestamp()
        clock = datetime.strptime(text, "%H:%M").time()  # noqa: DTZ007  (of today, here)
    except ValueError:
        usage(f"--at {text}: must be a time as 09:00 or 2026-12-01T09:00")
    found = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    return (found if found > now else found + timedelta(days=1)).timestamp()


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat()


# -- recommend


class Machine(NamedTuple):
    """A kind of machine. devices: kind to the cores and MB of all of them, and how many there are. price: US$ per hour."""

    kind: str
    price: float
    devices: Mapping[str, tuple[int, float, int]]


def recommend(
    *,
    app: str,
    qps: Annotated[float, Parameter(validator=Number(gt=0, lte=1e9))],
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Print which machines carry a load of an app, from its variants' profiles and the prices, the cheapest first.

    Kinds of machine are those of machines.kinds and of the workers that run. Exits 1 if none carries it.

    Example: `infaas recommend --app digits --qps 200`

    Parameters
    ----------
    app
        Name of the app. Its objectives count, and queries are of one item.
    qps
        Queries per second.

    """

    async def ask(client: Client) -> tuple[list[dict[str, Any]], ...]:
        return await client.apps(app=app), await client.variants(app=app), await client.workers()

    [record, *_], variants, workers = with_client(data_dir, ask)
    tree = locate(data_dir).settings
    settings = convert(dict(tree), Settings, strict=False)
    machines = _machines(settings, workers)
    with for_the_result():
        found = choices(record, variants, machines, qps, settings.monitor.memory_share)
    columns = (
        Column("machines", lambda one: " + ".join(f"{n} {kind}" for kind, n in one["machines"].items())),
        Column("US$/h", "per_hour"),
        Column("instances", lambda one: ", ".join(f"{n} {name}" for name, n in one["instances"].items()), flows=True),
    )
    show({"app": app, "qps": qps, "choices": found}, json, lambda _: print_table(found, columns, ""))
    if not found:
        kinds = ", ".join(one.kind for one in machines) or "none"
        fail(
            f"no kind of machine carries {qps:g} queries/s of {app} (known: {kinds}): lower its objectives, or register a variant"
        )
    return 0


def choices(
    app: Mapping[str, Any], variants: Sequence[Mapping[str, Any]], machines: Sequence[Machine], qps: float, share: float
) -> list[dict[str, Any]]:
    """What carries the load, the cheapest first: each kind of machine alone, and a mixture where that is cheaper.

    app, variants: as `infaas.Client` lists them. share: of a device's memory that instances may take.
    """
    alone = [found for one in machines if (found := _solved(app, variants, [one], qps, share)) is not None]
    best = min((one["per_hour"] for one in alone), default=inf)
    mixed = _solved(app, variants, machines, qps, share) if len(machines) > 1 else None
    if mixed is not None and mixed["per_hour"] < best * (1 - 1e-9):
        alone.append(mixed)
    return sorted(alone, key=lambda one: (one["per_hour"], sum(one["machines"].values())))


def _solved(
    app: Mapping[str, Any], variants: Sequence[Mapping[str, Any]], machines: Sequence[Machine], qps: float, share: float
) -> dict[str, Any] | None:
    limit = inf if app["latency_ms"] is None else app["latency_ms"] / 1000.0
    miss = (1.0 - app["slo_target"]) / 2.0
    pools, pooled, options = [], list[PooledVariant](), dict[int, tuple[float, float]]()
    for p, machine in enumerate(machines):
        resources = {f"{kind}/time": float(cores) for kind, (cores, _, _) in machine.devices.items()}
        resources |= {f"{kind}/memory": share * memory for kind, (_, memory, _) in machine.devices.items()}
        pools.append(Pool(name=machine.kind, machines=0, least=0, most=MOST, price=machine.price, resources=resources))
        for row in variants:
            kind, rate = _hardware(row["hardware"], row["simulated"]), _rate(row, limit)
            if kind not in machine.devices or rate <= 0.0:
                continue
            _, memory, count = machine.devices[kind]
            needed = row["memory_mb"]
            most = count * floor(share * memory / count / needed + 1e-9) if needed > 0 else 256
            carrying = qps / rate
            options[len(pooled)] = (carrying, max(0.0, instances_for(qps, rate, limit, miss) - carrying))
            pooled.append(
                PooledVariant(
                    name=row["variant"], pool=p, uses={f"{kind}/memory": needed}, most=most, running=0,
                    computes=(f"{kind}/time", 1.0 if row["hardware"] == "gpu" else float(row["threads"] or 1)),
                    price=row["price_per_hour"], load_s=row["load_ms"] / 1000.0,
                )
            )  # fmt: skip
    if not options:
        return None
    need = ClassNeed(name=app["app"], load=qps, options=options)
    try:
        found: FleetPlan = solve_fleet(
            FleetProblem(pools=tuple(pools), variants=tuple(pooled), needs=(need,), strict=True)
        )
    except Infeasible:
        return None
    counts = {machine.kind: n for machine, n in zip(machines, found.machines, strict=True) if n}
    instances = {one.name: n for one, n in zip(pooled, found.instances, strict=True) if n}
    return {
        "machines": counts,
        "per_hour": sum(machine.price * counts.get(machine.kind, 0) for machine in machines),
        "instances": instances,
    }


def _rate(row: Mapping[str, Any], limit_s: float) -> float:
    """Items/s of one instance in the largest batches of which two fit into the objective; 0: not one item does."""
    batches: dict[int, float] = {int(size): ms / 1000.0 for size, ms in row["batch_latency_ms"].items()}
    if batches[1] > limit_s:
        return 0.0
    return max([1.0 / batches[1], *(size / seconds for size, seconds in batches.items() if 2 * seconds <= limit_s)])


def _machines(settings: Settings, workers: Sequence[Mapping[str, Any]]) -> list[Machine]:
    """The kinds that may be started, and those of the workers that run."""
    from services.autoscaler.vms.__main__ import kinds_of  # noqa: PLC0415  (it loads the solver)

    found = {
        name: _machine(name, one.price_per_hour, ((d.kind, d.simulated, d.cores, d.memory_mb) for d in one.devices))
        for name, one in kinds_of(settings).items()
    }
    for worker in workers:
        price = sum(d["price_per_hour"] for d in worker["devices"])
        parts = ((d["kind"], d["simulated"], d["cores"], d["memory_mb"]) for d in worker["devices"])
        found.setdefault(worker["kind"], _machine(worker["kind"], price, parts))
    return list(found.values())


def _machine(name: str, price: float, devices: Iterable[tuple[str, bool, int, float]]) -> Machine:
    """devices: of each its kind, whether it is simulated, cores and MB."""
    parts: dict[str, tuple[int, float, int]] = {}
    for kind, simulated, cores, memory in devices:
        what = _hardware(kind, simulated)
        before = parts.get(what, (0, 0.0, 0))
        parts[what] = (before[0] + cores, before[1] + memory, before[2] + 1)
    return Machine(name, price, parts)


def _hardware(kind: str, simulated: bool) -> str:
    return f"{'simulated ' * simulated}{kind}"
