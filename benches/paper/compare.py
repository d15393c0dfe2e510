"""What the benches of the paper's figures share: runs of a scenario over seeds, the table "paper | ours", and pictures.

A bench has `build(seeds, short) -> Figure` and ends in `compare.main(build, __doc__)`. Each row of the table computes whether our
number is as good as the paper's.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msgspec.structs import replace

from services.simulation.report import MEASURED, RunReport
from services.simulation.run import simulate
from services.simulation.scenario.read import read_scenario

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
Document = Mapping[str, Any]  # of `infaas simulate --json`
Result = Mapping[str, Any]  # one policy's part of it
Values = Sequence[float]  # one for each seed
OUT = ROOT / ".infaas" / "paper"
SEEDS = (1, 2, 3)


class Row(NamedTuple):
    """A line of the table. ours: of each seed. good: as good as the paper's; None: nothing to compare with."""

    what: str
    paper: str
    ours: Values
    good: bool | None
    unit: str = ""
    form: str = ".3g"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ours)

    @property
    def text(self) -> str:
        """Mean and, of several seeds, lowest and highest; of a statement, in how many runs it held."""
        if not self.form:
            held = sum(self.ours)
            same = "yes" if self.paper == "yes" else "the same"
            return same if self.good else f"in {held:.0f} of {len(self.ours)} runs"
        mean, low, high = (f"{value:{self.form}}" for value in (self.mean, min(self.ours), max(self.ours)))
        spread = "" if low == high else f" ({low} to {high})"
        return f"{mean}{self.unit}{spread}"


class Figure(NamedTuple):
    """documents: a scenario's label to its runs, one for each seed. draw: writes pictures into a folder; None: each
    scenario's first seed as `infaas simulate --plot` draws it.
    """

    name: str
    title: str
    rows: Sequence[Row]
    documents: Mapping[str, Sequence[Document]] = {}
    draw: "Callable[[Figure, Path], None] | None" = None


def at_least(
    what: str, paper: float, ours: Values, unit: str = "", *, tolerance: float = 0.05, form: str = ".3g"
) -> Row:
    """More is better. tolerance: the part of the paper's number by which the mean may fall short."""
    return Row(what, f"{paper:{form}}{unit}", ours, statistics.fmean(ours) >= paper * (1 - tolerance), unit, form)


def at_most(
    what: str, paper: float, ours: Values, unit: str = "", *, tolerance: float = 0.05, form: str = ".3g"
) -> Row:
    """Less is better."""
    return Row(what, f"{paper:{form}}{unit}", ours, statistics.fmean(ours) <= paper * (1 + tolerance), unit, form)


def near(what: str, paper: float, ours: Values, unit: str = "", *, tolerance: float = 0.05, form: str = ".3g") -> Row:
    """Neither more nor less is better."""
    good = abs(statistics.fmean(ours) - paper) <= tolerance * abs(paper)
    return Row(what, f"{paper:{form}}{unit}", ours, good, unit, form)


def holds(what: str, paper: str, ours: Sequence[bool]) -> Row:
    """A statement, and in how many runs it held."""
    return Row(what, paper, [float(one) for one in ours], all(ours), form="")


def stated(what: str, ours: Values, unit: str = "", paper: str = "not stated", *, form: str = ".3g") -> Row:
    """A number without one of the paper's to compare with."""
    return Row(what, paper, ours, None, unit, form)


def runs(
    scenario: str | Path,
    seeds: Sequence[int] = SEEDS,
    *,
    duration_s: float | None = None,
    policies: Sequence[str] = (),
    report: type[RunReport] = RunReport,
) -> list[Document]:
    """Run a scenario file of this folder (or by path) with each seed. Progress goes to stderr.

    duration_s: at most this, instead of the file's. report: a report that counts more.
    """
    found: list[Document] = []
    for seed in seeds:
        read = read_scenario(HERE / scenario, policies=policies, seed=seed)
        if duration_s is not None:
            read = replace(read, duration_s=min(duration_s, read.duration_s))
        results = []
        for policy in read.policies:
            print(f"{read.name}, seed {seed}: {policy.name}", file=sys.stderr)
            results.append(simulate(read, policy, report.of(read, policy)))
        found.append({"scenario": read.name, "seed": seed, "policies": results, "simulated": True})
    return found


def of(document: Document, policy: str) -> Result:
    """One policy's result."""
    return next(one for one in document["policies"] if one["policy"] == policy)


def each(documents: Sequence[Document], policy: str, value: Callable[[Result], float] | str) -> list[float]:
    """A number of one policy's result, for each seed: by its key, or computed."""
    results = [of(document, policy) for document in documents]
    return [float(one[value] if isinstance(value, str) else value(one)) for one in results]


def ratios(above: Values, below: Values) -> list[float]:
    """Seed by seed."""
    return [a / b for a, b in zip(above, below, strict=True)]


def table(figure: Figure) -> str:
    """As README.md here has it: what, paper, ours, as good?"""
    lines = [f"| what | paper | ours{' (simulated)' if figure.documents else ''} | as good? |", "|---|---|---|---|"]
    for row in figure.rows:
        judged = "–" if row.good is None else "yes" if row.good else "no"
        lines.append(f"| {row.what} | {row.paper} | {row.text} | {judged} |")
    return "\n".join(lines)


def document(figure: Figure) -> dict[str, Any]:
    """The whole result, as JSON."""
    return {
        "figure": figure.name,
        "title": figure.title,
        "rows": [
            {"what": one.what, "paper": one.paper, "ours": list(one.ours), "mean": one.mean, "good": one.good}
            for one in figure.rows
        ],
        "runs": {label: list(documents) for label, documents in figure.documents.items()},
    }


def canvas(rows: int, columns: int, size: tuple[float, float], dpi: int = 110, **more: Any) -> tuple[Any, Any]:
    """A picture in inches with so many panels: [rows, columns]."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=size, dpi=dpi, layout="constrained")
    return picture, picture.subplots(rows, columns, squeeze=False, **more)


def saved(picture: Any, panels: Sequence[Any], title: str, path: Path, labels: Sequence[str] = ()) -> None:
    """With a grid on these panels and what is common to figures. labels: of the first of each row."""
    for row, label in zip(panels, labels, strict=False):
        row[0].set_ylabel(label)
    for panel in (one for row in panels for one in row):
        panel.grid(alpha=0.25)
        if panel.get_yscale() == "linear":
            panel.set_ylim(bottom=0)
    picture.suptitle(title, fontsize=11)
    picture.savefig(path)


def pictures(figure: Figure, out: Path) -> list[Path]:
    """Draw into a folder; returns the files. The folder must exist."""
    if figure.draw is not None:
        figure.draw(figure, out)
    else:
        from services.simulation.plot import draw

        for label, documents in figure.documents.items():
            draw(documents[0], out / f"{label}.png")
    return sorted(out.glob(f"{figure.name}*.png"))


def bare(document: Document) -> Document:
    """The document without wall-clock figures. The rest is the same for the same seed."""
    policies = [{key: value for key, value in one.items() if key not in MEASURED} for one in document["policies"]]
    return {**document, "policies": policies}


def main(build: Callable[[Sequence[int], bool], Figure], doc: str | None) -> None:
    """The command line of a bench."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="one run of all policies for each")
    parser.add_argument("--short", action="store_true", help="what CI runs: less time, one seed")
    parser.add_argument("--json", action="store_true", help="everything that came out, instead of the table")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for pictures and the JSON document")
    options = parser.parse_args()
    seeds = options.seeds[:1] if options.short else options.seeds
    figure = build(seeds, options.short)
    options.out.mkdir(parents=True, exist_ok=True)
    found = json.dumps(document(figure))
    (options.out / f"{figure.name}.json").write_text(found + "\n")
    if options.json:
        print(found)
    else:
        named = (
            f"simulated, seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}\n"
            if figure.documents
            else ""
        )
        print(f"{figure.title}\n{named}")
        print(table(figure))
    try:
        drawn = pictures(figure, options.out)
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is missing (pip install 'infaas[plot]')", file=sys.stderr)
    else:
        print("".join(f"{path}\n" for path in drawn), file=sys.stderr, end="")
