"""`infaas demo --ensemble`: seven models answer together and learn from feedback, while the best of them is wrong for a while.

The models answer under `exp4`. Each answer's true label is sent back. After a third of the time, the most accurate model gets a version
whose outputs are permuted, and after two thirds the sound version again. Only pictures are sent on which the models disagree: the
others are answered alike by all, and teach nothing.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from infaas.answers import Answer
from infaas.demo.choices import malformed, wrong_refusal
from infaas.demo.digits import CLASSES, UNSEEN, load, models, save_validation, scores_of
from infaas.demo.load import DemoLoad, DemoReply, Labelled, QueryKind, arrivals, became, counted, text
from infaas.demo.program import Demo, DemoRun, DemoTable, save_picture
from infaas.errors import InfaasError, Refused

POLICY, ETA = "exp4", 0.5
KIND = QueryKind(name="a digit", needs={"latency_ms": 500.0})
RATE = 60.0  # queries/s; a busy machine sends fewer
UNDER_WAY = 32  # queries, at most
LEARNING = 128  # feedbacks under way, at most
LOADED_S = 60.0  # until every member must have answered once
BINS = 60  # points of the series
PHASES = ("before", "while it is wrong", "after")

MEMBERS = """
SELECT width_bucket(extract(epoch FROM time)::float8, ARRAY[{bounds}]::float8[]) AS part, member, count(*) AS n,
       avg(loss) AS error, (array_agg(weight ORDER BY time DESC))[1] AS weight
FROM infaas.selection_events WHERE app = '{app}' GROUP BY 1, 2 ORDER BY 1, 2
"""
LEARNT = "SELECT count(DISTINCT query) AS feedbacks FROM infaas.selection_events WHERE app = '{app}'"


def permuted(model: Path, path: Path) -> Path:
    """A copy of a classifier that says the next class instead of the one that it means."""
    changed = onnx.load(model)
    graph = changed.graph
    scores = graph.output[0].name
    classes = graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    for node in graph.node:
        for number, name in enumerate(node.output):
            if name == scores:
                node.output[number] = "meant"
    graph.initializer.append(onnx.numpy_helper.from_array(np.roll(np.arange(classes), 1), "permutation"))
    graph.node.append(onnx.helper.make_node("Gather", ["meant", "permutation"], [scores], axis=1))
    onnx.checker.check_model(changed)
    onnx.save(changed, path)
    return path


def disagreed(models: Mapping[str, Path], pictures: Labelled) -> Labelled:
    """The pictures of which not all models say the same."""
    said = np.array([scores_of(path, pictures.x).argmax(axis=1) for path in models.values()])
    differ = (said != said[0]).any(axis=0)
    return Labelled(pictures.x[differ], pictures.y[differ])


async def play(run: DemoRun) -> dict[str, Any]:
    """Send pictures at a steady rate with feedback for each answer, and switch the best model after each third."""
    family = models()
    pictures = disagreed(family, load(UNSEEN))
    best = await _register(run, family)
    sender = DemoLoad(run.client, run.app, pictures, judge)
    run.progress("loading the models", 0.0)
    await sender.first(KIND, LOADED_S, lambda answer: len(answer.members or ()) == len(family))
    learning, taught = asyncio.Semaphore(LEARNING), 0
    bounds = [time.time()]

    async def teach(reply: DemoReply) -> None:
        nonlocal taught
        if reply.answer is not None:
            async with learning:
                try:
                    await run.client.feedback(run.app, int(reply.labels[0]), query=reply.answer.query)
                    taught += 1
                except InfaasError as error:
                    sender.wrong[KIND.name].append(f"feedback was not accepted: {error}")

    async def switch() -> None:
        for version in ("2", "1"):
            await asyncio.sleep(max(0.0, bounds[0] + len(bounds) * run.seconds / 3 - time.time()))
            await run.client.admin("set-version", app=run.app, model=best, version=version)
            bounds.append(time.time())

    def tell(due: float) -> None:
        run.progress(
            f"sending queries: {best} {('is right', 'is wrong', 'is right again')[len(bounds) - 1]}", due / run.seconds
        )

    due = arrivals([(run.seconds, RATE)], [KIND])
    async with asyncio.TaskGroup() as group:
        group.create_task(switch())
        sending = group.create_task(sender.run(due, run.seconds, tell, under_way=UNDER_WAY, each=teach))
    replies = sending.result()
    bounds.append(time.time())
    await run.recorded(sender)
    await run.in_sql(LEARNT.format(app=run.app), taught, "feedbacks were accepted")

    async def between(times: Sequence[float]) -> list[dict[str, Any]]:
        rows = await run.system.sql(MEMBERS.format(app=run.app, bounds=", ".join(f"{at:.6f}" for at in times)))
        return intervals(replies, rows, times)

    (whole,) = await between([bounds[0], bounds[-1]])
    return {
        "queries": sender.queries,
        "policy": POLICY,
        "eta": ETA,
        "switched": best,
        "pictures": len(pictures),
        "answered": whole["answers"],
        "refused": became(replies)["refused"],
        "feedbacks": taught,
        "phases": [{"name": name, **one} for name, one in zip(PHASES, await between(bounds), strict=True)],
        "error": whole["error"],
        "best": whole["best"],
        "series": await between(np.linspace(bounds[0], bounds[-1], BINS + 1).tolist()),
    }


async def _register(run: DemoRun, family: Mapping[str, Path]) -> str:
    """Register the models, and a second version of the most accurate one that serves nobody yet. Returns that one's name."""
    validation = save_validation(run.directory / "validation.npz")
    await run.register([(run.app, model, path, validation) for model, path in family.items()])
    rows = await run.client.variants(app=run.app)
    best: str = max(rows, key=lambda row: row["accuracy"] or 0.0)["model"]
    wrong = permuted(family[best], run.directory / "permuted.onnx")
    await run.register([(run.app, best, wrong, validation)])
    await run.client.admin("set-version", app=run.app, model=best, version="1")
    await run.client.admin("set-selection", app=run.app, policy=POLICY, eta=ETA)
    return best


def judge(kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
    """What is wrong with a reply; empty if nothing is."""
    if isinstance(said, Refused):
        return wrong_refusal(kind, said)
    wrong = malformed(said, id, items, {"scores": CLASSES})
    return wrong or ("" if said.members and said.query else "names no members")


def intervals(
    replies: Sequence[DemoReply], rows: Sequence[Mapping[str, Any]], bounds: Sequence[float]
) -> list[dict[str, Any]]:
    """Between each two of these times (Unix): errors of the models together, of each member, and of the best one in hindsight.

    rows: of MEMBERS, what feedback taught. missing: members without an output, of an answer.
    """
    found: list[dict[str, Any]] = []
    for number, (start, end) in enumerate(pairwise(bounds), 1):
        there = [(one, one.answer) for one in replies if one.answer is not None and start <= one.at < end]
        figures = [(not one.right[0], answer.missing or 0, answer.confidence or 0.0) for one, answer in there]
        error, missing, confidence = np.mean(figures, axis=0).tolist() if figures else (None, None, None)
        members = {
            row["member"]: {key: row[key] for key in ("error", "weight", "n")} for row in rows if row["part"] == number
        }
        best = min(members, key=lambda model: members[model]["error"], default=None)
        found.append({
            "seconds": end - start,
            "answers": len(there),
            "error": error,
            "missing": missing,
            "confidence": confidence,
            "best": None if best is None else {"model": best, "error": members[best]["error"]},
            "members": members,
        })  # fmt: skip
    return found


def shown(result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
    """Weights and errors of the members in each phase, and of all of them together."""
    phases, switched = result["phases"], result["switched"]

    def row(name: str, cell: Callable[[Mapping[str, Any]], str]) -> dict[str, str]:
        titles = (f"{one['name']}\n({one['answers']} answers, {one['seconds']:.0f} s)" for one in phases)
        return {"model": name, **dict(zip(titles, map(cell, phases), strict=True))}

    def member(model: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda phase: (
            "{error:.1%}, weight {weight:.3f}".format(**one) if (one := phase["members"].get(model)) else ""
        )

    yield DemoTable(
        f"{result['app']} under {result['policy']}, eta {result['eta']:g}: share of wrong answers, and weight at the end of each third",
        [
            *(
                row(f"[bold]{model}[/]" if model == switched else model, member(model))
                for model in sorted({model for phase in phases for model in phase["members"]})
            ),
            row(
                "the best model, in hindsight",
                lambda phase: "{model} {error:.1%}".format(**phase["best"]) if phase["best"] else "",
            ),
            row("[bold]the models together[/]", lambda phase: text(phase["error"], "[bold]{:.1%}[/]")),
            row("confidence", lambda phase: text(phase["confidence"], "{:.3f}")),
            row("members missing in an answer", lambda phase: text(phase["missing"], "{:.3f}")),
        ],
    )
    if (best := result["best"]) is not None:
        yield (
            f"In all: the models together {result['error']:.1%} wrong; the best single one in hindsight, {best['model']}, {best['error']:.1%}."
            f" Pictures: the {result['pictures']} unseen ones of which the models disagree."
        )
    yield f"{result['queries']} queries, {result['feedbacks']} feedbacks, refused: {counted(result['refused']) or 'none'}."
    if result["picture"] is None:
        yield "no picture: it needs the extra `plot` (pip install 'infaas[plot]')"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A picture of the weights and the ensemble's error over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    series, phases = found["series"], found["phases"]
    at = np.cumsum([one["seconds"] for one in series])
    figure = Figure(figsize=(9.0, 5.6), dpi=110, layout="constrained")
    weights, errors = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1.0))
    rows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for end, one in zip(at, series, strict=True):
        for model, member in one["members"].items():
            rows[model].append((end, member["weight"]))
    for model, row in sorted(rows.items(), key=lambda one: -max(weight for _, weight in one[1])):
        weights.plot(*zip(*row, strict=True), lw=2.4 if model == found["switched"] else 1.3, label=model)
    errors.plot(at, np.array([one["error"] for one in series], float), color="black", lw=1.3, label="together")
    start = 0.0
    for number, phase in enumerate(phases):
        end, best = start + phase["seconds"], phase["best"]
        if best is not None:
            label = None if number else "the best one, in hindsight"
            errors.hlines(best["error"], start, end, color="#009E73", lw=2.0, label=label)
            place = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 8}
            errors.annotate(best["model"], (start, best["error"]), **place)
        if number == 1:
            for panel in (weights, errors):
                panel.axvspan(start, end, color="#D55E00", alpha=0.12, lw=0)
            weights.text((start + end) / 2, 0.5, f"{found['switched']} is wrong", ha="center", va="center", fontsize=9)
        start = end
    weights.set_ylabel("weight")
    weights.set_ylim(top=1.0)
    errors.set_ylabel("share of wrong answers")
    title = f"Seven models under {found['policy']}, eta {found['eta']:g}, {found['answered']} answers with feedback"
    save_picture(figure, (weights, errors), title, start, path)


DEMO = Demo("digits", play, shown, draw)
