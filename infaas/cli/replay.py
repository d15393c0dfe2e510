"""`infaas replay`: recorded traffic under other policies. Needs the database, or an exported file."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.answers import would_have
from infaas.cli.options import DataDir, Json, Names, Wide, moment, names
from infaas.cli.output import (
    Column,
    fail,
    for_the_result,
    local_time,
    number,
    one_line,
    print_table,
    progress,
    show,
    usage,
)
from infaas.cli.simulate import (
    check_outputs,
    clairvoyant,
    compare_with,
    print_details,
    print_figures,
    print_oracle,
    run_scenario,
    write_outputs,
)

if TYPE_CHECKING:
    from services.simulation.replay.recording import Recording, RecordingHead


_DAY = "-24h"
_PROGRESS_S = 3.0  # between lines that tell how much has been read
_MOST = 10_000  # machines of one kind


def replay(
    *,
    from_: Annotated[str | None, Parameter(name="--from", allow_leading_hyphen=True)] = None,
    to: Annotated[str | None, Parameter(name="--to", allow_leading_hyphen=True)] = None,
    app: Names = None,
    policy: Names = None,
    slo_target: Annotated[list[float] | None, Parameter(consume_multiple=True, negative="")] = None,
    worker: Names = None,
    boot: Annotated[float | None, Parameter(validator=Number(gte=0))] = None,
    machines: Path | None = None,
    oracle: bool = False,
    file: Path | None = None,
    export: Path | None = None,
    plot: Path | None = None,
    out: Path | None = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Simulate recorded traffic under other policies: what would last Tuesday have cost?

    Reads queries, catalogue and machines from the database, simulates each policy with them, and prints the results beside what
    really happened.

    Example: `infaas replay --from -7d --slo-target 0.999 0.99`

    Parameters
    ----------
    from_
        Begin of the range: 2026-11-17, 2026-11-17T08:00 (local time), 2026-11-17T08:00Z, or a time ago as -90m, -7d.
        Default: -24h.
    to
        End of the range, written like the begin. Default: now.
    app
        Replay only the queries of these apps.
    policy
        Policies to simulate, named as for `infaas simulate`. Default: infaas, static and replicate; with --slo-target infaas.
    slo_target
        Shares of queries to be answered in time. Each policy is simulated once with each of them, instead of the apps' own targets:
        --slo-target 0.999 0.95.
    worker
        Number of machines of a recorded kind: KIND=N, or KIND=N:MOST for N at the begin and at most MOST.
    boot
        Seconds from the order of a machine until it works. Default: 30.
    machines
        A TOML file with [[worker]], [[policy]], [settings] and the like, as in a scenario. It replaces the recorded machines.
    oracle
        Also compute what one who knows the load could reach at best with these machines, and the ratios to it of what happened and of each policy.
    file
        Replay this file, which --export wrote, instead of the database.
    export
        Write the recording into this file and simulate nothing. A name that ends in .gz is compressed.
    plot
        Draw what happened and the simulations into this file (.png, .svg or .pdf). Needs the extra `plot`.
    out
        Also write the JSON document into this file.

    """
    policies = names("--policy", policy, "names of policies")
    apps = names("--app", app, "names of apps")
    targets = _targets(slo_target)
    counts = dict(_count(one) for one in names("--worker", worker, "KIND=N"))
    if file is not None and (from_ or to):
        usage(
            f"--{'from' if from_ else 'to'}: {file} holds one range already: leave the option out, or export another range"
        )
    if file is not None and export is not None:
        usage("--export: --file names an exported file already: leave out --file or --export")
    if export is not None:
        given = {
            "--policy": policy,
            "--slo-target": slo_target,
            "--worker": worker,
            "--boot": boot,
            "--machines": machines,
            "--oracle": oracle or None,
            "--plot": plot,
        }
        for option, value in given.items():
            if value is not None:
                usage(f"{option}: --export simulates nothing: export first, then use {option} with --file {export}")
    if machines is not None and boot is not None:
        usage(f"--boot: set boot_s of each [[worker]] in {machines} instead")
    check_outputs(plot, out)
    check_outputs(None, export, "--export")
    from services.core.toml import TomlError  # noqa: PLC0415
    from services.simulation.replay.build import BOOT_S, ReplayOptions, build  # noqa: PLC0415  (after the arguments have been understood)
    from services.simulation.replay.recording import ReplayError  # noqa: PLC0415
    from services.simulation.replay.recording import export as write  # noqa: PLC0415

    options = ReplayOptions(
        policies=policies,
        machines=machines,
        counts=counts,
        boot_s=BOOT_S if boot is None else boot,
        apps=apps,
        slo_targets=targets,
    )
    try:
        with _source(file, from_, to, apps, data_dir) as source:
            if export is not None:
                count = write(source, export)
                document = {"file": str(export), "queries": count, **_range(source.head)}
                show(document, json, lambda _: print(f"wrote {count:,} queries into {export}"))
                return 0
            head = source.head
            with for_the_result():
                found = build(source, options, _reading_progress(head.queries))
    except (ReplayError, TomlError) as error:
        usage(str(error))
    best = clairvoyant(found.scenario) if oracle else None
    simulated = run_scenario(found.scenario)
    if targets:
        for run, one in zip(simulated["policies"], found.scenario.policies, strict=True):
            run["slo_target"] = one.settings.autoscaler.slo_target
    document = {
        **simulated,
        **_range(head),
        "apps": sorted(apps or head.only or ()) or None,
        "recorded": found.recorded,
        "cost": found.cost,
        "machines": [
            {"kind": one.kind, "price_per_hour": one.price_per_hour, "start": one.start, "max": one.maximum}
            for one in found.scenario.policies[0].machines
        ],
        "notes": found.notes,
    }
    if best is not None:
        document["oracle"] = best
        compare_with(best, [found.recorded, *simulated["policies"]])
        if not found.cost["comparable"]:
            found.recorded["to_oracle"]["cost"] = None
    write_outputs(document, None, out)
    if plot is not None:
        write_outputs(plot_document(document), plot, None)
    show(document, json, lambda found: print_replay(found, wide=wide))
    return 0


@contextmanager
def _source(
    file: Path | None, from_: str | None, to: str | None, apps: tuple[str, ...], data_dir: Path | None
) -> "Iterator[Recording]":
    """The recording of the file, or of the database."""
    from services.simulation.replay.database import TimeRange, database  # noqa: PLC0415
    from services.simulation.replay.recording import exported  # noqa: PLC0415

    if file is not None:
        yield exported(file)
        return
    now = datetime.now(UTC)
    begins, ends = moment(from_ or _DAY, "--from", now), moment(to or "now", "--to", now)
    if ends <= begins:
        usage(f"--to {to or 'now'}: must be after --from {from_ or _DAY}")
    import psycopg  # noqa: PLC0415

    from infaas.connecting import find_sql  # noqa: PLC0415

    dsn = find_sql(data_dir)
    try:
        with database(dsn, TimeRange(begins, ends, apps)) as source:
            yield source
    except psycopg.OperationalError as error:
        fail(f"cannot read the database: {one_line(error)}; is the system running? (infaas doctor)")
    except psycopg.Error as error:
        fail(f"cannot read the database: {one_line(error)}")


def _targets(given: list[float] | None) -> tuple[float, ...]:
    """The targets of the option, each once."""
    if given is not None and not given:
        usage("--slo-target needs a value: write shares after it, as 0.999 0.95")
    for target in given or ():
        if not 0 < target < 1:
            usage(
                f"--slo-target {target:g}: must be above 0 and below 1: with 0.99, one query in a hundred may be missed"
            )
    if len(set(given or ())) < len(given or ()):
        usage("--slo-target: a target is given twice: give each once")
    return tuple(given or ())


def _count(text: str) -> tuple[str, tuple[int, int]]:
    """Read KIND=N or KIND=N:MOST: the kind, N and MOST."""
    kind, sign, numbers = text.partition("=")
    first, _, most = numbers.partition(":")
    most = most or first
    if not (kind and sign and first.isascii() and first.isdecimal() and most.isascii() and most.isdecimal()):
        usage(f"--worker {text}: write KIND=N or KIND=N:MOST with whole numbers")
    if not int(first) <= int(most) <= _MOST:
        usage(f"--worker {text}: N must be at most MOST, and MOST at most {_MOST}")
    return kind, (int(first), int(most))


def _range(head: "RecordingHead") -> dict[str, str]:
    """The range as in the JSON document."""
    first, last = (datetime.fromtimestamp(at, UTC).isoformat() for at in (head.begins, head.ends))
    return {"from": first, "to": last}


def _reading_progress(total: int) -> Callable[[int], None]:
    """Prints now and then how much has been read."""
    last = time.monotonic()

    def on_read(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            progress(f"read {count:,} of {total:,} queries")

    return on_read


def print_replay(document: Mapping[str, Any], *, wide: bool = False) -> None:
    """Print the document of `infaas replay --json`: a sentence for each policy, then tables: first what happened, then the simulations."""
    recorded, runs = document["recorded"], document["policies"]
    for run in runs:
        print(_conclusion(run, recorded, comparable=document["cost"]["comparable"]))
    print()
    of = f", {', '.join(document['apps'])}" if document["apps"] else ""
    print(f"{local_time(document['from'])} to {local_time(document['to'])} ({number(recorded['duration_s'])} s){of}")
    print(f"machines: {', '.join(_machine(one) for one in document['machines'])}")
    print()
    named = [{**run, "policy": f"{run['policy']} (simulated)"} for run in runs]
    if "slo_target" in runs[0]:
        print_targets([recorded, *named], wide=wide)
    else:
        print_figures([recorded, *named], wide=wide)
    print()
    print(f"cost: {document['cost']['text']}")
    print_details(runs)
    print_oracle(document.get("oracle"), [recorded, *runs])
    for note in document["notes"]:
        print(f"note: {note}")
    best = "" if "slo_target" in runs[0] else "* the best; "
    print(f"{best}recorded: what happened; everything else is simulated")


def print_targets(runs: Sequence[Mapping[str, Any]], *, wide: bool = False) -> None:
    """Print what each target cost, one line for each run. The first one is what happened, with the apps' own targets."""
    columns = (
        Column("policy", "policy"),
        Column("target", lambda run: f"{run['slo_target']:g}" if "slo_target" in run else "-"),
        Column("missed", lambda run: f"{100 * run['slo_violation_ratio']:.3f} %"),
        Column("met", _met),
        Column("US$", lambda run: _amount(run["cost"])),
        Column("US$/1,000 in time", lambda run: _amount(run["cost_per_1000_in_time"])),
    )
    print_table(runs, columns, "", wide=wide)


def _met(run: Mapping[str, Any]) -> str:
    """Whether each app's target was met."""
    shares = [(one["attainment"], one["slo_target"]) for one in run["apps"].values()]
    known = [reached >= target for reached, target in shares if reached is not None and target is not None]
    return ("yes" if all(known) else "no") if known else "-"


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def plot_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document as the plot takes it: what happened is the first of the runs."""
    recorded, runs = document["recorded"], document["policies"]
    series = recorded["series"]
    if any("offline_done" in run["series"] for run in runs):
        series = {**series, "offline_done": [nan] * len(series["time"])}  # the times of finished items are not recorded
    first = {**recorded, "cost": recorded["cost"] or 0.0, "series": series}
    span = f"{local_time(document['from'])} to {local_time(document['to'])}"
    named = [{**run, "policy": f"{run['policy']} (simulated)"} for run in runs]
    return {**document, "title": f"{span}: recorded, and simulated", "policies": [first, *named]}


def _machine(one: Mapping[str, Any]) -> str:
    most = f" to {one['max']}" if one["max"] != one["start"] else ""
    return f"{one['start']}{most} {one['kind']} at US$ {number(one['price_per_hour'])}/h"


def _conclusion(run: Mapping[str, Any], recorded: Mapping[str, Any], *, comparable: bool) -> str:
    """What a run would have changed. Who answers less saves nothing."""
    from services.simulation.replay.build import ALIKE  # noqa: PLC0415  (numpy takes long to import)

    less = run["answered"] < ALIKE * recorded["answered"]
    paid = recorded["cost"] if comparable and not less else None
    told = would_have(run["policy"], run["cost"], paid, run["slo_violation_ratio"], recorded["slo_violation_ratio"])
    if not less:
        return told
    return f"{told} It answers {run['answered']:,} of the {recorded['answered']:,} queries that were answered then: its cost is not compared."
