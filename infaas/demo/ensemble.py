"""`infaas demo --ensemble`: seven models answer together and learn from feedback, while the best of them is wrong for a while.

The models answer under `exp4`. Each answer's true label is sent back. After a third of the time, the most accurate model gets a version
whose outputs are permuted, and after two thirds the sound version again. Only pictures are sent on which the models disagree: the
others are answered alike by all, and teach nothing.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

import infaas
from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.digits import UNSEEN, Digits, family, load
from infaas.demo.family import ModelFamily, Progress
from infaas.demo.results import TEMPORARY
from infaas.demo.scenario import RECORDED_S, PictureSource, recorded, register
from infaas.demo.system import DemoSystem, temporary
from infaas.errors import InfaasError, Refused

POLICY, ETA = "exp4", 0.5
LATENCY_MS = 500.0
RATE = 60.0  # queries/s; a busy machine sends fewer
UNDER_WAY = 32  # queries, at most
LEARNING = 128  # feedbacks under way, at most
LOADED_S = 60.0  # until every member must have answered once
BINS = 60  # points of the series
PHASES = ("before", "while it is wrong", "after")
MAX_PROBLEMS = 5

MEMBERS = """
SELECT width_bucket(extract(epoch FROM time)::float8, ARRAY[{bounds}]::float8[]) AS part, member, count(*) AS n,
       avg(loss) AS error, (array_agg(weight ORDER BY time DESC))[1] AS weight
FROM infaas.selection_events WHERE app = '{app}' GROUP BY 1, 2 ORDER BY 1, 2
"""
LEARNT = "SELECT count(DISTINCT query) AS n FROM infaas.selection_events WHERE app = '{app}'"


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
    said = []
    for path in models.values():
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        said.append(session.run(None, {session.get_inputs()[0].name: pictures.x})[0].argmax(axis=1))
    differ = (np.array(said) != said[0]).any(axis=0)
    return Digits(pictures.x[differ], pictures.y[differ])


class EnsembleLoad:
    """Sends pictures one by one at a steady rate, with feedback for each answer. pictures: of which it draws."""

    def __init__(self, client: Client, app: str, pictures: Digits, seed: int = 0) -> None:
        self._client = client
        self._app = app
        self._pictures = pictures
        self._source = PictureSource(pictures, np.random.default_rng(seed))
        self._under_way = asyncio.Semaphore(UNDER_WAY)
        self._learning = asyncio.Semaphore(LEARNING)
        self.sent = 0
        self.refused: dict[str, int] = {}
        self.taught = 0
        self.problems: list[str] = []
        # Of each answer: Unix time, whether it is wrong, members without an output, confidence.
        self.answers: list[tuple[float, bool, int, float]] = []

    async def first(self, models: int) -> None:
        """Ask until all members are loaded and have answered together. Raises InfaasError after LOADED_S."""
        began = time.monotonic()
        while True:
            self.sent += 1
            reply = await self._client.query(self._app, self._pictures.x[:1], raise_refused=False)
            if not isinstance(reply, Refused) and len(reply.members or ()) == models:
                return
            if time.monotonic() - began > LOADED_S:
                raise InfaasError(f"not all of {models} models answered within {LOADED_S:.0f} s: {reply}")
            await asyncio.sleep(0.2)

    async def run(self, until: float, on_time: Any) -> None:
        """Send until this time (monotonic clock), then wait for the replies. on_time gets the time of each query."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while due < until:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._under_way.acquire()
                group.create_task(self._one(group))
                due = max(due + 1.0 / RATE, time.monotonic() - 1.0)  # what a busy machine missed is not caught up
                on_time(due)

    async def _one(self, group: asyncio.TaskGroup) -> None:
        (picture,) = self._source.draw(1).tolist()
        label, name = int(self._pictures.y[picture]), f"demo-{self.sent}"
        self.sent += 1
        try:
            reply = await self._client.query(
                self._app, self._pictures.x[picture : picture + 1], raise_refused=False, id=name, latency_ms=LATENCY_MS
            )
        except InfaasError as error:
            self._failed(f"neither answered nor refused: {error}")
            return
        finally:
            self._under_way.release()
        if isinstance(reply, Refused):
            self.refused[reply.code] = self.refused.get(reply.code, 0) + 1
            if reply.code not in TEMPORARY:
                self._failed(f"refused as {reply.code}: {reply.message}")
            return
        problem = self._problem(reply, name)
        if problem:
            self._failed(problem)
            return
        wrong = int(reply.outputs["scores"].argmax()) != label
        self.answers.append((time.time(), wrong, reply.missing or 0, reply.confidence or 0.0))
        group.create_task(self._teach(reply, label))

    async def _teach(self, answer: Answer, label: int) -> None:
        async with self._learning:
            try:
                await self._client.feedback(self._app, label, query=answer.query)
                self.taught += 1
            except InfaasError as error:
                self._failed(f"feedback was not accepted: {error}")

    def _problem(self, answer: Answer, name: str) -> str:
        scores = answer.outputs.get("scores")
        if answer.id != name:
            return f"an answer carries the id {answer.id!r} instead of {name!r}"
        if scores is None or scores.shape != (1, 10) or not np.isfinite(scores).all():
            return "an answer does not hold 10 finite scores"
        return "" if answer.members and answer.query else "an answer names no members"

    def _failed(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


async def run(
    *, keep: bool, seconds: float, picture: Path | None, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run the demo for so many seconds of queries. Returns its result and the system, as `infaas.demo.scenario.run`.

    picture: file to draw into; None: none is drawn.
    """
    began = time.monotonic()
    digits = await family(progress)
    models = digits.models
    pictures = disagreed(models, load(UNSEEN))
    async with temporary("", keep=keep, progress=progress) as (system, ready_s):
        async with infaas.connect(data_dir=system.data_dir) as client:
            best = await _register(client, digits, system.data_dir.parent, progress)
            progress("loading the models", 0.0)
            sender = EnsembleLoad(client, digits.app, pictures)
            await sender.first(len(models))
            bounds = await _phases(client, sender, digits.app, best, seconds, progress)
        progress("reading the records", 0.0)
        problems = [*sender.problems, *await recorded(system, digits.app, sender.sent)]
        problems += await _learnt(system, digits.app, sender.taught)
        times = np.linspace(bounds[0], bounds[-1], BINS + 1)
        parts = await _members(system, digits.app, bounds)
        bins = await _members(system, digits.app, times.tolist())
        found = {
            "app": digits.app,
            "policy": POLICY,
            "eta": ETA,
            "switched": best,
            "pictures": len(pictures),
            "queries": sender.sent,
            "answered": len(sender.answers),
            "refused": sender.refused,
            "feedbacks": sender.taught,
            **_results(sender.answers, bounds, parts, list(models)),
            "series": _series(sender.answers, times, bins, list(models)),
            "picture": None,
            "problems": problems,
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
    if picture is not None:
        draw(found, picture)
        found["picture"] = str(picture)
    return found, system


async def _register(client: Client, digits: ModelFamily, directory: Path, progress: Progress) -> str:
    """Register the models, and a second version of the most accurate one that serves nobody yet. Returns that one's name."""
    validation = digits.save_validation(directory / "validation.npz")
    rows = await register(client, digits, validation, progress)
    best: str = max(rows, key=lambda row: row["accuracy"][1])["model"]
    wrong = permuted(digits.models[best], directory / "permuted.onnx")
    title = f"registering a version of {best} that is wrong"
    progress(title, 0.0)
    await client.register(
        wrong,
        app=digits.app,
        model=best,
        validation=validation,
        on_progress=lambda status: progress(title, status.progress),
    )
    await _switch(client, digits.app, best, "1")
    await client.admin("set-selection", app=digits.app, policy=POLICY, eta=ETA)
    return best


async def _switch(client: Client, app: str, model: str, version: str) -> None:
    await client.admin("set-version", app=app, model=model, version=version)


async def _phases(
    client: Client, sender: EnsembleLoad, app: str, best: str, seconds: float, progress: Progress
) -> list[float]:
    """Send queries all the time, and switch the best model after each third. Returns when the phases begin, and the end; Unix seconds."""
    begins, now = time.monotonic(), time.time()
    bounds = [now]

    async def switches() -> None:
        for number, version in ((1, "2"), (2, "1")):
            await asyncio.sleep(max(0.0, begins + number * seconds / 3 - time.monotonic()))
            await _switch(client, app, best, version)
            bounds.append(time.time())

    def on_time(due: float) -> None:
        progress(
            f"sending queries: {best} {('is right', 'is wrong', 'is right again')[len(bounds) - 1]}",
            (due - begins) / seconds,
        )

    async with asyncio.TaskGroup() as group:
        group.create_task(switches())
        group.create_task(sender.run(begins + seconds, on_time))
    return [*bounds, time.time()]


async def _learnt(system: DemoSystem, app: str, taught: int) -> list[str]:
    """Wait until each feedback is in SQL. Returns what is wrong if it is not."""
    give_up = time.monotonic() + RECORDED_S
    while True:
        (row,) = await system.sql(LEARNT.format(app=app))
        if row["n"] == taught:
            return []
        if time.monotonic() > give_up:
            return [f"{taught} feedbacks were accepted, but SQL holds what {row['n']} have taught"]
        await asyncio.sleep(0.5)


Rows = dict[tuple[int, str], dict[str, Any]]


async def _members(system: DemoSystem, app: str, bounds: Sequence[float]) -> Rows:
    """What feedback taught between each two of these times, by number of the interval and member."""
    rows = await system.sql(MEMBERS.format(app=app, bounds=", ".join(f"{at:.6f}" for at in bounds)))
    return {(row["part"] - 1, row["member"]): row for row in rows}


Answers = Sequence[tuple[float, bool, int, float]]


def _results(answers: Answers, bounds: Sequence[float], parts: Rows, models: Sequence[str]) -> dict[str, Any]:
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


def _series(answers: Answers, times: NDArray[np.float64], bins: Rows, models: Sequence[str]) -> dict[str, Any]:
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
    """A picture of the weights and the ensemble's error over time. The path's suffix decides its format. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    series, phases = found["series"], found["phases"]
    at = np.array(series["time"], float)
    figure = Figure(figsize=(9.0, 5.6), dpi=110, layout="constrained")
    weights, errors = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1.0))
    rows = {model: np.array(row, float) for model, row in series["weights"].items()}
    for model, row in sorted(rows.items(), key=lambda one: -np.nanmax(one[1])):
        weights.plot(at, row, lw=2.4 if model == found["switched"] else 1.3, label=model)
    errors.plot(at, np.array(series["error"], float), color="black", lw=1.3, label="together")
    start = 0.0
    for number, phase in enumerate(phases):
        end = start + phase["seconds"]
        if phase["best"] is not None:
            label = "the best one, in hindsight" if not number else None
            errors.hlines(phase["best"]["error"], start, end, color="#009E73", lw=2.0, label=label)
            errors.annotate(
                phase["best"]["model"],
                (start, phase["best"]["error"]),
                xytext=(3, 3),
                textcoords="offset points",
                fontsize=8,
            )
        if number == 1:
            for panel in (weights, errors):
                panel.axvspan(start, end, color="#D55E00", alpha=0.12, lw=0)
            weights.text((start + end) / 2, 0.5, f"{found['switched']} is wrong", ha="center", va="center", fontsize=9)
        start = end
    weights.set_ylabel("weight")
    weights.set_ylim(0.0, 1.0)
    errors.set_ylabel("share of wrong answers")
    errors.set_ylim(bottom=0.0)
    errors.set_xlabel("time, s")
    errors.set_xlim(0.0, start)
    for panel in (weights, errors):
        panel.grid(alpha=0.25)
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False)
    figure.suptitle(
        f"Seven models under {found['policy']}, eta {found['eta']:g}, {found['answered']} answers with feedback",
        fontsize=11,
    )
    figure.savefig(path)
