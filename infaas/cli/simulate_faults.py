"""`infaas simulate --faults`: systems and faults drawn from seeds, run with everything checked that must always hold."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infaas.cli.output import FAILED, for_the_result, number, progress, show, usage

if TYPE_CHECKING:
    from services.simulation.fuzz.trial import SeedResult
    from services.simulation.fuzz.violations import Violation
    from services.simulation.scenario.model import Scenario

SHRINKS_S = 60.0  # on the wall's clock, at most
EVERY_S = 5.0  # between two lines of progress
_SEEDS = re.compile(r"(0|[1-9][0-9]{0,17})(?:-(0|[1-9][0-9]{0,17}))?\Z")


def seeds_in(text: str) -> range:
    """The seeds that `--faults` names: one, or FIRST-LAST. Ends the command if it names none."""
    found = _SEEDS.match(text)
    if found is None:
        usage(f"--faults {text!r}: write a seed, a whole number, as 7, or FIRST-LAST, as 1-1000")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        usage(f"--faults {text}: the last seed is before the first: write {last}-{first}")
    return range(first, last + 1)


def simulate_faults(seeds: range, *, json: bool) -> int:
    """Run the scenarios of these seeds. A single one that fails is shrunk."""
    return _one(seeds[0], json=json) if len(seeds) == 1 else _many(seeds, json=json)


def _one(seed: int, *, json: bool) -> int:
    from services.simulation.fuzz.draw import document_of  # noqa: PLC0415  (after the arguments have been understood)
    from services.simulation.fuzz.trial import result_of  # noqa: PLC0415

    with for_the_result():
        found = result_of(seed)
    document = _document(found)
    if found.broken:
        first = min(found.broken.values(), key=lambda one: one.time)
        progress(f"seed {seed} breaks {first.invariant} at {first.time:g} s; the smallest scenario that does is sought")
        document |= _shrunk(document_of(seed), first, Path(f"faults-{seed}.toml"))
    show(document, json, _print_one)
    return FAILED if found.broken else 0


def _document(found: "SeedResult") -> dict[str, Any]:
    return {
        "seed": found.seed,
        "seconds": round(found.seconds, 3),
        "queries": found.queries,
        "faults": found.faults,
        "violations": [_plain(one) for one in sorted(found.broken.values(), key=lambda one: one.time)],
        "simulated": True,
    }


def _plain(one: "Violation") -> dict[str, Any]:
    return {"invariant": one.invariant, "time": one.time, "query": one.query, "words": one.words}


def _shrunk(document: dict[str, Any], first: "Violation", path: Path) -> dict[str, Any]:
    """Write the smallest scenario that breaks the same invariant, and say what was said about its query."""
    from services.core.toml import toml_of  # noqa: PLC0415
    from services.simulation.fuzz.sequence import as_mermaid, as_text, trace_of  # noqa: PLC0415
    from services.simulation.fuzz.trial import shrink  # noqa: PLC0415
    from services.simulation.scenario.read import derive  # noqa: PLC0415

    began = time.monotonic()
    said = began

    def tried(runs: int, smallest: Mapping[str, Any]) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= EVERY_S:
            said = now
            parts = [f"{len(smallest.get(key, ()))} {key}s" for key in ("fault", "app", "load")]
            progress(f"after {runs} runs and {now - began:.0f} of {SHRINKS_S:.0f} s: {', '.join(parts)}")

    smallest, violation = shrink(document, first, lambda: time.monotonic() - began > SHRINKS_S, tried)
    path.write_text(f"# {violation.invariant}: {violation.words}\n#     infaas simulate {path}\n\n{toml_of(smallest)}")
    found: dict[str, Any] = {"smallest": _plain(violation), "file": str(path)}
    if violation.query:
        steps = trace_of(derive(smallest, path), violation.query, violation.invariant)
        diagram = path.with_suffix(".mmd")
        diagram.write_text(as_mermaid(steps))
        found |= {"trace": as_text(steps), "mermaid": str(diagram)}
    return found


def _print_one(document: Mapping[str, Any]) -> None:
    print(_line(document))
    for one in document["violations"]:
        print(_violated(one))
    if "file" in document:
        print(f"\nThe smallest scenario found that breaks it: infaas simulate {document['file']}")
        print(_violated(document["smallest"]))
    if "trace" in document:
        query = document["smallest"]["query"]
        print(f"\nWhat was said about query {query} (times in s; {document['mermaid']} has it for Mermaid):\n")
        print(document["trace"])


def _line(document: Mapping[str, Any]) -> str:
    what = f"seed {document['seed']}" if "seed" in document else document["scenario"]
    verdict = "sound" if not document["violations"] else "broken"
    faults = f"{document['faults']} fault{'s' * (document['faults'] != 1)}"
    return f"{what}: {verdict}; {number(document['seconds'])} s, {document['queries']:,} queries, {faults}, simulated"


def _violated(one: Mapping[str, Any]) -> str:
    query = f", query {one['query']}" if one["query"] else ""
    return f"{one['invariant']} at {one['time']:g} s{query}: {one['words']}"


# -- a file


def check_scenario(scenario: "Scenario", *, json: bool) -> int:
    """Run a scenario that says `checked`."""
    from services.simulation.fuzz.trial import first_of, tried  # noqa: PLC0415

    with for_the_result():
        found = tried(scenario)
    broken = first_of(found.violations).values()
    document = {
        "scenario": scenario.name,
        "seconds": round(found.seconds, 3),
        "queries": found.queries,
        "faults": found.faults,
        "violations": [_plain(one) for one in broken],
        "simulated": True,
    }
    show(document, json, _print_one)
    return FAILED if found.violations else 0


# -- many seeds


def _many(seeds: range, *, json: bool) -> int:
    from services.simulation.fuzz.trial import results_of  # noqa: PLC0415

    began = said = time.monotonic()
    failing: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    seconds = 0.0
    smallest: dict[str, Violation] = {}
    with for_the_result():
        for done, found in enumerate(results_of(seeds), 1):
            seconds += found.seconds
            counts.update(queries=found.queries, faults=found.faults, sound=not found.broken)
            for invariant, one in found.broken.items():
                failing.setdefault(invariant, []).append(found.seed)
                smallest.setdefault(invariant, one)
            if (now := time.monotonic()) - said >= EVERY_S:
                said = now
                progress(f"{done} of {len(seeds)} seeds after {now - began:.0f} s, {done - counts['sound']} broken")
    took = time.monotonic() - began
    document = {
        "seeds": f"{seeds[0]}-{seeds[-1]}",
        "sound": counts["sound"],
        "failing": failing,
        "examples": {invariant: _plain(one) for invariant, one in smallest.items()},
        "hours": round(seconds / 3600.0, 3),
        "queries": counts["queries"],
        "faults": counts["faults"],
        "simulated": True,
        "took_s": round(took, 1),
        "times_real": round(seconds / took, 1),
    }
    show(document, json, lambda found: _print_many(found, len(seeds)))
    return FAILED if failing else 0


def _print_many(document: Mapping[str, Any], count: int) -> None:
    hours = f"{document['hours']:.2f} h, {document['queries']:,} queries, {document['faults']:,} faults, simulated"
    speed = f"in {number(document['took_s'])} s, {document['times_real']:g} times as fast as real time"
    print(f"seeds {document['seeds']}: {document['sound']:,} of {count:,} sound; {hours}, {speed}")
    for invariant, seeds in sorted(document["failing"].items(), key=lambda one: -len(one[1])):
        print(f"{invariant}, {len(seeds)} seeds: {', '.join(map(str, seeds))}")
        print(f"    {_violated(document['examples'][invariant])}; shrunk by infaas simulate --faults {seeds[0]}")
