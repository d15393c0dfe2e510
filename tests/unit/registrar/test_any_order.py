"""Whatever order facts, silences, failures and repetitions come in: every registration ends once, and rightly."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import ExecutorExited
from bus.messages.work import BuildVariants, WorkProgress
from services.core.actor import Done, Failed, TimedOut, Undelivered
from services.core.settings import RegistrarSettings
from tests.support.data.examples import examples
from tests.support.simulated.registrations import (
    REQUEST,
    SUBJECTS,
    Stage,
    built,
    failed,
    finished,
    heartbeat,
    inspected,
)

WORKERS = ("w1", "w2")
IDS = ("r1", "r2", "r3")
STATES = ("accepted", "inspecting", "building", "profiling")


def plans_of(stage: Stage, registration: str) -> list[Any]:
    """All plans that were ever ordered for it."""
    orders = [order for worker in WORKERS for order in stage.orders(worker)]
    return [
        plan
        for order in orders
        if isinstance(order, BuildVariants) and order.registration == registration
        for plan in order.plans
    ]


def at_work(stage: Stage, registration: str, other: str | None) -> str:
    """The worker that has the order, unless another one is to speak."""
    job = stage.registrar._registrations.open.get(registration)
    return other or (job.worker if job else None) or "w1"


def result(stage: Stage, registration: str, worker: str, n: int, good: bool) -> None:
    plans = plans_of(stage, registration)
    if plans:
        plan = plans[n % len(plans)]
        stage.tell(built(plan, registration, worker) if good else failed(plan, registration, worker))


def command(stage: Stage, n: int, fate: str) -> None:
    """One of the commands under way succeeds, fails or takes too long."""
    if stage.commands:
        do = stage.commands.pop(n % len(stage.commands))
        match fate:
            case "done":
                stage.tell(Done(do.id, stage.carry_out(do.command)))
            case "failed":
                stage.tell(Failed(do.id, "disconnected"))
            case _:
                stage.tell(TimedOut(do.id))


def moves() -> st.SearchStrategy[Callable[[Stage], Any]]:
    """What may happen next, in any state; what is plausible comes more often."""
    ids, workers, numbers = st.sampled_from(("r1", "r1", "r2", "r3")), st.sampled_from(WORKERS), st.integers(0, 7)
    who = st.tuples(ids, st.sampled_from((None, None, None, *WORKERS)))
    fates = st.sampled_from(("done",) * 4 + ("failed", "late"))
    orders = st.sampled_from(
        (
            ("inspect", "bad", False),
            ("inspect", None, False),
            ("build", None, False),
            ("build", "bad", False),
            ("build", "bad", True),
        )
    )
    carry_out = st.tuples(numbers, fates).map(lambda a: lambda s: command(s, *a))
    results = st.tuples(who, numbers, st.booleans()).map(
        lambda a: lambda s: result(s, a[0][0], at_work(s, *a[0]), a[1], a[2])
    )
    return st.one_of(
        ids.map(lambda i: lambda s: s.tell(replace(REQUEST, registration=i), SUBJECTS.register(), f"_INBOX.{i}")),
        carry_out,
        carry_out,
        carry_out,
        workers.map(lambda w: lambda s: s.tell(heartbeat(w))),
        workers.map(lambda w: lambda s: s.tell(heartbeat(w))),
        who.map(lambda a: lambda s: s.tell(inspected(a[0], at_work(s, *a)))),
        who.map(lambda a: lambda s: s.tell(inspected(a[0], at_work(s, *a)))),
        results,
        results,
        results,
        st.tuples(orders, who).map(
            lambda a: lambda s: s.tell(finished(a[0][0], a[1][0], at_work(s, *a[1]), *a[0][1:]))
        ),
        who.map(
            lambda a: (
                lambda s: s.tell(WorkProgress(registration=a[0], worker=at_work(s, *a), step="profiling", progress=0.5))
            )
        ),
        workers.map(lambda w: lambda s: s.tell(ExecutorExited(worker=w, device="cpu", at=s.now, reason="killed"))),
        ids.map(lambda i: lambda s: s.tell(Undelivered(s.registrar._undelivered(i)))),
        st.sampled_from((1, 1, 1, 2, 20, 130)).map(lambda n: lambda s: jump(s, n)),
    )


def jump(stage: Stage, seconds: int) -> None:
    stage.now += seconds
    stage.ring()


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(moves(), min_size=20, max_size=150))
def test_every_registration_ends_exactly_once(happenings: list[Callable[[Stage], Any]]) -> None:
    stage = Stage(settings=RegistrarSettings(threads=(1,), max_batches=(8,)))
    stage.tell(heartbeat())
    stage.register()
    for happen in happenings:
        happen(stage)
    for _ in range(40):  # from here on nobody says anything any more, and commands succeed
        stage.perform()
        jump(stage, 130)
    stage.perform()
    registrar = stage.registrar
    assert registrar._registrations.open == {}
    assert registrar._records == {}
    assert registrar._claims == {}
    assert [key for key in stage.status if key.startswith("work.")] == []
    for registration in IDS:
        check_one(stage, registration)
    for key, value in stage.catalog.items():
        if key.startswith("variant."):
            variant = decode(VariantRecord, value)
            assert f"model.{variant.model}.{variant.version}" in stage.catalog
        elif key.startswith("app."):
            links = decode(AppRecord, value).links
            assert all(f"model.{model}.{version}" in stage.catalog for model, version in links.items())


def check_one(stage: Stage, registration: str) -> None:
    statuses = stage.statuses(registration)
    assert len(stage.ends(registration)) == (1 if statuses else 0)
    if not statuses:
        return
    *before, last = statuses
    order = [STATES.index(status.state) for status in before]
    assert order == sorted(order)
    progress = [status.progress for status in before]
    assert progress == sorted(progress)
    event(last.state + " " + str(last.reason)[:25])
    if last.state == "done":
        assert last.variants
        assert {f"variant.{variant}" for variant in last.variants} <= set(stage.catalog)
        assert f"model.mlp.{last.version}" in stage.catalog
    else:
        assert last.reason
    results = [*last.variants, *(failure.variant for failure in last.failures)]
    assert len(results) == len(set(results))
    assert [record.event.state for record in stage.records if record.event.registration == registration][
        -1
    ] == last.state


@settings(max_examples=examples(100), deadline=None)
@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 4))
def test_the_result_does_not_depend_on_the_order_of_variants(order: list[int], good: list[bool], repeat: int) -> None:
    stage = Stage(settings=RegistrarSettings(threads=(1,)))
    stage.tell(heartbeat())
    stage.register()
    stage.tell(inspected())
    plans = stage.orders()[-1].plans
    assert len(plans) == 4
    for n in [*order, *order[:repeat]]:
        stage.tell(built(plans[n]) if good[n] else failed(plans[n]))
    stage.settle(finished("build"))
    expected = {plan.variant for plan, fine in zip(plans, good, strict=True) if fine}
    assert set(stage.last().variants) == expected
    assert {failure.variant for failure in stage.last().failures} == {plan.variant for plan in plans} - expected
    assert stage.ends() == ["done" if expected else "failed"]
