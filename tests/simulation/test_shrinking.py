"""A run that breaks is shrunk to a small scenario that breaks the same, and what was said about its query is drawn."""

from itertools import count
from pathlib import Path

from services.simulation.fuzz.draw import document_of
from services.simulation.fuzz.sequence import CLIENT, as_mermaid, as_text, trace_of
from services.simulation.fuzz.shrink import broken, shrink
from services.simulation.scenario.read import derive
from tests.support.simulated.planted_bugs import PLANTED

BUG = PLANTED["a row ok for a refusal"]
RUNS = 25


def test_a_small_scenario_breaks_the_same() -> None:
    document, first = next(
        (document, found)
        for document in map(document_of, count(1))
        if (found := broken(document, "row-as-told", BUG.wrap)) is not None
    )
    runs = []
    smallest, violation = shrink(
        document, first, lambda: len(runs) >= RUNS, lambda number, _: runs.append(number), BUG.wrap
    )
    assert violation.invariant == first.invariant == "row-as-told"
    assert broken(smallest, "row-as-told", BUG.wrap) == violation
    assert len(str(smallest)) < len(str(document))
    assert smallest["scenario"]["duration_s"] < document["scenario"]["duration_s"]

    steps = trace_of(derive(smallest, Path("small.toml")), violation.query, "row-as-told", BUG.wrap)
    assert steps[0].source == CLIENT
    assert any(one.to == CLIENT and one.words == "Refusal deadline" for one in steps)
    assert any(one.source == one.to and one.words == "row: ok" for one in steps)
    drawn = as_text(steps).splitlines()
    assert len(drawn) == 1 + len(steps)
    assert drawn[0].split()[0] == CLIENT
    assert any("<" in line and line.endswith("Refusal deadline") for line in drawn)
    assert as_mermaid(steps).startswith("sequenceDiagram\n    participant p0 as client\n")
    assert as_mermaid(steps).count("->>") + as_mermaid(steps).count("Note over") == len(steps)
