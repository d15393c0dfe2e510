"""`infaas simulate`: the services' own logic on virtual time. Needs no system."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import Json, Names, Whole, Wide, names
from infaas.cli.output import (
    Column,
    fail,
    for_the_result,
    number,
    print_json,
    print_table,
    progress,
    progress_bars,
    show,
    usage,
)
from infaas.cli.simulate_faults import check_scenario, seeds_in, simulate_faults

if TYPE_CHECKING:
    from services.simulation.scenario.model import Scenario


_PICTURES = (".png", ".svg", ".pdf")


def simulate(
    scenario: Path | None = None,
    /,
    *,
    policy: Names = None,
    oracle: bool = False,
    faults: str | None = None,
    seed: Annotated[Whole | None, Parameter(validator=Number(gte=0))] = None,
    plot: Path | None = None,
    out: Path | None = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Simulate the load, machines and faults of a scenario file under one or several policies.

    The services' own code runs on virtual time. Prints SLO violations, accuracy, throughput, latency and cost of each policy. The same
    seed gives the same result.

    Example: `infaas simulate examples/scenario.toml --policy infaas static`

    Parameters
    ----------
    scenario
        A scenario file (TOML), described in docs/scenarios.md.
    policy
        Policies to simulate instead of the file's: names of [[policy]] blocks, infaas, infaas-ilp, clipper+ (static),
        sm+ (replicate), round-robin, brute-force, or import paths of your own classes.
    oracle
        Also compute what one who knows the load could reach at best with the first policy's machines and targets: the least cost, and the most
        accuracy of the answers in time. Each policy's `to_oracle` has its ratios to them.
    faults
        Instead of a file: a whole small system and its faults, drawn from this seed, with everything checked that must always hold
        (docs/reliability.md). A seed that fails is shrunk to the smallest scenario that does. FIRST-LAST: many seeds, on all cores.
    seed
        Seed of the arrivals and all other random numbers, instead of the file's.
    plot
        Draw the results into this file (.png, .svg or .pdf). Needs the extra `plot`.
    out
        Also write the JSON document into this file.

    """
    policies = list(names("--policy", policy, "names of policies"))
    if scenario is None and policies and policies[-1].endswith(".toml"):  # `--policy infaas sm+ fig6.toml`
        scenario = Path(policies.pop())
    if faults is not None:
        if scenario is not None or policies or oracle or seed is not None or plot is not None or out is not None:
            usage("--faults takes a seed and no file, and of the options --json alone: leave the others out")
        return simulate_faults(seeds_in(faults), json=json)
    if scenario is None:
        usage("name a scenario file: infaas simulate SCENARIO.toml")
    check_outputs(plot, out)
    from services.core.toml import TomlError  # noqa: PLC0415  (after the arguments have been understood)
    from services.simulation.scenario.read import read_scenario  # noqa: PLC0415  (after the arguments have been understood)

    try:
        with for_the_result():
            found = read_scenario(scenario, policies=policies, seed=seed)
    except TomlError as error:
        usage(str(error))
    if found.checked:
        return check_scenario(found, json=json)
    best = clairvoyant(found) if oracle else None
    document = run_scenario(found)
    if best is not None:
        document["oracle"] = best
        compare_with(best, document["policies"])
    write_outputs(document, plot, out)
    show(document, json, lambda found: print_runs(found, wide=wide))
    return 0


def clairvoyant(scenario: "Scenario") -> dict[str, Any]:
    """The bounds of one who knows the load. Ends the command where none is known of such a scenario."""
    from services.simulation.oracle import best, unknown  # noqa: PLC0415

    if (why := unknown(scenario)) is not None:
        usage(f"--oracle: {why}")
    progress("computing what one who knows the load could reach (a minute at most)")
    with for_the_result():
        return best(scenario)._asdict()


def compare_with(best: Mapping[str, Any], runs: Iterable[dict[str, Any]]) -> None:
    """Add to each run its ratios to the bounds."""
    for run in runs:
        run["to_oracle"] = {
            "cost": _share(run["cost"], best["cost"]),
            "accuracy": _share(run["effective_accuracy"], best["accuracy"]),
        }


def _share(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def run_scenario(scenario: "Scenario") -> dict[str, Any]:
    """Simulate all policies of a scenario and show the progress. Ends the command if a policy fails."""
    from services.simulation.run import SimulationError, simulate_all  # noqa: PLC0415

    try:
        with (
            progress_shown([one.name for one in scenario.policies], scenario.duration_s) as on_progress,
            for_the_result(),
        ):
            return simulate_all(scenario, on_progress)
    except SimulationError as error:
        if os.environ.get("INFAAS_TRACEBACK"):
            raise
        fail(f"{error} (INFAAS_TRACEBACK=1 shows where)")


def check_outputs(plot: Path | None, out: Path | None, name: str = "--out") -> None:
    """End the command before a long run if its results could not be written. name: of the option that sets `out`."""
    if plot is not None and plot.suffix.lower() not in _PICTURES:
        usage(f"--plot {plot}: the name must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    if plot is not None and find_spec("matplotlib") is None:
        usage("--plot needs matplotlib, which comes with the extra `plot`: pip install 'infaas[plot]'")
    for option, path in (("--plot", plot), (name, out)):
        if path is None:
            continue
        if not path.parent.is_dir():
            usage(f"{option} {path}: there is no directory {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            usage(f"{option} {path}: cannot be written")


def write_outputs(document: Mapping[str, Any], plot: Path | None, out: Path | None) -> None:
    """Write the document and its picture to the files that are given."""
    if out is not None:
        with out.open("w", encoding="utf-8") as file:
            print_json(document, file)
        progress(f"wrote {out}")
    if plot is not None:
        from services.simulation.plot import draw  # noqa: PLC0415

        draw(document, plot)
        progress(f"wrote {plot}")


# The table: one line for each policy, with the best of each figure marked.

_MARK, _NONE = "*", " "


class _Figure(NamedTuple):
    """key: of the result. best: min or max; None if no value is better than another. text: a value as printed."""

    title: str
    key: str
    best: Callable[[Sequence[float]], float] | None
    text: Callable[[float], str]
    rank: int = 0


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


_FIGURES = (
    _Figure("queries", "queries", None, lambda v: f"{v:,.0f}", 2),
    _Figure("answered", "answered", None, lambda v: f"{v:,.0f}", 4),
    _Figure("late", "late", None, lambda v: f"{v:,.0f}", 5),
    _Figure("refused", "refused", None, lambda v: f"{v:,.0f}", 5),
    _Figure("failed", "failed", None, lambda v: f"{v:,.0f}", 5),
    _Figure("violations", "slo_violation_ratio", min, _percent),
    _Figure("accuracy", "effective_accuracy", max, lambda v: f"{v:.4f}"),
    _Figure("worst drop", "max_accuracy_drop", min, lambda v: f"{v:.4f}", 6),
    _Figure("answers/s", "throughput_qps", max, number, 3),
    _Figure("p50 ms", "p50_ms", min, number, 3),
    _Figure("p99 ms", "p99_ms", min, number),
    _Figure("US$", "cost", min, lambda v: f"{v:.4g}"),
    _Figure("US$/1,000", "cost_per_1000", min, number, 1),
    _Figure("utilisation", "mean_utilisation", None, lambda v: f"{100 * v:.1f} %", 6),
)


def print_runs(document: Mapping[str, Any], *, wide: bool = False) -> None:
    """Print the document of `infaas simulate --json` as tables."""
    runs: Sequence[Mapping[str, Any]] = document["policies"]
    print(f"{document['scenario']}, seed {document['seed']}, {number(runs[0]['duration_s'])} s, simulated")
    print_figures(runs, wide=wide)
    print()
    print_details(runs)
    if len(runs) > 1:
        print(f"{_MARK} the best of these policies")
    print_oracle(document.get("oracle"), runs)


def print_oracle(best: Mapping[str, Any] | None, runs: Iterable[Mapping[str, Any]]) -> None:
    """Print the bounds, if they are known, and each run's ratios to them."""
    if best is not None:
        print(
            f"\nWho knows the load pays at least {_dollars(best['cost'])}, and reaches at most an accuracy of {best['accuracy']:.4f}"
            f" with {_percent(best['in_time'])} in time."
        )
        for why in best["left_out"]:
            print(f"{why}.")
        for run in runs:
            cost, accuracy = (run["to_oracle"][name] for name in ("cost", "accuracy"))
            said = f"{'-' if cost is None else f'{cost:.2f}'} times that cost, {'-' if accuracy is None else _percent(accuracy)} of that accuracy"
            short = any((one.get("ensemble") or {}).get("missing") for one in run["apps"].values())
            missed = ", and its targets missed" if _missed(run["apps"]) else ""
            print(f"{run['policy']}: {said}{missed}{', and members missing in its answers' if short else ''}")


def _dollars(value: float | None) -> str:
    return "a sum that is not known (the targets cannot be met)" if value is None else f"US$ {value:.4g}"


def print_figures(runs: Sequence[Mapping[str, Any]], *, wide: bool = False) -> None:
    """Print one line for each run."""
    columns = [Column("policy", "policy")]
    rows: list[dict[str, Any]] = [{"policy": run["policy"]} for run in runs]
    for figure in _FIGURES:
        cells = [figure.title + _NONE, *_cells(figure, [run[figure.key] for run in runs])]
        width = max(map(len, cells))
        title, *aligned = (cell.rjust(width) for cell in cells)
        columns.append(Column(title, figure.key, figure.rank))
        for row, cell in zip(rows, aligned, strict=True):
            row[figure.key] = cell
    print_table(rows, columns, "", wide=wide)


def print_details(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print what was scaled, refused and decided in each run."""
    for run in runs:
        _details(run, max(len(one["policy"]) for one in runs))


def _cells(figure: _Figure, values: Sequence[float | None]) -> list[str]:
    """The values as text. The best one is marked, unless all are the same."""
    shown = ["-" if value is None else figure.text(value) for value in values]
    known = [value for value in values if value is not None]
    best = figure.text(figure.best(known)) if figure.best is not None and known else None
    marked = best if len(set(shown) - {"-"}) > 1 else None
    return [cell + (_MARK if cell == marked else _NONE) for cell in shown]


def _details(run: Mapping[str, Any], wide: int) -> None:
    """Print what was scaled and refused, missed targets, the offline jobs, and the speed of the simulation."""
    actions = ", ".join(f"{name} {count:,}" for name, count in run["scale_actions"].items()) or "no scaling"
    refusals = ", ".join(f"{name} {count:,}" for name, count in run["refusals"].items())
    jobs = run.get("jobs") or ()
    finished = sum(job["finished_s"] is not None for job in jobs)
    done, inputs = sum(job["done"] for job in jobs), sum(job["inputs"] for job in jobs)
    decided = run["decisions"]["p99_us"]
    parts = [
        actions,
        f"refused: {refusals}" if refusals else "",
        _missed(run["apps"]),
        f"offline: {finished} of {len(jobs)} jobs, {done:,} of {inputs:,} items" if jobs else "",
        f"decided in {number(decided)} us (p99)" if decided is not None else "",
        f"{number(run['events_per_s'])} events/s" if run["events_per_s"] is not None else "",
    ]
    print(f"{run['policy'].ljust(wide)}  {'; '.join(part for part in parts if part)}")
    for app, one in run["apps"].items():
        if "ensemble" in one:
            print(f"{' ' * wide}  {app}: {_ensemble(one['ensemble'])}")
        if "pipeline" in one:
            for line in _pipeline(one):
                print(f"{' ' * wide}  {app}: {line}")


def _pipeline(app: Mapping[str, Any]) -> Iterator[str]:
    """What a pipeline reached beside what its plan said, and each of its vertices."""
    found = app["pipeline"]
    plan = found["plan"] or {}
    planned = f" (planned {number(plan['p99_ms'])})" if plan else ""
    cost = f" (planned {plan['cost']:.4g}), {len(found['changes'])} changes of replicas" if plan else " of queries"
    attained = "" if app["attainment"] is None else f"{_percent(app['attainment'])} in time, "
    yield f"{attained}p99 {'-' if app['p99_ms'] is None else number(app['p99_ms'])}{planned} ms, US$ {found['cost']:.4g}{cost}"
    for name, one in found["vertices"].items():
        parts = [
            f"{one['visits']:,} visits",
            f"{one['share']:.3g} a query" if one["share"] is not None else "",
            f"batches of {one['mean_batch']:.3g}" if one["mean_batch"] is not None else "",
            f"{one['plan']['replicas']} x {one['plan']['variant']}, at the end {one['replicas']}"
            if "plan" in one
            else "",
        ]
        yield f"{name}: {', '.join(part for part in parts if part)}"


def _ensemble(found: Mapping[str, Any]) -> str:
    """How well several models answered together, and each alone by its feedback."""
    figures = [
        f"error {_percent(found['error'])}" if found["error"] is not None else "",
        f"confidence {found['confidence']:.3f}" if found["confidence"] is not None else "",
        f"missing {found['missing']:.3g} members an answer" if found["missing"] is not None else "",
        f"{found['cached']:,} cached" if found["cached"] else "",
        *(
            f"{name} weight {one['weight']:.3g}, error {_percent(one['error'])}"
            for name, one in found["members"].items()
            if one["weight"] is not None
        ),
    ]
    return "; ".join(figure for figure in figures if figure)


_MOST_MISSED = 5


def _missed(apps: Mapping[str, Mapping[str, Any]]) -> str:
    """The apps that miss their target, the worst first: the share in time of the share wanted."""
    short = {
        app: one["slo_target"] - one["attainment"]
        for app, one in apps.items()
        if one["slo_target"] is not None and one["attainment"] is not None and one["attainment"] < one["slo_target"]
    }
    if not short:
        return ""
    worst = sorted(short, key=lambda app: -short[app])
    shares = [f"{app} {100 * apps[app]['attainment']:.5g} % of {100 * apps[app]['slo_target']:g} %" for app in worst]
    more = f", and {len(worst) - _MOST_MISSED} more" if len(worst) > _MOST_MISSED else ""
    return f"targets missed: {', '.join(shares[:_MOST_MISSED])}{more}"


OnProgress = Callable[[str, float], None]  # policy, and the scenario's seconds so far

_FIRST_LINE_S = 3.0  # of a run before its progress is printed, without a terminal


@contextmanager
def progress_shown(policies: Sequence[str], duration_s: float) -> Iterator[OnProgress]:
    """Shows the progress of a simulation on stderr: a bar on a terminal, else one line for every tenth of a long run."""
    if not sys.stderr.isatty():
        yield by_line(policies, duration_s, time.monotonic)
        return
    with progress_bars() as shown:

        def on_progress(policy: str, at: float) -> None:
            place = policies.index(policy)
            text = policy if len(policies) == 1 else f"{policy} ({place + 1} of {len(policies)})"
            shown(text, place * duration_s + at, duration_s * len(policies))

        yield on_progress


def by_line(policies: Sequence[str], duration_s: float, clock: Callable[[], float]) -> OnProgress:
    """Prints one line for every tenth. clock: monotonic seconds."""
    began = clock()
    tenths = 0

    def on_progress(policy: str, at: float) -> None:
        nonlocal tenths
        done = (policies.index(policy) + at / duration_s) / len(policies)
        if int(10 * done + 1e-9) <= tenths:
            return
        tenths = int(10 * done + 1e-9)
        seconds = clock() - began
        if seconds >= _FIRST_LINE_S and tenths < 10:
            progress(f"{10 * tenths} %: {policy}, {at:.0f} of {duration_s:g} s, after {seconds:.0f} s")

    return on_progress
