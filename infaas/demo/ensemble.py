"""`infaas demo --ensemble`: seven models answer together and learn from feedback, while the best of them is wrong for a while.

The models answer under `exp4`. Each answer's true label is sent back. After a third of the time, the most accurate model gets a version
whose outputs are permuted, and after two thirds the sound version again. Only pictures are sent on which the models disagree: the
others are answered alike by all, and teach nothing.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.choices import malformed, refusals, wrong_refusal
from infaas.demo.digits import CLASSES, UNSEEN, Digits, load, models, save_validation, scores_of
from infaas.demo.load import DemoLoad, DemoReply, Progress, QueryKind, arrivals
from infaas.demo.program import Demo, DemoSystem, DemoTable, counted, in_sql, register, save_picture, text
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


def disagreed(models: Mapping[str, Path], pictures: Digits) -> Digits:
    """The pictures of which not all models say the same."""
    said = np.array([scores_of(path, pictures.x).argmax(axis=1) for path in models.values()])
    differ = (said != said[0]).any(axis=0)
    return Digits(pictures.x[differ], pictures.y[differ])


class EnsembleDemo(Demo):
    """All models of the digits, under a policy that learns."""

    app = "digits"

    async def play(self, client: Client, directory: Path, seconds: float, progress: Progress) -> DemoLoad:
        """Send pictures at a steady rate with feedback for each answer, and switch the best model after each third."""
        self._models = models()
        self._pictures = disagreed(self._models, load(UNSEEN))
        self._taught = 0
        best = await self._register(client, directory, progress)
        progress("loading the models", 0.0)
        sender = DemoLoad(client, self.app, self._pictures, judge)
        await sender.first(KIND, LOADED_S, lambda answer: len(answer.members or ()) == len(self._models))
        learning = asyncio.Semaphore(LEARNING)
        bounds = [time.time()]

        async def teach(reply: DemoReply) -> None:
            if reply.answer is not None:
                async with learning:
                    try:
                        await client.feedback(self.app, int(reply.labels[0]), query=reply.answer.query)
                        self._taught += 1
                    except InfaasError as error:
                        sender.wrong[KIND.name].append(f"feedback was not accepted: {error}")

        async def switches() -> None:
            for version in ("2", "1"):
                await asyncio.sleep(max(0.0, bounds[0] + len(bounds) * seconds / 3 - time.time()))
                await client.admin("set-version", app=self.app, model=best, version=version)
                bounds.append(time.time())

        def on_time(due: float) -> None:
            progress(
                f"sending queries: {best} {('is right', 'is wrong', 'is right again')[len(bounds) - 1]}", due / seconds
            )

        due = arrivals([(seconds, RATE)], [KIND])
        async with asyncio.TaskGroup() as group:
            group.create_task(switches())
            group.create_task(sender.run(due, seconds, on_time, under_way=UNDER_WAY, each=teach))
        self._bounds, self._best = [*bounds, time.time()], best
        return sender

    async def _register(self, client: Client, directory: Path, progress: Progress) -> str:
        """Register the models, and a second version of the most accurate one that serves nobody yet. Returns that one's name."""
        validation = save_validation(directory / "validation.npz")
        await register(client, [(self.app, model, path, validation) for model, path in self._models.items()], progress)
        rows = await client.variants(app=self.app)
        best: str = max(rows, key=lambda row: row["accuracy"] or 0.0)["model"]
        wrong = permuted(self._models[best], directory / "permuted.onnx")
        await register(client, [(self.app, best, wrong, validation)], progress)
        await client.admin("set-version", app=self.app, model=best, version="1")
        await client.admin("set-selection", app=self.app, policy=POLICY, eta=ETA)
        return best

    async def figures(self, system: DemoSystem, load: DemoLoad) -> dict[str, Any]:
        replies = load.replies[KIND.name]
        answers = [judged(one, one.answer) for one in replies if one.answer is not None]
        times = np.linspace(self._bounds[0], self._bounds[-1], BINS + 1)
        problems = await in_sql(system, LEARNT.format(app=self.app), self._taught, "feedbacks were accepted")
        parts = await _members(system, self.app, self._bounds)
        bins = await _members(system, self.app, times.tolist())
        return {
            "policy": POLICY,
            "eta": ETA,
            "switched": self._best,
            "pictures": len(self._pictures),
            "answered": len(answers),
            "refused": refusals(replies),
            "feedbacks": self._taught,
            **results(answers, self._bounds, parts, list(self._models)),
            "series": series(answers, times, bins, list(self._models)),
            "problems": problems,
        }

    def shown(self, result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
        yield DemoTable(
            f"{result['app']} under {result['policy']}, eta {result['eta']:g}: share of wrong answers, and weight at the end of each third",
            _rows(result),
        )
        if (best := result["best"]) is not None:
            yield (
                f"In all: the models together {result['error']:.1%} wrong; the best single one in hindsight, {best['model']}, {best['error']:.1%}."
                f" Pictures: the {result['pictures']} unseen ones of which the models disagree."
            )
        yield f"{result['queries']} queries, {result['feedbacks']} feedbacks, refused: {counted(result['refused']) or 'none'}."
        if result["picture"] is None:
            yield "no picture: it needs the extra `plot` (pip install 'infaas[plot]')"

    def draw(self, result: Mapping[str, Any], path: Path) -> None:
        draw(result, path)


def judge(kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
    """What is wrong with a reply; empty if nothing is."""
    if isinstance(said, Refused):
        return wrong_refusal(kind, said)
    wrong = malformed(said, id, items, {"scores": CLASSES})
    return wrong or ("" if said.members and said.query else "names no members")


def judged(reply: DemoReply, answer: Answer) -> tuple[float, bool, int, float]:
    """Of an answer: Unix time, whether it is wrong, members without an output, confidence."""
    wrong = int(answer.outputs["scores"].argmax()) != int(reply.labels[0])
    return reply.at, wrong, answer.missing or 0, answer.confidence or 0.0


def _rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Weights and errors of the members in each phase, and of all of them together."""
    phases = result["phases"]
    names = [f"{phase['name']}\n({phase['answers']} answers, {phase['seconds']:.0f} s)" for phase in phases]

    def row(name: str, cells: Iterable[str]) -> dict[str, str]:
        return {"model": name, **dict(zip(names, cells, strict=True))}

    def member(one: Mapping[str, Any] | None) -> str:
        return "" if one is None else f"{one['error']:.1%}, weight {one['weight']:.3f}"

    def marked(model: str) -> str:
        return f"[bold]{model}[/]" if model == result["switched"] else model

    best = [phase["best"] for phase in phases]
    return [
        *(
            row(marked(model), [member(phase["members"].get(model)) for phase in phases])
            for model in sorted({model for phase in phases for model in phase["members"]})
        ),
        row(
            "the best model, in hindsight",
            ["" if one is None else f"{one['model']} {one['error']:.1%}" for one in best],
        ),
        row("[bold]the models together[/]", [text(phase["error"], "[bold]{:.1%}[/]") for phase in phases]),
        row("confidence", [text(phase["confidence"], "{:.3f}") for phase in phases]),
        row("members missing in an answer", [text(phase["missing"], "{:.3f}") for phase in phases]),
    ]


Rows = dict[tuple[int, str], dict[str, Any]]


async def _members(system: DemoSystem, app: str, bounds: Sequence[float]) -> Rows:
    """What feedback taught between each two of these times, by number of the interval and member."""
    rows = await system.sql(MEMBERS.format(app=app, bounds=", ".join(f"{at:.6f}" for at in bounds)))
    return {(row["part"] - 1, row["member"]): row for row in rows}


Answers = Sequence[tuple[float, bool, int, float]]


def results(answers: Answers, bounds: Sequence[float], parts: Rows, models: Sequence[str]) -> dict[str, Any]:
    """The phases, and the whole: errors of the ensemble, of each member, and of the best one in hindsight."""
    phases: list[dict[str, Any]] = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        there = [one for one in answers if start <= one[0] < end]
        members = {
            model: {key: row[key] for key in ("error", "weight", "n")}
            for model in models
            if (row := parts.get((number, model))) is not None
        }
        phases.append({
            "name": PHASES[number],
            "seconds": end - start,
            **_means(there),
            "best": _best({model: one["error"] for model, one in members.items()}),
            "members": members,
        })  # fmt: skip
    lost: dict[str, float] = {}
    for model in models:
        rows = [row for (number, name), row in parts.items() if name == model and 0 <= number < len(PHASES)]
        n = sum(row["n"] for row in rows)
        if n:
            lost[model] = sum(row["n"] * row["error"] for row in rows) / n
    return {"phases": phases, **_means(answers), "best": _best(lost)}


def _means(answers: Answers) -> dict[str, Any]:
    """answers, error, missing (members an answer), confidence."""
    if not answers:
        return {"answers": 0, "error": None, "missing": None, "confidence": None}
    error, missing, confidence = np.mean([one[1:] for one in answers], axis=0).tolist()
    return {"answers": len(answers), "error": error, "missing": missing, "confidence": confidence}


def _best(errors: Mapping[str, float]) -> dict[str, Any] | None:
    if not errors:
        return None
    model = min(errors, key=errors.__getitem__)
    return {"model": model, "error": errors[model]}


def series(answers: Answers, times: NDArray[np.float64], bins: Rows, models: Sequence[str]) -> dict[str, Any]:
    """time: seconds from the first query to the end of each interval. error: of its answers; None without any."""
    place = np.searchsorted(times, [one[0] for one in answers], side="right") - 1
    wrong = np.array([one[1] for one in answers], bool)
    count = len(times) - 1
    errors = [float(wrong[place == n].mean()) if (place == n).any() else None for n in range(count)]
    weights: dict[str, list[float | None]] = {model: [] for model in models}
    for model, row in weights.items():
        for n in range(count):
            found = bins.get((n, model))
            row.append(found["weight"] if found is not None else row[-1] if row else None)
    return {"time": (times[1:] - times[0]).tolist(), "error": errors, "weights": weights}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A picture of the weights and the ensemble's error over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    shown, phases = found["series"], found["phases"]
    at = np.array(shown["time"], float)
    figure = Figure(figsize=(9.0, 5.6), dpi=110, layout="constrained")
    weights, errors = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1.0))
    rows = {model: np.array(row, float) for model, row in shown["weights"].items()}
    for model, row in sorted(rows.items(), key=lambda one: -np.nanmax(one[1])):
        weights.plot(at, row, lw=2.4 if model == found["switched"] else 1.3, label=model)
    errors.plot(at, np.array(shown["error"], float), color="black", lw=1.3, label="together")
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
