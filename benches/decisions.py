"""Decisions of policies side by side: scenarios x policies in the simulator, as one table.

python benches/decisions.py --jobs 2                                   everything
python benches/decisions.py --only 'twitter-*' --policies infaas sm+   some of it; * and ? as in file names
python benches/decisions.py --only twitter-3 --policies infaas --quick the first 480 s: a line within a minute
python benches/decisions.py --json after.json --against before.json    before -> after
python benches/decisions.py --show a.json b.json --by-scenario         of earlier runs, a line a scenario

Recorded loads come from --traces; a scenario whose trace is missing is left out. Every run is a process of its own.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace

from benches.scoreboard.accuracy import accuracy_cases
from benches.scoreboard.resnets import resnet_cases
from benches.scoreboard.scenarios import TRACES, Built, Case, cost_cases, write
from benches.scoreboard.table import by_scenario, cells, detail, table
from services.core.toml import TomlError
from services.simulation.kernel import ActorHalted
from services.simulation.oracle import bound, serving, targets_of
from services.simulation.report import RunReport
from services.simulation.run import simulate
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario

STATIC = "clipper+"
POLICIES = ("infaas", "sm+", STATIC)
ORACLE = "oracle"  # among the policies: who knows the demand (services/simulation/oracle.py)
QUICK_S = 480.0
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
    plans = task.policy == ORACLE
    scenario = read_scenario(task.path, policies=[POLICIES[0] if plans else task.policy], seed=task.seed)
    if task.seconds is not None:
        scenario = replace(scenario, duration_s=min(task.seconds, scenario.duration_s))
    began = perf_counter()
    row: Row = {"scenario": task.scenario, "policy": task.policy, "seed": scenario.seed, "goal": scenario.objective}
    row["duration_s"] = scenario.duration_s
    if plans:
        row |= bound(scenario)._asdict()
    else:
        policy = scenario.policies[0]
        row |= figures(scenario, simulate(scenario, policy, RunReport.of(scenario, policy)))
    return {**row, "wall_s": perf_counter() - began}


def figures(scenario: Scenario, result: Mapping[str, Any]) -> Row:
    """What the table shows, from a policy's result (docs/simulation.md)."""
    in_time = result["answered"] - result["late"]
    actions = sum(result["scale_actions"].values())
    apps = {app: one["slo_violation_ratio"] for app, one in result["apps"].items()}
    worst = max(apps, key=lambda app: apps[app], default=None)
    targets = targets_of(scenario)
    accuracy, best = result["effective_accuracy"], best_accuracy(scenario, result)
    return {
        "queries": result["queries"],
        "violations": result["slo_violation_ratio"],
        "worst_app": worst,
        "worst_violations": apps[worst] if worst else 0.0,
        "met": sum(missed <= 1 - targets[app] + 1e-12 for app, missed in apps.items()) / max(1, len(apps)),
        "accuracy": accuracy,
        "accuracy_of_best": accuracy / best if accuracy is not None and best else None,
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
        "apps": apps,
    }


def best_accuracy(scenario: Scenario, result: Mapping[str, Any]) -> float:
    """The mean accuracy if each app's most accurate variant answered all its queries."""
    best = {app: max(one.accuracy or 0.0 for one in serving(scenario, app)) for app in result["apps"]}
    return sum(best[app] * one["queries"] for app, one in result["apps"].items()) / max(1, result["queries"])


def with_distances(rows: Iterable[Row], others: Iterable[Row] = ()) -> list[Row]:
    """With to_oracle: times its cost, or accuracy less its own; and cheaper: the static system's cost / one's own.

    others: rows of another time, for what these lack; those of another length do not count.
    """
    rows = list(rows)
    known = {(row["scenario"], row["policy"], row.get("duration_s")): row for row in [*others, *rows]}
    found = []
    for row in rows:
        oracle, static = (known.get((row["scenario"], name, row["duration_s"])) for name in (ORACLE, STATIC))
        distance = cheaper = None
        if oracle is not None and row["policy"] != ORACLE:
            if row["goal"] == "cost":
                distance = row["cost"] / oracle["cost"] if oracle["cost"] else None
            elif row["accuracy"] is not None:
                distance = row["accuracy"] - oracle["accuracy"]
        if static is not None and row["cost"]:
            cheaper = static["cost"] / row["cost"]
        found.append({**row, "to_oracle": distance, "cheaper": cheaper})
    return found


# -- the command line


def cases() -> list[Case]:
    return [*cost_cases(), *accuracy_cases(), *resnet_cases()]


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
    policies = options.policies or (POLICIES if options.quick else (*POLICIES, ORACLE))
    found = []
    for case in cases():
        if options.only and not any(fnmatchcase(case.name, pattern) for pattern in options.only):
            continue
        if case.trace is not None and not (options.traces / case.trace).is_file():
            print(f"{case.name} is left out: there is no {options.traces / case.trace} (--traces)", file=sys.stderr)
            continue
        path = write(changed(case.build(options.traces), options.set), folder / case.name)
        found += [Task(case.name, policy, path, options.quick, options.seed) for policy in policies]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these scenarios; * and ? as in file names"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        help=f"as `infaas simulate --policy`, and {ORACLE}; default: {' '.join(POLICIES)} {ORACLE}, with --quick without the last",
    )
    parser.add_argument(
        "--quick",
        type=float,
        nargs="?",
        const=QUICK_S,
        metavar="SECONDS",
        help=f"the first {QUICK_S:.0f} s of each, or so many",
    )
    parser.add_argument("--seed", type=int, help="another seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with recorded loads")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="show the changes since this --json; its oracle and static system count where this run has none",
    )
    parser.add_argument(
        "--show",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing, show these --json files; of a run that several have, the last one's",
    )
    parser.add_argument("--by-scenario", action="store_true", help="a line a scenario")
    parser.add_argument("--detail", action="store_true", help="refusals, actions and apps of each run too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the scenarios here, and keep them")
    parser.add_argument("--list", action="store_true", help="only the scenarios' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.name for case in cases()))
        return
    if options.show:
        names = [case.name for case in cases()]
        kept = {(row["scenario"], row["policy"]): row for path in options.show for row in json.loads(path.read_text())}
        place = {name: i for i, name in enumerate((*POLICIES, ORACLE))}
        found = with_distances(
            sorted(kept.values(), key=lambda row: (names.index(row["scenario"]), place.get(row["policy"], len(place))))
        )
        print(by_scenario(found) if options.by_scenario else table(found))
        return
    before = json.loads(options.against.read_text()) if options.against else []
    against = {(row["scenario"], row["policy"]): row for row in before}
    with tempfile.TemporaryDirectory() as temporary:
        todo = tasks(options, options.keep or Path(temporary))
        if not todo:
            parser.error("no scenario is left: --list shows all names")
        rows = []
        for row in in_processes(todo, options.jobs):
            rows.append(row)
            print("  ".join(cells(row)), file=sys.stderr)
            if options.json:  # at once: a whole board takes long, and may be ended early
                options.json.write_text(json.dumps(ordered(rows, todo, before), indent=1) + "\n")
    rows = ordered(rows, todo, before)
    print(by_scenario(rows) if options.by_scenario else table(rows, against))
    if options.detail:
        print("\n".join(map(detail, rows)))


def in_processes(todo: Sequence[Task], jobs: int) -> Iterator[Row]:
    """The rows as they are done. A run that fails is left out, with a sentence on stderr."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, task): task for task in todo}
        for future in as_completed(futures):
            try:
                yield future.result()
            except (TomlError, ActorHalted, ValueError) as error:
                task = futures[future]
                print(f"{task.scenario}, {task.policy} is left out: {error}", file=sys.stderr)


def ordered(rows: Iterable[Row], todo: Sequence[Task], others: Iterable[Row] = ()) -> list[Row]:
    """The rows in the order of the tasks, with their distances (others: as there)."""
    place = {(task.scenario, task.policy): i for i, task in enumerate(todo)}
    return with_distances(sorted(rows, key=lambda row: place[row["scenario"], row["policy"]]), others)


if __name__ == "__main__":
    main()
