"""Decisions of policies side by side: scenarios x policies in the simulator, as one table.

python benches/decisions.py --jobs 2                                   everything
python benches/decisions.py --only 'twitter-*' --policies infaas sm+   some of it; * and ? as in file names
python benches/decisions.py --only twitter-3 --policies infaas --quick the first 480 s: a line within a minute
python benches/decisions.py --json after.json --against before.json    before -> after

Recorded loads come from --traces; a scenario whose trace is missing is left out. Every run is a process of its own.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace

from benches.scoreboard.accuracy import accuracy_cases
from benches.scoreboard.scenarios import Built, Case, cost_cases, write
from services.simulation.report import RunReport
from services.simulation.run import SimulationError, simulate
from services.simulation.scenario.read import read_scenario
from services.simulation.scenario.toml import ScenarioError

POLICIES = ("infaas", "sm+", "clipper+")
QUICK_S = 480.0
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
Row = dict[str, Any]


class Task(NamedTuple):
    """A run. path: the scenario's file. seconds: at most so many of it."""

    scenario: str
    policy: str
    path: Path
    seconds: float | None
    seed: int | None


def run(task: Task) -> Row:
    """The figures of a run."""
    scenario = read_scenario(task.path, policies=[task.policy], seed=task.seed)
    if task.seconds is not None:
        scenario = replace(scenario, duration_s=min(task.seconds, scenario.duration_s))
    began = perf_counter()
    policy = scenario.policies[0]
    result = simulate(scenario, policy, RunReport.of(scenario, policy))
    return {
        "scenario": task.scenario,
        "policy": task.policy,
        "seed": scenario.seed,
        "goal": scenario.objective,
        **figures(result),
        "wall_s": perf_counter() - began,
    }


def figures(result: Mapping[str, Any]) -> Row:
    """What the table shows, from a policy's result (docs/simulation.md)."""
    in_time = result["answered"] - result["late"]
    actions = sum(result["scale_actions"].values())
    worst = max(result["apps"].items(), key=lambda one: one[1]["slo_violation_ratio"], default=("", {}))
    return {
        "duration_s": result["duration_s"],
        "queries": result["queries"],
        "violations": result["slo_violation_ratio"],
        "worst_app": worst[0],
        "worst_violations": worst[1].get("slo_violation_ratio", 0.0),
        "accuracy": result["effective_accuracy"],
        "cost": result["cost"],
        "cost_per_1000_in_time": 1000 * result["cost"] / in_time if in_time else None,
        "actions": actions,
        "actions_per_hour": 3600 * actions / result["duration_s"],
        "utilisation": result["mean_utilisation"],
        "p99_ms": result["p99_ms"],
        "solve_ms_p99": result["solve_ms"]["p99"],
        "late": result["late"],
        "refusals": result["refusals"],
        "scale_actions": result["scale_actions"],
        "apps": {app: one["slo_violation_ratio"] for app, one in result["apps"].items()},
    }


# -- the table


class Column(NamedTuple):
    """better: -1 where less is better, 1 where more is, 0 where neither."""

    title: str
    key: str
    form: str
    better: int = 0


COLUMNS = (
    Column("violations", "violations", ".3%", -1),
    Column("worst app", "worst_violations", ".2%", -1),
    Column("accuracy", "accuracy", ".4f", 1),
    Column("US$", "cost", ".4f", -1),
    Column("US$/1000 in time", "cost_per_1000_in_time", ".5f", -1),
    Column("actions/h", "actions_per_hour", ".0f", -1),
    Column("used", "utilisation", ".1%"),
    Column("wall s", "wall_s", ".0f"),
)


def shown(value: Any, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def cells(row: Row, before: Row | None) -> list[str]:
    """A row's cells; before: of another time, shown where it differs."""
    found = [row["scenario"], row["policy"]]
    for column in COLUMNS:
        now = shown(row.get(column.key), column.form)
        then = now if before is None or column.key == "wall_s" else shown(before.get(column.key), column.form)
        found.append(now if now == then else f"{then} -> {now}")
    return found


def table(rows: Iterable[Row], against: Mapping[tuple[str, str], Row] | None = None) -> str:
    """As Markdown, aligned."""
    against = against or {}
    lines = [["scenario", "policy", *(column.title for column in COLUMNS)]]
    lines += [cells(row, against.get((row["scenario"], row["policy"]))) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def detail(row: Row) -> str:
    """What the table leaves out."""
    apps = " ".join(f"{app} {share:.2%}" for app, share in row["apps"].items() if share)
    kinds = " ".join(f"{kind} {count}" for kind, count in row["scale_actions"].items())
    refused = " ".join(f"{code} {count}" for code, count in row["refusals"].items())
    name = f"{row['scenario']} {row['policy']}"
    return f"{name}: {row['queries']} queries, late {row['late']}, refused {refused or 0}; apps {apps or 0}; actions {kinds or 0}"


# -- the command line


def cases() -> list[Case]:
    return [*cost_cases(), *accuracy_cases()]


def changed(built: Built, settings: Sequence[str]) -> Built:
    """With settings as SECTION.KEY=VALUE."""
    document = {name: value for name, value in built.document.items() if not name.startswith("settings")}
    for setting in settings:
        key, _, text = setting.partition("=")
        section, _, name = key.strip().rpartition(".")
        try:
            value = json.loads(text)
        except ValueError:
            value = text.strip()
        document.setdefault(f"settings.{section}" if section else "settings", {})[name] = value
    return built._replace(document=document)


def tasks(options: argparse.Namespace, folder: Path) -> list[Task]:
    """The runs, with their scenarios written. Says which are left out."""
    found = []
    for case in cases():
        if options.only and not any(fnmatchcase(case.name, pattern) for pattern in options.only):
            continue
        if case.trace is not None and not (options.traces / case.trace).is_file():
            print(f"{case.name} is left out: there is no {options.traces / case.trace} (--traces)", file=sys.stderr)
            continue
        path = write(changed(case.build(options.traces), options.set), folder / case.name)
        seconds = QUICK_S if options.quick else None
        found += [Task(case.name, policy, path, seconds, options.seed) for policy in options.policies]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these scenarios; * and ? as in file names"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="as `infaas simulate --policy`")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_S:.0f} s of each")
    parser.add_argument("--seed", type=int, help="another seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with recorded loads")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="show the changes since this --json")
    parser.add_argument("--detail", action="store_true", help="refusals, actions and apps of each run too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the scenarios here, and keep them")
    parser.add_argument("--list", action="store_true", help="only the scenarios' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.name for case in cases()))
        return
    against = {}
    if options.against:
        against = {(row["scenario"], row["policy"]): row for row in json.loads(options.against.read_text())}
    with tempfile.TemporaryDirectory() as temporary:
        todo = tasks(options, options.keep or Path(temporary))
        if not todo:
            parser.error("no scenario is left: --list shows all names")
        rows = in_processes(todo, options.jobs)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows, against))
    if options.detail:
        print("\n".join(map(detail, rows)))


def in_processes(todo: Sequence[Task], jobs: int) -> list[Row]:
    """The rows in the order of the tasks. Each is a line on stderr as soon as it is there."""
    found: dict[Task, Row] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, task): task for task in todo}
        for future in as_completed(futures):
            task = futures[future]
            try:
                found[task] = row = future.result()
            except (ScenarioError, SimulationError) as error:
                print(f"{task.scenario}, {task.policy} is left out: {error}", file=sys.stderr)
                continue
            print("  ".join(cells(row, None)), file=sys.stderr)
    return [found[task] for task in todo if task in found]


if __name__ == "__main__":
    main()
