"""Several models that answer together: `python benches/ensemble.py regret|stragglers|cost [--runs N] [--etas E ...] [--seconds S]`.

regret: the policies exp3 and exp4 on streams of queries with immediate feedback, against every single model in hindsight. Nothing is
served: the policies alone decide, on outputs that are computed once.

- digits: the demo's seven models on the 750 digits that nobody has trained on, in random order. The best one answers wrongly after a third
  of 15,000 queries, and rightly again after two thirds.
- failure: paper 002, Figure 8. Five models with the accuracies of the authors' simulator; of 20,000 queries, the best one answers
  wrongly from 5,000 to 10,000.
- turns: five models of which another one is the best for each 4,000 queries.

In the last two, models are right independently of each other, and surer where they are right. An error is counted from 2,000 queries after a
change to the next change. Its ratio is to that of the model which is best there.

stragglers: paper 002, Figure 9, in the simulator: one of five members is ten times slower than the objective.

cost: server CPU of a query through an ensemble of five against a plain query, on a system of its own.
"""

import argparse
import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

import infaas
from bus.messages.public import Requirements
from infaas.demo import digits
from services.core.ensemble.base import Member
from services.core.ensemble.policies import Exp3, Exp4
from services.simulation.run import simulate_all
from services.simulation.scenario.read import derive

Floats = NDArray[np.float64]

SETTLED = 2000  # queries after a change; half of what there is, where that is less
CLASSES = 10
FIGURE_8 = (0.7575, 0.654, 0.832, 0.54, 0.9085)  # the accuracies of its models
ASK = Requirements()


class Stream(NamedTuple):
    """Queries in turn. scores: [models, queries, classes]. labels: [queries]. changes: the queries at which the best model changes."""

    names: list[str]
    scores: NDArray[np.float32]
    labels: NDArray[np.int64]
    changes: tuple[int, ...] = ()

    def phases(self) -> list[tuple[int, int]]:
        """From a change to the next."""
        ends = (0, *self.changes, len(self.labels))
        return list(itertools.pairwise(ends))

    def errors(self) -> NDArray[np.bool_]:
        """Which queries each model answers wrongly, [models, queries]."""
        wrong: NDArray[np.bool_] = self.scores.argmax(axis=2) != self.labels
        return wrong


# -- streams


def demo_scores() -> tuple[list[str], NDArray[np.float32], NDArray[np.int64]]:
    """The demo's models, their scores of the unseen digits, and the digits' labels."""
    unseen = digits.load(digits.UNSEEN)
    scores = []
    for path in digits.models().values():
        session = rig.session(path)
        scores.append(session.run(None, {session.get_inputs()[0].name: unseen.x})[0])
    return list(digits.models()), np.array(scores, np.float32), unseen.y


def of_digits(random: np.random.Generator, queries: int = 15_000) -> Stream:
    names, scores, labels = demo_scores()
    best = int((scores.argmax(axis=2) != labels).sum(axis=1).argmin())
    drawn = random.integers(0, len(labels), queries)
    third = queries // 3
    scores = scores[:, drawn]
    scores[best, third : 2 * third] = np.roll(scores[best, third : 2 * third], 1, axis=1)
    return Stream(names, scores, labels[drawn], (third, 2 * third))


def independent(random: np.random.Generator, accuracies: Floats, changes: tuple[int, ...]) -> Stream:
    """Models that are right independently. accuracies: [models, queries]."""
    models, queries = accuracies.shape
    labels = random.integers(0, CLASSES, queries)
    right = random.random((models, queries)) < accuracies
    said = np.where(right, labels, (labels + random.integers(1, CLASSES, (models, queries))) % CLASSES)
    sure = np.where(right, random.uniform(0.4, 1.0, right.shape), random.uniform(0.3, 0.8, right.shape))
    scores = np.repeat(((1.0 - sure) / (CLASSES - 1))[:, :, None], CLASSES, axis=2)
    np.put_along_axis(scores, said[:, :, None], sure[:, :, None], axis=2)
    return Stream([f"model-{n + 1}" for n in range(models)], scores.astype(np.float32), labels, changes)


def of_failure(random: np.random.Generator, queries: int = 20_000) -> Stream:
    accuracies = np.tile(np.array(FIGURE_8)[:, None], queries)
    failed, back = queries // 4, queries // 2
    accuracies[4, failed:back] = 0.1
    return independent(random, accuracies, (failed, back))


def of_turns(random: np.random.Generator, queries: int = 20_000) -> Stream:
    accuracies = np.full((5, queries), 0.7)
    turn = queries // 5
    for n in range(5):
        accuracies[n, n * turn : (n + 1) * turn] = 0.95
    return independent(random, accuracies, tuple(range(turn, queries, turn)))


STREAMS: dict[str, Callable[..., Stream]] = {
    "digits": of_digits,
    "failure": of_failure,
    "turns": of_turns,
}


# -- regret


class Played(NamedTuple):
    """wrong: which queries are answered wrongly. probabilities: of each model at each query, [queries, models]."""

    wrong: NDArray[np.bool_]
    probabilities: Floats


def play(policy: Exp3 | Exp4, stream: Stream, random: np.random.Generator) -> Played:
    """All queries in turn; each gets its feedback before the next one."""
    members = [Member(model=name, version="1") for name in stream.names]
    state = policy.init(members)
    draws = random.random(len(stream.labels))
    wrong = np.zeros(len(draws), np.bool_)
    probabilities = np.zeros((len(draws), len(members)))
    rows = dict(zip(stream.names, stream.scores, strict=True))
    for at, (label, u) in enumerate(zip(stream.labels.tolist(), draws.tolist(), strict=True)):
        outputs = {name: {"scores": rows[name][at : at + 1]} for name in policy.select(state, members, ASK, u)}
        learnt = policy.learnt(state, members)
        probabilities[at] = [row.probability for row in learnt]
        wrong[at] = policy.combine(state, members, outputs).outputs["scores"].argmax() != label
        state = policy.observe(state, members, label, outputs, {row.member: row.probability for row in learnt})
    return Played(wrong, probabilities)


class Phase(NamedTuple):
    """Shares of queries that were answered wrongly, SETTLED queries after a change on. best: by the single model that is best there."""

    best: float
    exp3: float
    exp4: float


class Regret(NamedTuple):
    """phases: between changes. single: over all queries, of the best single model in hindsight; exp3, exp4: likewise.

    failed: the share of the queries that exp3 gives to the first phase's best model in each phase, SETTLED queries after a change on.
    """

    phases: list[Phase]
    single: float
    exp3: float
    exp4: float
    failed: list[float]


def regret(make: Callable[[np.random.Generator], Stream], runs: int, eta: float, spread: float | None = None) -> Regret:
    """Means over so many runs, each with queries of its own."""
    found = [_one(make, seed, eta, spread) for seed in range(runs)]
    phases = [Phase(*np.mean(same, axis=0)) for same in zip(*(one.phases for one in found), strict=True)]
    single, exp3, exp4 = np.mean([(one.single, one.exp3, one.exp4) for one in found], axis=0)
    return Regret(phases, single, exp3, exp4, list(np.mean([one.failed for one in found], axis=0)))


def _one(make: Callable[[np.random.Generator], Stream], seed: int, eta: float, spread: float | None) -> Regret:
    random = np.random.default_rng(seed)
    stream = make(random)
    errors = stream.errors()
    exp3 = play(Exp3(eta, spread), stream, random)
    exp4 = play(Exp4(eta, spread), stream, random)
    phases, failed = [], []
    first = int(errors[:, slice(*stream.phases()[0])].mean(axis=1).argmin())
    for start, end in stream.phases():
        settled = slice(min(start + SETTLED, (start + end) // 2), end)
        best = errors[:, settled].mean(axis=1).min()
        phases.append(Phase(float(best), float(exp3.wrong[settled].mean()), float(exp4.wrong[settled].mean())))
        failed.append(float(exp3.probabilities[settled, first].mean()))
    single = float(errors.mean(axis=1).min())
    return Regret(phases, single, float(exp3.wrong.mean()), float(exp4.wrong.mean()), failed)


def show(name: str, eta: float, found: Regret, note: str = "") -> None:
    print(f"\n{name}, eta {eta:g}{note}")
    print(f"  {'':24}{'best single':>12}{'exp3':>9}{'ratio':>7}{'exp4':>9}{'ratio':>7}  exp3 asks the first best")
    rows = [(f"phase {n + 1}, settled", *one) for n, one in enumerate(found.phases)]
    shares = [f"{share:8.1%}" for share in found.failed]
    rows.append(("all, in hindsight", found.single, found.exp3, found.exp4))
    for (label, best, exp3, exp4), share in zip(rows, [*shares, ""], strict=True):
        exp = "".join(f"{error:>9.2%}{error / best if best else np.inf:>7.2f}" for error in (exp3, exp4))
        print(f"  {label:24}{best:>12.2%}{exp}  {share}")


# -- stragglers

OBJECTIVE_MS = 100.0
SLOW = 10.0  # times the objective, that the slow member takes
PARTS_S = 60.0  # simulated
COST_S = 4.0


def stragglers(seconds: float = PARTS_S) -> dict[str, dict[str, float]]:
    """Paper 002, Figure 9, in the simulator: five members on five devices, one of them ten times slower than the objective.

    By way of answering: p99_ms, error, missing. `all in time`: without the slow member's trouble, for its accuracy. `wait for all`: no
    objective, and the answer waits for every member.
    """
    return {
        "all in time": _simulated(seconds, slow=False, wait_for_all=False),
        "answered at the objective": _simulated(seconds, slow=True, wait_for_all=False),
        "wait for all": _simulated(seconds, slow=True, wait_for_all=True),
    }


def _simulated(seconds: float, *, slow: bool, wait_for_all: bool) -> dict[str, float]:
    """One run. The slow member's profile says what the others' say: nobody knows beforehand."""
    needs = {} if wait_for_all else {"latency_ms": OBJECTIVE_MS}
    content: dict[str, Any] = {
        "scenario": {"duration_s": seconds},
        "app": [{"name": "five", "selection": {"policy": "exp4"}, **needs}],
        "variant": [
            {"app": "five", "name": f"model-{n}", "hardware": f"gpu{n}", "latency_ms": 5.0, "max_batch": 1024, "accuracy": accuracy}
            for n, accuracy in enumerate(FIGURE_8)
        ],
        "worker": [{"kind": "five", "devices": {f"gpu{n}": 1 for n in range(5)}, "price_per_hour": 1.0, "start": 1, "max": 1}],
        "load": [{"app": "five", "rate": 100, "feedback": 1.0}],
        "settings": {"selection": {"wait_s": 60.0}},
    }  # fmt: skip
    if slow:
        factor = SLOW * OBJECTIVE_MS / 5.0
        content["fault"] = [{"kind": "device-slow", "hardware": "gpu0", "factor": factor, "at_s": 0}]
    (found,) = simulate_all(derive(content, Path("stragglers")))["policies"]
    several = found["apps"]["five"]["ensemble"]
    lost = found["queries"] - found["answered"]
    return {"p99_ms": found["p99_ms"], "error": several["error"], "missing": several["missing"], "lost": lost}


def show_stragglers(found: dict[str, dict[str, float]]) -> None:
    print(f"five members, objective {OBJECTIVE_MS:g} ms, one member {SLOW:g} times slower than it (simulated)")
    print(f"  {'':28}{'p99, ms':>10}{'error':>9}{'missing':>9}{'unanswered':>12}")
    for name, one in found.items():
        print(f"  {name:28}{one['p99_ms']:>10.1f}{one['error']:>9.2%}{one['missing']:>9.2f}{one['lost']:>12g}")


# -- cost


def cost(seconds: float, rounds: int) -> dict[str, Any]:
    """Server CPU of a query through an ensemble of five against a plain query, on a real system. ms an answer, medians."""
    with rig.system() as own:
        asyncio.run(_prepare(own.data_dir))
        x, y = rig.stored()
        queries = rig.bodies(own.data_dir.parent / "queries.npz", x[:64], y[:64])
        load = (queries, "--closed", "32", "--seconds", str(seconds))
        ask = partial(rig.generate, "nats", own.urls["nats"])
        runs = {
            app: partial(rig.with_cpu, [own.pid], partial(ask, f"infaas.query.{app}", *load)) for app in ("one", "five")
        }
        found = rig.in_turn(
            runs, rounds, lambda app, one: rig.say(f"  {app}: {one['rate']:.0f}/s {one['errors'] or ''}")
        )
    of = {app: rig.medians(results) for app, results in found.items()}
    serving = {app: rig.serving_ms(one) for app, one in of.items()}
    return {"ms": serving, "ratio": serving["five"] / serving["one"], "of it": of}


async def _prepare(data_dir: Path) -> None:
    """App `one`: one model. App `five`: the same one, and four more equal ones, under exp4."""
    async with infaas.connect(data_dir=data_dir) as client:
        for n in range(5):
            await client.register(rig.MODEL, app="five", model=f"m{n}", validation=rig.VALIDATION)
        await client.admin("add-app", app="one")
        await client.admin("link-model", app="one", model="m0")
        await client.admin("set-selection", app="five", policy="exp4")
        x = rig.stored()[0][:1]
        await rig.until_answered(client, "one", x)
        await rig.until_answered(client, "five", x, lambda answer: len(answer.members or ()) == 5)


def show_cost(found: dict[str, Any]) -> None:
    print("server CPU, ms an answer")
    for app, one in found["of it"].items():
        parts = ", ".join(f"{name} {one['cpu_ms'].get(name, 0.0):.4f}" for name in rig.SERVING)
        print(f"  {app:6}{found['ms'][app]:9.4f}  ({parts}; {one['rate']:.0f} answers/s)")
    print(f"  ratio {found['ratio']:.2f}   <= 5.5")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["regret", "stragglers", "cost"])
    parser.add_argument("--runs", type=int, default=5, help="of each stream, each with queries of its own")
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--etas", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument(
        "--bounds", type=float, nargs="+", help="the best weight over the least one; left out: the policies' own"
    )
    parser.add_argument("--queries", type=int, help="of a stream; left out: its own number")
    parser.add_argument("--seconds", type=float, help="of a run; left out: 60 simulated ones, or 4 real ones")
    parser.add_argument("--rounds", type=int, default=3, help="of cost")
    options = parser.parse_args(arguments)
    if options.part == "stragglers":
        show_stragglers(stragglers(options.seconds or PARTS_S))
        return
    if options.part == "cost":
        show_cost(cost(options.seconds or COST_S, options.rounds))
        return
    length = {} if options.queries is None else {"queries": options.queries}
    for name in options.streams:
        for eta in options.etas:
            for bound in options.bounds or [None]:
                spread, note = (None, "") if bound is None else (float(np.log(bound)), f", least weight 1/{bound:g}")
                show(name, eta, regret(partial(STREAMS[name], **length), options.runs, eta, spread), note)


if __name__ == "__main__":
    main()
