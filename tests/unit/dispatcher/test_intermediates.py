"""Results that stages hand on by way of the object store go when the query ends, and have a bound. Virtual time."""

from typing import Any

import pytest

from bus.messages.catalog import AppRecord, PipelineRecord, PipelineVertex, Signature, TensorSpec
from bus.messages.public import ObjectRef
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.join import LINGER, Intermediates
from tests.support.simulated.fleet import SIGNATURE
from tests.unit.dispatcher.test_pipelines import CHAIN, ONE, Staged, edge, numbers

WIDE = Signature(inputs=[TensorSpec(name="x", datatype="FP32", shape=[-1])], outputs=SIGNATURE.outputs)
LITTLE = 700  # bytes, of which a message may hold no more in these tests


def chain(wide: tuple[int, int] = (200, 2), most: int = 10**6, **options: Any) -> Staged:
    """A pipeline whose first stage gives 800 bytes, more than a message holds. Its second stage's inputs are stored, too."""
    settings = Settings(dispatcher=DispatcherSettings(max_inline=LITTLE, max_stored=most))
    fleet = Staged(CHAIN, settings=settings, **options)
    fleet.change("b", signature=WIDE)
    for device in fleet.devices.values():
        device.wide = dict(zip("ab", wide, strict=True))
        device.says = {"b": 3.0}
    return fleet


def test_they_go_when_the_query_has_ended() -> None:
    fleet = chain()
    label = fleet.ask("p")
    fleet.stage.run(LINGER - 1.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    assert len(fleet.contexts.objects) == 2, "another dispatcher may still have to go on with it"
    fleet.stage.run(3.0)
    assert fleet.contexts.objects == {}


def test_what_the_client_fetches_stays() -> None:
    fleet = chain(wide=(200, 200))
    reply = fleet.one(fleet.ask("p"), 10.0)
    assert set(fleet.contexts.objects) == {reply["outputs_ref"]["key"]} == {reply["query"]}
    assert reply["outputs_ref"]["bytes"] > 800


@pytest.mark.parametrize("needs", [{}, {"accuracy": 0.8}])
def test_they_go_when_a_later_stage_refuses(needs: dict[str, Any]) -> None:
    fleet = chain(changes={"b": {"accuracy": 0.5}})
    if not needs:
        fleet.change("b", links={})
    reply = fleet.one(fleet.ask("p", **needs), 10.0)
    assert "vertex b" in reply["error"]["message"]
    assert fleet.contexts.objects == {}


def test_they_go_when_the_time_is_up_and_the_result_comes_late() -> None:
    fleet = chain()
    fleet.devices["w0"].late = {"a": 60.0}
    reply = fleet.one(fleet.ask("p", latency_ms=100.0), 0.3)
    assert "error" in reply
    fleet.stage.run(0.3)
    stored = len(fleet.contexts.objects)
    fleet.stage.run(2 * LINGER)
    assert (stored, fleet.contexts.objects) == (1, {})


def test_those_of_a_pipeline_within_another_stay_until_the_outer_query_ends() -> None:
    fleet = chain()
    outer = PipelineRecord(
        vertices=[
            PipelineVertex(name="first", app="inner", inputs={"x": "$.x"}),
            PipelineVertex(name="slow", app="b", inputs={"x": "first.y"}),
            PipelineVertex(name="last", app="b", inputs={"x": "first.y"}),
        ],
        edges=[edge("first", "slow"), edge("slow", "last")],
        output={"y": "last.y | slow.y"},
    )
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=ONE, latency_ms=60_000.0))
    fleet.change("p", pipeline=outer, latency_ms=60_000.0)
    fleet.devices["w0"].late = {"b": 3000.0}  # longer than results of ended queries stay
    label = fleet.ask("p")
    fleet.stage.run(2.0)
    assert len(fleet.contexts.objects) == 3, "what `a` gave, the inner pipeline's own answer, inputs of `slow`"
    fleet.stage.run(60.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    assert fleet.contexts.objects == {}


def test_a_query_that_is_taken_over_goes_on_with_them_and_they_go_afterwards() -> None:
    fleet = chain(dispatchers=2)
    fleet.change("p", latency_ms=20_000.0)
    fleet.devices["w0"].late = {"b": 200.0}
    label = fleet.ask("p")
    fleet.stage.run(0.1)
    assert len(fleet.contexts.objects) == 2
    fleet.stage.kill("d0")
    fleet.stage.run(10.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    fleet.stage.run(2 * LINGER)
    assert fleet.contexts.objects == {}


def test_a_query_that_exceeds_the_bound_is_refused_with_its_setting() -> None:
    fleet = chain(most=4000)
    fleet.change("p", latency_ms=20_000.0)
    fleet.devices["w0"].late = {"b": 200.0}
    labels = [fleet.ask("p") for _ in range(2)]
    fleet.stage.run(0.1)
    labels += [fleet.ask("p") for _ in range(2)]
    fleet.stage.run(15.0)
    replies = [reply for label in labels for reply in fleet.replies(label)]
    errors = [reply["error"] for reply in replies if "error" in reply]
    assert len(replies) == 4
    assert {error["code"] for error in errors} == {"overloaded"}
    assert errors[0]["message"].startswith("vertex a: results on their way between stages take 0.00")
    assert "at most 0.004 MB are kept (the setting dispatcher.max_stored)" in errors[0]["message"]
    assert errors[0]["retry_after_ms"] == 1000.0 * LINGER
    assert len(errors) == 2, "those of two queries fit"
    fleet.stage.run(LINGER)
    assert numbers(fleet.one(fleet.ask("p"))) == (3.0, 3.0), "there is room again"


def test_a_result_that_is_stored_again_is_not_deleted_for_the_query_before() -> None:
    held = Intermediates(1000)
    held.hold(b"q", ObjectRef("b", "k", 600))
    held.hold(b"q", ObjectRef("b", "k", 700))  # another worker computed it, too
    assert held.bytes == 700
    held.ended(b"q", 0.0)
    held.hold(b"q", ObjectRef("b", "k", 500))  # asked again with its retry_key
    assert (held.bytes, list(held.due(LINGER))) == (500, [])
    held.ended(b"q", LINGER)
    [effect] = held.due(2 * LINGER)
    assert (effect.command.keys, held.bytes) == (("k",), 0)  # type: ignore[union-attr]
