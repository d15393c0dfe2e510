"""Each need of a query and each kind of app: the table of docs/queries.md, cell by cell, by a message and after a take-over. Virtual time."""

import itertools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import Raw
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Ensemble, PipelineRecord, PipelineVertex
from bus.messages.flow import HandBack
from bus.messages.jobs import SubmitJob
from bus.messages.public import QueryHead, Requirements, Tensor
from services.core.settings import JobsSettings
from services.dispatcher.needs import needs_of
from services.dispatcher.query import Query
from services.jobs.policy import NEEDS, JobPolicy
from tests.support.simulated.fleet import PRICES, SIGNATURE, Fleet, catalogue, variant
from tests.unit.dispatcher.test_pipelines import CHAIN, ONE, Staged, edge, planned, vertex
from tests.unit.jobs.test_job import catalog

PAGE = Path(__file__).parents[3] / "docs" / "queries.md"
FIELDS = Requirements.__struct_fields__
GOOD = variant("a-v1-ort-fp64-t1-b8", model="a", accuracy=0.97, base_ms=6.0)
# that all can meet at a time
ONCE = {"accuracy": 0.95, "latency_ms": 900.0, "cost": 1.0, "priority": 3, "context": "ann"}


def table() -> dict[tuple[str, str], str]:
    """The page's cells, by kind and need; a row may have several kinds."""
    lines = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    start = next(n for n, line in enumerate(lines) if line[0] == "kind")
    rows = itertools.takewhile(lambda line: len(line) == len(lines[start]), lines[start + 1 :])
    return {
        (kind, need): cell
        for row in rows
        for kind in row[0].split("; ")
        for need, cell in zip(lines[start][1:], row[1:], strict=True)
    }


class World:
    """One kind of app, loaded, and how a client asks it. app: whom. always: needs that each query states. before: sends what comes first."""

    def __init__(self, fleet: Fleet, app: str, *, workers: int = 1, **always: Any) -> None:
        self.fleet = fleet
        self.app = app
        self.always = always
        self.before: Callable[[World, Tensor], None] = lambda world, inputs: None
        self._numbers = itertools.count(1)

    def load(self, *records: Any, app: str = "a") -> None:
        for name in self.fleet.devices:
            for record in records:
                self.fleet.order(record, name, app=app)
        self.fleet.stage.run(2.0)

    def inputs(self) -> Tensor:
        """Like no others."""
        return Tensor("FP32", [1, 2], struct.pack("<2f", next(self._numbers), 0.0))

    def ask(self, *, taken_over: bool = False, seconds: float = 4.0, **needs: Any) -> dict[str, Any]:
        """The reply to one query. taken_over: from a dispatcher that is gone."""
        fleet, label = self.fleet, f"n{next(self._numbers)}"
        inputs = self.inputs()
        self.before(self, inputs)
        now = fleet.stage.now
        body = encode({"inputs": inputs, "id": label, **self.always, **needs})
        reply = f"_INBOX.test.{label}"
        if taken_over:
            head = decode(QueryHead, body)
            objective = next(
                (r.latency_ms for r in fleet.records if isinstance(r, AppRecord) and r.app == self.app), None
            )
            key = f"_.{head.model}" if self.app == "_" else self.app
            ask = needs_of(head, key, 1, None, objective, now, 30.0)
            query = Query(label.encode().ljust(16), self.app, head, ask, reply, body, now)
            back = HandBack(query.route("gone", "", "infaas"), "orphaned", Raw(body))
            fleet.stage.publish(fleet.subjects.resubmit(), back)
        else:
            fleet.stage.publish(fleet.subjects.query(self.app), body, reply)
        return fleet.reply(label, seconds)

    def outcomes(self, reply: dict[str, Any]) -> list[Any]:
        """Of the query and of all its parts."""
        found = {bytes.fromhex(reply["query"])}
        for one in sorted(self.fleet.outcomes(), key=lambda one: one.time):
            if one.parent in found:
                found.add(one.uid)
        return [one for one in self.fleet.outcomes() if one.uid in found]

    def explained(self, **needs: Any) -> dict[str, Any]:
        return self.fleet.request(self.fleet.subjects.explain(self.app), Requirements(**self.always, **needs))

    def least(self) -> float:
        """What the cheapest way to answer costs, in US$ per 1,000, as explain has it."""
        found = self.explained()
        by_stage: dict[str, list[float]] = {}
        for one in found["candidates"]:
            if self.always.get("variant") in (None, one["variant"]):
                by_stage.setdefault(one.get("stage", ""), []).append(one["cost"])
        return sum(min(each) for each in by_stage.values())


def loaded(record: PipelineRecord = CHAIN, app: str = "p", **always: Any) -> World:
    """Vertices a and b, each with a good and a cheap variant, and the pipeline p of both."""
    fleet = Staged(record)
    fleet.change("p", latency_ms=None)
    world = World(fleet, app, **always)
    for name in {one.app for one in record.vertices} & {"a", "b"}:
        good = replace(GOOD, variant=f"{name}-v1-ort-fp64-t1-b8", model=name)
        fleet.add(good)
        fleet.change(name, links={name: "1"})
        world.load(good, app=name)
    return world


def voting(world: World) -> World:
    """A further model of app a, and both vote."""
    other = variant("c-v1-ort-fp64-t1-b8", model="c", accuracy=0.97)
    world.fleet.add(*(one for one in catalogue(other, app="c")))
    world.fleet.change("a", links={"a": "1", "c": "1"}, selection=Ensemble(policy="majority"))
    for device in world.fleet.devices.values():
        device.wide = dict.fromkeys("abc", 2)
        device.says = {"a": 1.0}
    world.load(other)
    world.ask(latency_ms=2000.0)  # what was learnt is read
    return world


def voting_stage() -> World:
    """Two models answer the first stage; the second one is as accurate as anybody asks."""
    world = loaded()
    sure = variant("b-v1-ort-fp80-t1-b8", model="b", accuracy=0.999, base_ms=9.0)
    world.fleet.add(sure)
    world.fleet.change("b", links={"b": "1"})
    world.load(sure, app="b")
    return voting(world)


def disagree(world: World) -> float:
    """One of two does not answer in time."""
    for device in world.fleet.devices.values():
        device.late = {"c": 1000.0}
    return 0.9


def cached(before: Callable[[World, Tensor], None] = lambda world, inputs: None) -> World:
    world = loaded(app="a")
    world.fleet.change("a", selection=Ensemble(cache_mb=1.0))
    world.before = before
    return world


def equal(seconds: float) -> Callable[[World, Tensor], None]:
    """An equal query comes first, so many seconds before."""

    def ask(world: World, inputs: Tensor) -> None:
        world.fleet.stage.publish(world.fleet.subjects.query("a"), encode({"inputs": inputs}), "_INBOX.test.first")
        world.fleet.stage.run(seconds)

    return ask


def one_device(kind: str, **fields: Any) -> World:
    """An app whose only variant is on such a device."""
    only = variant("a-v1-own-t1-b8", model="a", hardware=kind, accuracy=0.97, **fields)
    world = World(Fleet(only, kind=kind), "app")
    world.load(only, app="app")
    return world


def with_a_plan() -> World:
    world = loaded()
    world.fleet.change("p", plan=planned())
    return world


def nested() -> World:
    record = PipelineRecord(
        vertices=[vertex("a"), PipelineVertex(name="rest", app="inner", inputs={"x": "a.y"})],
        edges=[edge("a", "rest")],
        output={"y": "rest.y"},
    )
    world = loaded(record)
    world.fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=ONE))
    world.fleet.change("p")
    return world


KINDS: dict[str, Callable[[], World]] = {
    "one variant answers": lambda: loaded(app="a"),
    "the same, for a query that names a variant": lambda: loaded(app="a", variant=GOOD.variant),
    "by its model, without an app": lambda: loaded(app="_", model="a"),
    "a user's own process": lambda: one_device("container.a.1"),
    "an engine elsewhere": lambda: one_device("remote", price_per_s=1e-5),
    "with a cache": cached,
    "its answer is kept": lambda: cached(equal(1.0)),
    "an equal query is under way": lambda: cached(equal(0.0002)),
    "several models answer": lambda: voting(loaded(app="a")),
    "a pipeline": loaded,
    "with a plan": with_a_plan,
    "several models answer a stage": voting_stage,
    "a stage is a pipeline": nested,
}

# -- what each need is: values that can be met, and that cannot; what shows that it was met; its words in a refusal


class Need(NamedTuple):
    fine: Callable[[World], Any]
    never: Callable[[World], Any]
    met: Callable[[World, Any, dict[str, Any]], bool]
    words: str


def all_of(name: str) -> Callable[[World, Any, dict[str, Any]], bool]:
    """Whether the query and all its parts were recorded with it."""
    return lambda world, value, reply: {getattr(one, name) for one in world.outcomes(reply)} == {value}


def in_time(world: World, value: float, reply: dict[str, Any]) -> bool:
    return world.outcomes(reply)[0].outcome == "ok"


NEED: dict[str, Need] = {
    "latency_ms": Need(lambda _: 900.0, lambda _: 0.4, lambda w, v, r: r["latency_ms"] <= v, "within"),
    "deadline": Need(lambda w: w.fleet.stage.now + 3.0, lambda w: w.fleet.stage.now - 1.0, in_time, "deadline"),
    "accuracy": Need(lambda _: 0.95, lambda _: 0.99, lambda w, v, r: r["accuracy"] >= v, "accuracy"),
    "metric": Need(lambda _: "top1", lambda _: "bleu", lambda w, v, r: "error" not in r, "metric"),
    "cost": Need(
        lambda w: 1.0001 * w.least(), lambda w: 0.9999 * w.least(), lambda w, v, r: 1000.0 * r["cost"] <= v, "cost"
    ),
    "priority": Need(lambda _: 2, lambda _: 2, all_of("priority"), ""),
    "confidence": Need(lambda _: 0.5, disagree, lambda w, v, r: r["confidence"] >= v, ""),
    "context": Need(lambda _: "ann", lambda _: "ann", all_of("context"), ""),
    "model": Need(lambda _: "a", lambda _: "nosuch", lambda w, v, r: r["model"] == v, "model"),
    "version": Need(lambda _: "1", lambda _: "99", lambda w, v, r: r["version"] == v, "version"),
    "variant": Need(
        lambda w: "a-v1-own-t1-b8" if w.app == "app" else GOOD.variant,
        lambda _: "nosuch",
        lambda w, v, r: r["variant"] == v,
        "variant",
    ),
}  # fmt: skip


def test_the_page_has_a_cell_for_every_need_and_kind() -> None:
    """A new need, or a new kind, is to be thought through for all of the other."""
    assert set(FIELDS) == set(NEED)
    assert set(table()) == {(kind, need) for kind in (*KINDS, "an offline job") for need in FIELDS}
    assert set(table().values()) == {"limited", "missed", "met", "refused"}


def wrong(world: World, need: str, cell: str, *, taken_over: bool) -> Iterator[str]:
    """What does not hold of this cell."""
    about = NEED[need]
    value = about.fine(world)
    reply = world.ask(taken_over=taken_over, **{need: value})
    if cell == "refused":
        if need not in reply.get("error", {}).get("message", ""):
            yield f"{need}={value} is to be refused by name: {reply}"
        return
    if "error" in reply or reply["missed"] or not about.met(world, value, reply):
        yield f"{need}={value} can be met: {reply}"
    if need == "metric" and taken_over:
        return  # whoever had it first has refused it
    value = about.never(world)
    reply = world.ask(taken_over=taken_over, **{need: value})
    for device in world.fleet.devices.values():
        device.late = {}
    if cell == "met" and ("error" in reply or reply["missed"] or not about.met(world, value, reply)):
        yield f"{need}={value} is always met: {reply}"
    missed = {"latency_ms": "latency", "deadline": "latency"}.get(need, need)
    if cell == "missed" and reply.get("missed") != [missed]:
        yield f"{need}={value} is answered, with {missed} in `missed`: {reply}"
    if cell == "limited" and about.words not in "{code}: {message}".format(
        **reply.get("error", {"code": "", "message": ""})
    ):
        yield f"{need}={value} is to be refused by name: {reply}"


@pytest.mark.parametrize("taken_over", [False, True], ids=["asked", "taken over"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_need_is_met_refused_by_name_or_said_to_be_missed(kind: str, taken_over: bool) -> None:
    cells, world = table(), KINDS[kind]()
    found = [text for need in FIELDS for text in wrong(world, need, cells[kind, need], taken_over=taken_over)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("its answer is kept", "an equal query is under way")]
)
def test_an_explanation_refuses_what_the_query_would_be_refused_for(kind: str) -> None:
    cells, world = table(), KINDS[kind]()
    for need in ("latency_ms", "accuracy", "cost", "model", "version", "variant"):
        for value in (NEED[need].fine(world), NEED[need].never(world)):
            if need in world.always:
                continue
            reply, found = world.ask(**{need: value}), world.explained(**{need: value})
            assert ("error" in reply) == ("refusal" in found), (cells[kind, need], need, value, reply, found)
            if "error" in reply:
                assert reply["error"]["code"] == found["refusal"]["code"], (need, value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "kept" not in kind])
def test_a_deadline_that_is_too_near_for_an_idle_instance_is_named(kind: str) -> None:
    """Nobody waits, so it is not said that a queue is full, or that asking again helps."""
    world = KINDS[kind]()
    if kind == "an equal query is under way":
        world.before = lambda world, inputs: None
    reply = world.ask(deadline=world.fleet.stage.now + 0.0015)
    assert reply["error"]["code"] == "deadline", reply
    assert "deadline" in reply["error"]["message"] or "time was up" in reply["error"]["message"]
    assert "queue" not in reply["error"]["message"]
    for error in (reply["error"], world.ask(deadline=world.fleet.stage.now - 1.0).get("error", {})):
        assert "retry_after_ms" not in error


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_keeps_all_needs(kind: str) -> None:
    """The executor dies while it has the query, and a new one comes."""
    world = KINDS[kind]()
    fleet = world.fleet
    for one in fleet.devices.values():
        one.slow = 20.0
    label = "again"
    body = encode({"inputs": world.inputs(), "id": label, **world.always, **ONCE, "latency_ms": 4000.0})
    fleet.stage.publish(fleet.subjects.query(world.app), body, f"_INBOX.test.{label}", seconds=0.01)
    fleet.end_executor("w0", seconds=0.2)
    wide, says = fleet.devices["w0"].wide, fleet.devices["w0"].says
    fleet.start_executor("w0")
    fleet.devices["w0"].wide, fleet.devices["w0"].says = wide, says
    reply = fleet.reply(label, 6.0)
    assert reply.get("missed") == [], reply
    assert reply["accuracy"] >= 0.95
    assert all_of("priority")(world, 3, reply)
    assert all_of("context")(world, "ann", reply)
    [query] = [one for one in world.outcomes(reply) if one.parent is None]
    assert (query.cost_limit, query.accuracy_required, query.slo_ms) == (1.0, 0.95, 4000.0)


@pytest.mark.parametrize("need", FIELDS)
def test_an_offline_job_has_a_need_or_is_refused_for_it(need: str) -> None:
    policy = JobPolicy(catalog(GOOD), "infaas", PRICES, JobsSettings(), simulated=False)
    fine: dict[str, Any] = {"accuracy": 0.95, "metric": "top1", "model": "a", "variant": GOOD.variant}
    other: dict[str, Any] = fine | {
        "accuracy": 0.99, "metric": "bleu", "model": "nosuch", "variant": "nosuch", "priority": 2, "context": "ann", "version": "1",
    }  # fmt: skip
    urls: dict[str, Any] = {"input": "file:///tmp/in.npy", "output": "file:///tmp/out.npy"}
    assert (table()["an offline job", need] == "limited") == (need in NEEDS)
    if need in NEEDS:
        assert policy.error("app", SubmitJob(**urls, **{need: fine[need]})) is None
    assert need in policy.error("app", SubmitJob(**urls, **{need: other.get(need, 1.0)})).message
