"""A new executor process loads what the one before it has, and is the same executor from then on."""

from typing import Any

from bus.messages.fleet import (
    ExecutorReport,
    HeldInstances,
    InstanceLoaded,
    LoadInstance,
    MoveInstance,
    SucceedExecutor,
    UnloadInstance,
)
from bus.subjects import Subjects
from services.core.actor import After, Do, Done, Effect, Envelope, Publish, Started
from services.core.placement import Device
from services.core.settings import Settings
from services.executor.__main__ import ExecutorInsight
from services.executor.actor import Executor, make_executor
from services.executor.commands import LoadedModel, LoadModel, MovedModel
from services.executor.instances import ReportDue
from services.executor.loading import fits_twice
from tests.support.simulated.fleet import variant

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)
NOW = 1000.0
DONE = LoadedModel(load_ms=1.0, memory_mb=1.0, proof="")


def tell(actor: Executor, message: Any, reply: str = "") -> list[Effect]:
    return list(actor.handle(Envelope(NOW, message, "", reply)))


def executor(incarnation: int, held: HeldInstances | None = None) -> Executor:
    return make_executor(Settings(), Subjects(), "w", CPU, incarnation, held)


def held_by(actor: Executor) -> HeldInstances:
    [reply] = tell(actor, SucceedExecutor(), "_INBOX.new")
    assert reply.subject == "_INBOX.new"
    held: HeldInstances = reply.message
    return held


def said(effects: list[Effect], kind: type) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Publish) and isinstance(effect.message, kind)]


def loads(effects: list[Effect]) -> dict[str, LoadModel]:
    return {
        effect.command.instance: effect.command
        for effect in effects
        if isinstance(effect, Do) and isinstance(effect.command, LoadModel)
    }


def before() -> Executor:
    """An executor with an instance on cores to which it was moved, a warm one, one that it still loads, and one that goes."""
    actor = executor(1)
    for instance in ("served", "going"):
        tell(actor, LoadInstance(instance=instance, variant=variant(), price_per_s=1e-5, cores=[0]))
        tell(actor, Done(("load", instance), DONE))
    [move] = [effect for effect in tell(actor, MoveInstance(instance="served", cores=[1])) if isinstance(effect, Do)]
    tell(actor, Done(move.id, MovedModel("")))
    tell(actor, LoadInstance(instance="warm", variant=variant(), tier="host"))
    tell(actor, LoadInstance(instance="loading", variant=variant()))
    tell(actor, UnloadInstance(instance="going"))
    return actor


def test_it_tells_its_successor_what_it_has_and_will_have() -> None:
    held = held_by(before())
    assert held.incarnation == 1
    assert {(one.instance, one.tier, tuple(one.cores), one.price_per_s) for one in held.instances} == {
        ("served", "device", (1,), 1e-5),
        ("warm", "host", (), 0.0),
        ("loading", "device", (), 0.0),
    }
    assert tell(before(), SucceedExecutor()) == [], "nobody waits for a reply"


def test_a_successor_loads_all_of_it_and_says_nothing_of_itself_before() -> None:
    actor = executor(2, held_by(before()))
    effects = tell(actor, Started())
    assert {name: (one.cores, one.tier) for name, one in loads(effects).items()} == {
        "served": ((1,), "device"),
        "warm": ((), "host"),
        "loading": ((), "device"),
    }
    for instance in ("served", "loading"):
        assert "models that it loads" in ExecutorInsight().missing(actor, NOW)
        assert said(tell(actor, ReportDue()), ExecutorReport) == [], "its monitor would take the others for lost"
        [loaded] = said(tell(actor, Done(("load", instance), DONE)), InstanceLoaded)
        assert loaded.incarnation == 1
    again = [effect for effect in tell(actor, ReportDue()) if isinstance(effect, After)]
    assert again[0].delay > 0
    tell(actor, Done(("load", "warm"), LoadedModel(load_ms=1.0, memory_mb=1.0, proof="", tier="host")))
    assert ExecutorInsight().missing(actor, NOW) == ""
    [report] = said(tell(actor, ReportDue()), ExecutorReport)
    assert report.incarnation == 1
    assert {sample.instance for sample in report.samples} == {"served", "warm", "loading"}


def test_a_model_that_does_not_load_again_holds_nothing_up() -> None:
    actor = executor(2, held_by(before()))
    tell(actor, Started())
    tell(actor, UnloadInstance(instance="loading"))
    for instance in ("served", "warm"):
        tell(
            actor,
            Done(
                ("load", instance),
                LoadedModel(load_ms=1.0, memory_mb=1.0, proof="", tier="host" if instance == "warm" else "device"),
            ),
        )
    tell(actor, Done(("load", "loading"), DONE))
    assert ExecutorInsight().missing(actor, NOW) == ""


def test_a_process_that_succeeds_none_reports_at_once() -> None:
    actor = executor(7)
    tell(actor, Started())
    [report] = said(tell(actor, ReportDue()), ExecutorReport)
    assert report.incarnation == 7


def test_two_copies_must_fit_into_the_device() -> None:
    held = held_by(before())
    needed = sum(one.variant.profile.memory_mb for one in held.instances)
    assert fits_twice(held, Device(name="gpu-0", kind="gpu", cores=1, memory_mb=2 * needed))
    assert not fits_twice(held, Device(name="gpu-0", kind="gpu", cores=1, memory_mb=2 * needed - 1))


def test_both_share_the_queries_of_their_device() -> None:
    [inlet] = [inlet for inlet in executor(1).inlets if inlet.subject == Subjects().execute("w", "cpu")]
    assert inlet.queue
