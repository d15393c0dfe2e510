"""The workshop's queue: one order at a time, none twice, none silently lost."""

from bus.messages.catalog import Signature
from bus.messages.work import BuildVariants, CancelWork, InspectModel, WorkFinished, WorkProgress
from bus.subjects import Subjects
from services.core.actor import After, Cancel, Do, Done, Envelope, Failed, Publish, Stopping, TimedOut
from services.core.settings import RegistrarSettings
from services.executor.workshop.actor import RemindDue, StopOrder, WorkshopActor

SUBJECTS = Subjects("t")


def actor() -> WorkshopActor:
    return WorkshopActor("w1", SUBJECTS, RegistrarSettings(seconds=600.0))


def inspect(registration: str) -> InspectModel:
    return InspectModel(
        registration=registration, format="onnx", object="m", validation="v", inputs_key="x", labels_key="y",
        metric="top1",
    )  # fmt: skip


def build(registration: str) -> BuildVariants:
    return BuildVariants(
        registration=registration, model="m", version="1", format="onnx", source="s", validation="v",
        inputs_key="x", labels_key="y", metric="top1", signature=Signature(inputs=[], outputs=[]), plans=[],
    )  # fmt: skip


def tell(subject, message) -> list:
    return list(subject.handle(Envelope(0.0, message)))


def works(effects) -> list[Do]:
    return [one for one in effects if isinstance(one, Do)]


def said(effects, kind) -> list:
    return [one.message for one in effects if isinstance(one, Publish) and isinstance(one.message, kind)]


def test_it_listens_to_the_orders_of_its_worker_only():
    orders = ("inspect", "build", "cancel")
    assert {inlet.subject for inlet in actor().inlets} == {f"t.workshop.w1.{order}" for order in orders}


def test_one_order_at_a_time_in_the_order_they_came():
    workshop = actor()
    first = works(tell(workshop, inspect("a")))
    assert [do.command.registration for do in first] == ["a"]
    assert not works(tell(workshop, build("b")))
    assert not works(tell(workshop, inspect("c")))
    second = works(tell(workshop, Done(first[0].id, None)))
    assert [(do.command.registration, do.command.kind) for do in second] == [("b", "build")]
    third = works(tell(workshop, Done(second[0].id, None)))
    assert [do.command.registration for do in third] == ["c"]
    assert not tell(workshop, Done(third[0].id, None))


def test_an_order_that_is_repeated_is_done_once():
    workshop = actor()
    do = works(tell(workshop, inspect("a")))[0]
    assert not tell(workshop, inspect("a"))
    tell(workshop, build("b"))
    assert not works(tell(workshop, build("b")))
    after = works(tell(workshop, Done(do.id, None)))
    assert len(after) == 1
    assert not works(tell(workshop, Done(after[0].id, None)))
    assert works(tell(workshop, inspect("a")))  # a later one is a new order


def test_those_who_wait_say_so_until_their_turn():
    workshop = actor()
    do = works(tell(workshop, inspect("a")))[0]
    effects = tell(workshop, inspect("b"))
    assert [one.registration for one in said(effects, WorkProgress)] == ["b"]
    assert any(isinstance(one, After) for one in effects)
    assert [one.registration for one in said(tell(workshop, RemindDue()), WorkProgress)] == ["b"]
    tell(workshop, Done(do.id, None))
    assert [type(one) for one in tell(workshop, RemindDue())] == [Cancel]


def test_a_helper_that_fails_is_reported_and_the_next_order_starts():
    workshop = actor()
    for failure, word in ((Failed(1, "it crashed"), "crashed"), (TimedOut(2), "longer")):
        do = works(tell(workshop, inspect("a")))[0]
        tell(workshop, inspect("b"))
        assert do.id == failure.id
        effects = tell(workshop, failure)
        (finished,) = said(effects, WorkFinished)
        assert (finished.registration, finished.order, finished.worker) == ("a", "inspect", "w1")
        assert word in finished.reason
        (following,) = works(effects)
        assert following.command.registration == "b"
        if failure.id == 1:
            assert not tell(workshop, Failed(1, "late news of an order that is over"))
            workshop = actor()
            tell(workshop, Done(works(tell(workshop, inspect("x")))[0].id, None))


def test_a_stopping_worker_gives_its_orders_back():
    workshop = actor()
    tell(workshop, inspect("a"))
    tell(workshop, build("b"))
    finished = said(tell(workshop, Stopping(5.0)), WorkFinished)
    assert [(one.registration, one.order) for one in finished] == [("a", "inspect"), ("b", "build")]
    assert all("stopping" in one.reason for one in finished)


def test_a_cancelled_order_is_stopped_or_never_begun():
    workshop = actor()
    first = works(tell(workshop, inspect("a")))[0]
    tell(workshop, build("b"))
    tell(workshop, inspect("c"))
    assert not works(tell(workshop, CancelWork(registration="b")))
    (stop,) = works(tell(workshop, CancelWork(registration="a")))
    assert stop.command == StopOrder("a")
    assert not tell(workshop, Done(stop.id, None))
    assert [do.command.registration for do in works(tell(workshop, Done(first.id, None)))] == ["c"]
