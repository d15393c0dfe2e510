"""A whole system under load whose processes are killed and whose models misbehave: no query is lost, doubled or wrong."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

import infaas
from tests.support.clients.constant_load import (
    APP,
    NOTICED,
    PATIENT_MS,
    LibraryLoad,
    StockLoad,
    is_right,
    outcomes,
    samples,
    wrong,
)
from tests.support.clients.responders import until
from tests.support.models import poison_models, tiny_models
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually, living_of
from tests.support.servers.system import QUICK, Whole, running, talk

TIGHT = 500.0  # ms, what every third stock query allows; the others allow the default 30 s


class System(Whole):
    """A running `infaas up` whose processes can be killed."""

    def all_killed(self) -> bool:
        """SIGKILL to all of its processes, until none is left."""

        def killed() -> bool:
            pids = living_of(self.directory)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        return eventually(killed)

    def kill(self, service: str, worker: str = "") -> int:
        """SIGKILL the first of them; returns its pid."""
        pid = self.pids(service, worker)[0]
        os.kill(pid, signal.SIGKILL)
        return pid


@contextmanager
def up(directory: Path, *options: str) -> Iterator[System]:
    """Run `infaas up` with two dispatchers; nothing of it is left at the end."""
    config = directory.parent / "infaas.toml"
    config.write_text(QUICK)
    found = ("--no-dashboard", "--no-gateway", "--dispatchers", "2", "--config", str(config), *options)
    with running(directory, *found) as whole:
        yield System(*whole)


@pytest.fixture(scope="module")
def pair(doubled: Whole) -> System:
    """Two dispatchers, two workers, the honest model."""
    system = System(*doubled)
    system.register(APP, tiny_models.exact(tiny_models.mlp()))
    return system


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two dispatchers and one worker that everybody has to share, with the honest model."""
    with up(tmp_path_factory.mktemp("single") / "data") as system:
        system.register(APP, tiny_models.exact(tiny_models.mlp()))
        yield system


class Suffered(LibraryLoad):
    """What a fault did to queries sent by the client library, and to those of stock nats-py beside it."""

    stock: StockLoad
    struck: tuple[float, float]  # Unix seconds before and after the fault
    victim: str  # the worker that served then


async def suffer(
    system: System, tag: str, fault: Callable[[str], None], after: float = 2.5, rate: float = 50.0
) -> Suffered:
    """Load before, during and `after` seconds after the fault, which is told the worker that serves. rate: a fifth of the queries/s."""
    load = Suffered(system.nats, f"library-{tag}", 3 * rate)
    load.stock = StockLoad(system.nats, f"stock-{tag}", 2 * rate, latency_ms=TIGHT, every=3)
    async with load, load.stock:
        await until(lambda: load.answers and load.stock.answers)
        await asyncio.sleep(1)
        load.victim = list(load.answers.values())[-1].worker
        before = time.time()
        fault(load.victim)
        load.struck = before, time.time()
        await asyncio.sleep(after)
    return load


def sent_to_a_victim(load: Suffered, sent: float) -> bool:
    """Whether a query that was sent then may have died with a killed process."""
    return load.struck[0] - NOTICED < sent < load.struck[1] + NOTICED


def all_answered_once(load: Suffered) -> None:
    """Every query of the library; of the stock client all that allowed the time, and none twice."""
    assert wrong(load) == {}
    assert load.others == {}
    assert load.answers.keys() == load.queries.keys()
    stock = load.stock
    assert wrong(stock) == {}
    assert stock.repeated == {}
    for name, (_, code) in stock.refusals.items():
        query = stock.queries[name]
        assert code in ("deadline", "overloaded"), (name, code)
        assert query.deadline - query.sent < 1.0, name  # those with 30 s are answered


def unheard(load: Suffered) -> set[str]:
    """Stock queries without a reply."""
    return load.stock.queries.keys() - load.stock.replies.keys()


def lost_in_a_mailbox(load: Suffered) -> bool:
    """Whether the unheard ones are those that a dispatcher died with (a stock client sends nothing again)."""
    return all(sent_to_a_victim(load, load.stock.queries[name].sent) for name in unheard(load))


def unrecorded(
    system: System, load: LibraryLoad | StockLoad, heard: set[str], excused: Callable[[str], bool] = lambda _: False
) -> set[str]:
    """Queries that were answered and are not in SQL in the end, where none may be twice. excused: which need not be there."""

    def missing() -> set[str]:
        rows = outcomes(system.sql, load.tag)
        assert {name: kinds for name, kinds in rows.items() if kinds.total() != 1} == {}
        return {name for name in heard - rows.keys() if not excused(name)}

    eventually(lambda: not missing())
    return missing()


def all_recorded_once(system: System, load: Suffered) -> None:
    assert unrecorded(system, load, set(load.queries)) == set()
    assert unrecorded(system, load.stock, set(load.stock.replies)) == set()


def active_again(system: System, load: Suffered, *, anywhere: bool = False) -> bool:
    """Whether an instance becomes Active again on the worker that suffered the fault; the events say so.

    anywhere: on any worker. Where all executors died, the first one back may take all the load.
    """
    query = (
        "SELECT count(*) FROM infaas.state_events WHERE (worker = %s OR %s) AND to_state = 'Active' AND reason LIKE 'loaded%%' "
        "AND time > %s"
    )

    def look() -> bool:
        began = datetime.fromtimestamp(load.struck[0], UTC)
        return bool(system.rows(query, load.victim, anywhere, began)[0][0])

    return eventually(look)


def test_the_only_executor_is_killed(system: Whole) -> None:
    """Of the system that all tests share: what waits there is answered once it is back."""
    shared = System(*system)
    shared.register(APP, tiny_models.exact(tiny_models.mlp()))
    load = run(suffer(shared, "only", lambda worker: shared.kill("executor") and None, rate=20.0))
    all_answered_once(load)
    assert unheard(load) == set()
    all_recorded_once(shared, load)
    assert active_again(shared, load)


@pytest.mark.parametrize(
    "killed", [["dispatcher"], ["executor"], ["executor", "executor"], ["registrar"]], ids="+".join
)
def test_processes_are_killed(pair: System, killed: list[str]) -> None:
    """A dispatcher, the executor that serves, both executors, or what records."""
    [service] = set(killed)
    before = len(pair.pids(service))

    def fault(worker: str) -> None:
        for pid in pair.pids(service, worker if killed == ["executor"] else "")[: len(killed)]:
            os.kill(pid, signal.SIGKILL)

    load = run(suffer(pair, "+".join(killed), fault))
    all_answered_once(load)
    assert lost_in_a_mailbox(load) if service == "dispatcher" else unheard(load) == set()
    all_recorded_once(pair, load)
    assert eventually(lambda: len(pair.pids(service)) == before)
    if killed == ["executor"] * 2:  # of one, what it had the other one may serve from now on
        assert active_again(pair, load, anywhere=True)


def test_a_monitor_is_killed(pair: System) -> None:
    assert eventually(lambda: len(pair.pids("executor")) == 2)  # a test before has killed them
    executors = pair.pids("executor")
    load = run(suffer(pair, "monitor", lambda worker: pair.kill("monitor", worker) and None))
    all_answered_once(load)
    assert unheard(load) == set()
    assert pair.pids("executor") == executors
    assert any(
        load.queries[name].sent > load.struck[1] and answer.worker == load.victim
        for name, answer in load.answers.items()
    )
    all_recorded_once(pair, load)


def test_dispatcher_executor_and_monitor_are_killed_at_once(pair: System) -> None:
    def fault(worker: str) -> None:
        pair.kill("dispatcher")
        pair.kill("executor", worker)
        pair.kill("monitor", worker)

    load = run(suffer(pair, "all", fault))
    all_answered_once(load)
    assert lost_in_a_mailbox(load)
    # What an executor answered in its last moment only its dispatcher knows, and the other way round.
    for part, heard in ((load, set(load.queries)), (load.stock, set(load.stock.replies))):

        def lost(name: str, part: LibraryLoad | StockLoad = part) -> bool:
            answer = part.answers.get(name)
            worker = answer.worker if isinstance(answer, infaas.Answer) else answer and answer["worker"]
            return worker in (None, load.victim) and sent_to_a_victim(load, part.queries[name].sent)

        assert unrecorded(pair, part, heard, lost) == set()
    assert eventually(lambda: len(pair.pids("dispatcher")) == len(pair.pids("monitor")) == 2)


async def test_a_registration_beside_the_load(pair: System) -> None:
    beside = asyncio.create_task(suffer(pair, "registering", lambda worker: None, after=4.0))
    await asyncio.sleep(1.5)
    await asyncio.to_thread(pair.register, "second", tiny_models.exact(tiny_models.mlp(seed=5)))
    load = await beside
    all_answered_once(load)
    assert unheard(load) == set()
    all_recorded_once(pair, load)


# -- models that spoil a run, on the only worker


async def spoil(system: System, app: str, tag: str) -> tuple[str, dict[str, Counter[str]]]:
    """Ask a poisonous query amid loads on the same model and on the honest one; both must go on as if nothing were.

    Returns the code that the poisonous query got, and what SQL says of it.
    """
    bad = samples()[0].x.copy()
    bad[0, 0] = poison_models.POISON
    same = LibraryLoad(system.nats, f"same-{tag}", 60, app=app, latency_ms=PATIENT_MS)
    other = LibraryLoad(system.nats, f"other-{tag}", 60, latency_ms=PATIENT_MS)
    async with infaas.connect(system.nats) as client, same, other:
        await until(lambda: same.answers and other.answers)
        await asyncio.sleep(0.5)
        asked = {"id": f"poison-{tag}-0", "latency_ms": PATIENT_MS, "timeout": 180.0}
        end = await client.query(app, bad, raise_refused=False, **asked)
        await asyncio.sleep(0.5)
    for load in (same, other):
        assert wrong(load) == {}
        assert load.others == {}
        assert load.answers.keys() == load.queries.keys()
        assert {name for name, answer in load.answers.items() if answer.missed} == set()
        assert unrecorded(system, load, set(load.queries)) == set()
    assert isinstance(end, infaas.Refused), end
    assert eventually(lambda: bool(outcomes(system.sql, f"poison-{tag}")))
    return end.code, outcomes(system.sql, f"poison-{tag}")


@pytest.mark.parametrize("kind", ["not_a_number", "hanging", "crashing"])
def test_a_model_that_fails_on_one_input_costs_only_that_query(single: System, kind: str) -> None:
    single.register(kind, getattr(poison_models, kind)())
    code, rows = run(spoil(single, kind, kind))
    assert code == "model_error"
    assert rows == {f"poison-{kind}-0": Counter({"error/model_error": 1})}


def test_a_killed_system_starts_again_with_all_that_it_knew_and_had_learnt(single: System) -> None:
    """Every process is killed after feedback on two models that answer together was accepted."""
    x, y = tiny_models.digits()

    async def answers(client: infaas.Client) -> tuple[dict[str, list[str]], list[dict[str, object]]]:
        sample = samples()[1]
        answer = await client.query(APP, sample.x)
        assert is_right(answer.output, sample)
        apps = {item["app"]: item["models"] for item in await client.apps()}
        return apps, sorted(await client.variants(), key=lambda item: str(item["variant"]))

    async def learnt(client: infaas.Client) -> list[list[dict[str, object]]]:
        return [await client.selection("taught", context=context) for context in (None, "me")]

    async def teach(client: infaas.Client) -> None:
        for number, context in enumerate([None] * 3 + ["me"] * 5):
            answer = await client.query("taught", x[number : number + 1], context=context, timeout=60.0)
            await client.feedback("taught", int(y[number]), query=answer.query)

    single.register("other", tiny_models.mlp(seed=1))
    single.register("taught", tiny_models.exact(tiny_models.mlp()))
    single.done("admin", "link-model", "taught", "--model", "other")
    single.done("admin", "set-selection", "taught", "--policy", "exp4", "--contextual")
    assert eventually(lambda: len(talk(single, learnt)[0]) == 2)  # a dispatcher hears of it a moment later
    talk(single, teach)
    assert eventually(lambda: [{row["n"] for row in rows} for rows in talk(single, learnt)] == [{3}, {5}])
    known, taught = talk(single, answers), talk(single, learnt)
    weights = {row["member"]: row["weight"] for row in taught[1]}
    assert weights["taught"] > weights["other"], "the other one answers at random"
    assert single.all_killed()
    with up(single.directory) as again:
        found = talk(again, answers)
        assert found[0] == known[0]
        fixed = ("app", "model", "version", "variant", "accuracy", "load_ms", "latency_ms", "saturation_qps")
        assert [[item[name] for name in fixed] for item in found[1]] == [
            [item[name] for name in fixed] for item in known[1]
        ]
        assert eventually(lambda: talk(again, learnt) == taught), talk(again, learnt)
        again.done("admin", "reset-selection", "taught", "--context", "me")
        assert [row["n"] for row in again.told("selection", "--app", "taught")] == [3, 3]  # of everybody: it stays
        assert eventually(lambda: {row["n"] for row in talk(again, learnt)[1]} == {0})
