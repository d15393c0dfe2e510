"""`infaas shadow`: a policy beside the running system, on its live demand, without acting."""

import asyncio
import secrets
import signal
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.answers import would_have
from infaas.cli.options import DataDir, Json, Wide, names
from infaas.cli.output import Column, fail, for_the_result, number, one_line, print_table, progress, show, usage
from infaas.connecting import connect, find_sql, locate
from infaas.errors import NotConnected

if TYPE_CHECKING:
    from infaas.client import Client
    from services.simulation.replay.build import ReplayOptions
    from services.simulation.replay.shadow import ShadowRun

_LOOK_S = 10.0
_RECORDED_S = 5.0  # until what has happened is in SQL
_SHARE = 0.05  # of the time that may go into looks: each replays everything from the beginning
_ACTIONS = 'infaas sql "SELECT time, action, variant, worker, reason, cost_rate FROM shadow_events ORDER BY time DESC LIMIT 20"'
_BOOT_S = 5.0  # of a process on this machine


def shadow(
    policy: str | None = None,
    /,
    *,
    seconds: Annotated[float | None, Parameter(validator=Number(gt=0, lte=31 * 86400))] = None,
    slo_target: float | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")] = None,
    boot: Annotated[float | None, Parameter(validator=Number(gte=0, lte=86400))] = None,
    config: Path | None = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Run another scaling policy on the live demand of a running system, without acting: what would it do and cost?

    What has come since it began is replayed under the policy, every 10 s or, where that takes long, less often. What it would have done
    goes to the table infaas.shadow_events and to the dashboard. At the end, or at Ctrl-C, its actions, cost and share of answers in
    time are printed beside the system's own. Reads the database, as `infaas replay` does.

    Example: `infaas shadow static --seconds 600`

    Parameters
    ----------
    policy
        infaas, infaas-ilp, clipper+ (static), sm+ (replicate), round-robin, brute-force, or the import path of a class of your own.
    seconds
        How long to run. Default: until Ctrl-C.
    slo_target
        Share of queries to be answered in time that the policy aims at, for all apps. Default: the apps' own targets.
    set_
        Settings of the policy that differ from the system's, as autoscaler.hold_s=60. `infaas settings` lists the settings.
    boot
        Seconds from the order of a machine until it works. Default: boot_s of its kind, else 5.
    config
        The system's settings file. Default: the settings of the system that `infaas up` runs.

    """
    if policy is None:
        usage("name a policy: infaas shadow POLICY, as infaas, static, replicate or module:Class")
    if slo_target is not None and not 0 < slo_target < 1:
        usage(
            f"--slo-target {slo_target:g}: must be above 0 and below 1: with 0.99, one query in a hundred may be late"
        )
    changes = dict(_change(one) for one in names("--set", set_, "KEY=VALUE, as autoscaler.hold_s=60"))
    options = _options(policy, changes, slo_target, boot, config, data_dir)
    with for_the_result():
        document = asyncio.run(_run(options, seconds, data_dir))
    show(document, json, lambda found: print_shadow(found, wide=wide))
    return 0


def _change(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE: a value of TOML, or text."""
    key, sign, value = text.partition("=")
    if not (key.strip() and sign and value.strip()):
        usage(f"--set {text}: write KEY=VALUE, as autoscaler.hold_s=60")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _options(
    policy: str,
    changes: Mapping[str, Any],
    slo_target: float | None,
    boot: float | None,
    config: Path | None,
    data_dir: Path | None,
) -> "ReplayOptions":
    """What is replayed. Ends the command if an option is wrong or the system is not there."""
    import msgspec  # noqa: PLC0415

    from services.autoscaler.vms.__main__ import kinds_of  # noqa: PLC0415
    from services.core.toml import Location, TomlError  # noqa: PLC0415
    from services.shell.settings import DECIDING, SettingsError, deciding, load  # noqa: PLC0415
    from services.simulation.replay.build import ReplayOptions  # noqa: PLC0415
    from services.simulation.scenario.policies import PolicyBlock, base_of, base_tree, common_of, settings_of  # noqa: PLC0415

    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, last = key.split(".")
        if not sections and last != "goal":
            usage(f"--set {key}: must be a section and a key, as autoscaler.hold_s (infaas settings lists them)")
        if (sections or [last])[0] not in DECIDING:
            usage(f"--set {key}: no policy reads it; these sections count: {', '.join(DECIDING)}")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
            if not isinstance(here, dict):
                usage(f"--set {key}: {section} is set to a value, too")
        here[last] = value
    try:
        base = base_of(policy, (), Path(), Location("POLICY"))
        known: Mapping[str, Any] = deciding(load(config)) if config is not None else locate(data_dir).settings
        settings = settings_of(Location("--set"), known, base_tree(base), tree)
        kinds = kinds_of(settings) if settings.machines.provider != "off" else {}
    except (TomlError, SettingsError, msgspec.ValidationError) as error:
        usage(str(error))
    except NotConnected as error:
        fail(str(error))
    label = " ".join([policy, *(f"{key}={value}" for key, value in changes.items())])
    if boot is not None:
        kinds = {name: msgspec.structs.replace(kind, boot_s=boot) for name, kind in kinds.items()}
    return ReplayOptions(
        policies=(label,),
        own=PolicyBlock(name=label, base=base, settings={"goal": settings.goal, **tree}),
        settings=common_of(known),
        kinds=kinds,
        boot_s=_BOOT_S if boot is None else boot,
        slo_targets=() if slo_target is None else (slo_target,),
    )


async def _run(options: "ReplayOptions", seconds: float | None, data_dir: Path | None) -> dict[str, Any]:
    """Look again and again until the end; returns the result. Ends the command if the system is not there or the policy fails."""
    stop, source = asyncio.Event(), secrets.token_hex(8)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with connect(data_dir=data_dir) as client:
        began = told = time.time()
        ends = float("inf") if seconds is None else began + seconds
        progress(
            f"{options.policies[0]} runs beside the system"
            + (f" for {seconds:g} s" if seconds is not None else " until Ctrl-C")
        )
        pause, number = _LOOK_S, 0
        while True:
            await _pause(stop, min(pause, ends - time.time()))
            last = stop.is_set() or time.time() >= ends
            if last:
                ended = time.time()
                await asyncio.sleep(_RECORDED_S)
            else:
                ended = time.time() - _RECORDED_S
            looked = time.monotonic()
            found = await asyncio.to_thread(_looked, find_sql(data_dir), began, ended, options)
            pause = max(_LOOK_S, (time.monotonic() - looked) / _SHARE)
            if found is not None:
                rows = list(found.events(told))
                told = ended
                if rows:
                    number += 1
                    await _record(client, f"{source}-{number}", rows)
            if last:
                break
            progress(_line(ended - began, found))
    if found is None:
        fail("no query came in this time, so nothing can be compared: send some (infaas bench), or run for longer")
    return {**found.document(), "seconds": ended - began}


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), max(0.0, seconds))
    except TimeoutError:
        return


def _looked(dsn: str, began: float, ended: float, options: "ReplayOptions") -> "ShadowRun | None":
    """What came in this time under the policy. None: nothing came."""
    import psycopg  # noqa: PLC0415

    from services.core.toml import TomlError  # noqa: PLC0415
    from services.simulation.kernel import ActorHalted  # noqa: PLC0415
    from services.simulation.replay.recording import NothingRecorded, ReplayError  # noqa: PLC0415
    from services.simulation.replay.shadow import shadow_run  # noqa: PLC0415

    try:
        return shadow_run(dsn, began, ended, options)
    except NothingRecorded:
        return None
    except (ReplayError, TomlError) as error:
        fail(str(error))
    except ActorHalted as error:
        fail(f"the policy failed: {error}")
    except psycopg.Error as error:
        fail(f"cannot read the database: {one_line(error)}; is the system running? (infaas doctor)")


async def _record(client: "Client", identity: str, rows: list[Any]) -> None:
    from bus.codec import encode  # noqa: PLC0415

    body = encode({"id": identity, "rows": rows})
    await client.bus.publish_durable(client.subjects.event("shadow"), body, identity)


def _line(seconds: float, found: "ShadowRun | None") -> str:
    if found is None:
        return f"{seconds:.0f} s: no query has come yet: send some (infaas bench)"
    document = found.document()
    ours, real = document["shadow"], document["real"]
    return (
        f"{seconds:.0f} s: {ours['queries']:,} queries, in time {_share(ours)} (really {_share(real)}); "
        f"US$ {_rate(ours)}/h (really {_rate(real)}); {sum(ours['actions'].values())} actions"
        f" (really {sum(real['actions'].values())})"
    )


def _share(side: Mapping[str, Any]) -> str:
    return "-" if side["in_time"] is None else f"{100 * side['in_time']:.2f} %"


def _rate(side: Mapping[str, Any]) -> str:
    return "-" if side["cost_rate"] is None else number(side["cost_rate"])


def print_shadow(document: Mapping[str, Any], *, wide: bool = False) -> None:
    """Print the document of `infaas shadow --json`: a sentence, then tables."""
    ours, real = document["shadow"], document["real"]
    missed = [None if side["in_time"] is None else 1 - side["in_time"] for side in (ours, real)]
    print(would_have(document["policy"], ours["cost_rate"], real["cost_rate"], *missed))
    print(
        f"{document['policy']}, {number(document['seconds'])} s beside the system; it acted on simulated machines only"
    )
    print()
    columns = (
        Column("", "what"),
        Column("queries", lambda side: f"{side['queries']:,}"),
        Column("in time", _share),
        Column("US$/h", _rate),
        Column("machines\nat the end", lambda side: [f"{count} {kind}" for kind, count in side["machines"].items()], 3),
        Column("instances", "instances", rank=2),
    )
    rows = [{**ours, "what": f"{document['policy']} (simulated)"}, {**real, "what": "the system"}]
    print_table(rows, columns, "", wide=wide)
    print()
    actions = (
        Column("action", "action"),
        Column("simulated", lambda one: ours["actions"].get(one["action"], 0)),
        Column("the system", lambda one: real["actions"].get(one["action"], 0)),
    )
    kinds = sorted(ours["actions"].keys() | real["actions"].keys())
    print_table([{"action": kind} for kind in kinds], actions, "neither took any action")
    for note in document["notes"]:
        print(f"note: {note}")
    print(f"\nits actions: {_ACTIONS}")
