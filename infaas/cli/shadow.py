"""`infaas shadow`: a policy beside the running system, on its live demand, without acting."""

import asyncio
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.answers import would_have
from infaas.cli.options import DataDir, Json, Wide, names
from infaas.cli.output import Column, fail, number, print_table, progress, show, usage
from infaas.connecting import connect, locate
from infaas.errors import NotConnected

if TYPE_CHECKING:
    from services.simulation.shadow.actor import Shadow
    from services.simulation.shadow.system import ShadowSpec

_PROGRESS_S = 10.0
_LOOK_S = 0.25
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

    The policy gets the demand, catalogue, workers and loaded instances of the system, and acts on simulated machines. What it
    would have done goes to the table infaas.shadow_events and to the dashboard. At the end, or at Ctrl-C, its actions, cost and share of
    answers in time are printed beside the system's own.

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
    import uvloop  # noqa: PLC0415

    from services.shell.runtime import telemetry  # noqa: PLC0415

    spec = _spec(policy, changes, slo_target, boot, config, data_dir)
    telemetry.set_up("ERROR")
    document = uvloop.run(_run(spec, seconds, data_dir))
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


def _spec(
    policy: str,
    changes: Mapping[str, Any],
    slo_target: float | None,
    boot: float | None,
    config: Path | None,
    data_dir: Path | None,
) -> "ShadowSpec":
    """What runs. Ends the command if an option is wrong or the system is not there."""
    import msgspec  # noqa: PLC0415

    from services.autoscaler.vms.__main__ import kinds_of  # noqa: PLC0415
    from services.shell.prices import load_prices  # noqa: PLC0415
    from services.shell.settings import DECIDING, SettingsError, deciding, load  # noqa: PLC0415
    from services.simulation.scenario.policies import base_of, base_tree, settings_of  # noqa: PLC0415
    from services.simulation.scenario.toml import Location, ScenarioError  # noqa: PLC0415
    from services.simulation.shadow.system import ShadowSpec  # noqa: PLC0415

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
        prices = load_prices(settings.prices)
    except (ScenarioError, SettingsError, msgspec.ValidationError) as error:
        usage(str(error))
    except NotConnected as error:
        fail(str(error))
    label = [policy, *(f"{key}={value}" for key, value in changes.items())]
    if slo_target is not None:
        label.append(f"slo_target={slo_target:g}")
    if boot is not None:
        kinds = {name: msgspec.structs.replace(kind, boot_s=boot) for name, kind in kinds.items()}
    return ShadowSpec(
        name=" ".join(label),
        base=base,
        settings=settings,
        kinds=kinds,
        prices=prices,
        boot_s=_BOOT_S if boot is None else boot,
        slo_target=slo_target,
    )


async def _run(spec: "ShadowSpec", seconds: float | None, data_dir: Path | None) -> dict[str, Any]:
    """Run it; returns the result. Ends the command if the system is not there or the policy fails."""
    from bus.port import BusError, Forbidden  # noqa: PLC0415
    from services.shell.runtime.runtime import Runtime  # noqa: PLC0415
    from services.simulation.shadow.actor import LISTEN, make_shadow  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with connect(data_dir=data_dir) as client:
        actor = make_shadow(client.subjects, spec)
        runtime = Runtime("shadow", lambda: actor, client.bus, client.subjects)
        try:
            await runtime.start()
        except Forbidden:
            raise
        except BusError as error:
            fail(f"the system there does not run as it should: {error}; see what is missing with infaas doctor")
        progress(
            f"listening for {LISTEN:g} s, then {spec.name} runs beside the system"
            + (f" for {seconds:g} s" if seconds is not None else " until Ctrl-C")
        )
        try:
            await _watch(actor, stop, seconds)
        finally:
            await runtime.stop()
    if actor.fault:
        fail(actor.fault)
    document = actor.document()
    if not document:
        fail(f"stopped before {spec.name} had begun: nothing was recorded; let it run for more than {LISTEN:g} s")
    if document["real"]["items"] and not document["shadow"]["items"]:
        fail(
            "queries were answered, but no report of demand was heard: either all came from a cache, or these credentials may not"
            " hear it: use those of an operator (infaas auth)"
        )
    if not document["shadow"]["items"]:
        fail("no query came in this time, so nothing can be compared: send some (infaas bench), or run for longer")
    return document


async def _watch(actor: "Shadow", stop: asyncio.Event, seconds: float | None) -> None:
    """Return at the end: after `seconds`, at a signal, or when it cannot go on. Prints the progress."""
    told = 0.0
    while not stop.is_set() and not actor.fault:
        document = actor.document()
        ran = document.get("seconds", 0.0)
        if seconds is not None and ran >= seconds:
            return
        if ran - told >= _PROGRESS_S:
            told = ran
            progress(_line(document))
        try:
            await asyncio.wait_for(stop.wait(), _LOOK_S)
        except TimeoutError:
            continue


def _line(document: Mapping[str, Any]) -> str:
    ours, real = document["shadow"], document["real"]
    if not ours["items"]:
        return f"{document['seconds']:.0f} s: no query has come yet: send some (infaas bench)"
    return (
        f"{document['seconds']:.0f} s: {ours['items']:,} items, in time {_share(ours)} (really {_share(real)}); "
        f"US$ {number(ours['cost_rate'])}/h (really {number(real['cost_rate'])}); {sum(ours['actions'].values())} actions"
        f" (really {sum(real['actions'].values())})"
    )


def _share(side: Mapping[str, Any]) -> str:
    return "-" if side["in_time"] is None else f"{100 * side['in_time']:.2f} %"


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
        Column("items", lambda side: f"{side['items']:,}"),
        Column("in time", _share),
        Column("US$/h,\nmachines", lambda side: number(side["cost_rate"])),
        Column("US$/h,\ninstances", lambda side: number(side["apps_cost_rate"]), rank=1),
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
