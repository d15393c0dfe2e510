"""Pipelines' queries under faults, large bodies, retries, and graphs at random. Virtual time."""

import operator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, EdgeCondition, Ensemble, PipelineRecord, PipelineVertex
from bus.messages.flow import Execute
from bus.messages.public import Tensor
from services.core.actor import Changed
from services.core.pipelines.branching import draw
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.pipelines import SMALL_BODY
from tests.support.data.examples import examples
from tests.support.simulated.fleet import SIGNATURE, catalogue, refused, variant
from tests.unit.dispatcher.test_pipelines import (
    CASCADE,
    DIAMOND,
    UNSURE,
    Staged,
    edge,
    holders,
    nested,
    numbers,
    planned,
    vertex,
)


def sent_of(fleet: Staged) -> list[Execute]:
    """What executors were sent."""
    return fleet.sent(Execute, ".execute.")


# -- what is carried


def test_a_large_body_goes_with_the_first_stages_only_and_is_enough_to_start_again() -> None:
    fleet = Staged(CASCADE, dispatchers=2)
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    fleet.behave(says={"cheap": 1.0, "dear": 2.0}, late={"dear": 400.0})
    fleet.change("p", latency_ms=20_000.0)
    label = fleet.ask("p", padding=b"." * (SMALL_BODY + 1), seconds=0.1)
    cheap, dear = sent_of(fleet)
    assert len(cheap.route.origin.body or b"") > SMALL_BODY
    assert dear.route.origin is None
    fleet.stage.kill(*holders(fleet))
    assert numbers(fleet.one(label, 15.0)) == (2.0, 2.0)


def test_a_large_body_goes_with_the_first_stages_of_a_pipeline_within_only() -> None:
    outer = PipelineRecord(
        vertices=[vertex("first"), PipelineVertex(name="rest", app="inner", inputs={"x": "$.x"})],
        output={"y": "rest.y", "z": "first.y"},
    )
    inner = PipelineRecord(
        vertices=[vertex("deep"), PipelineVertex(name="again", app="deep", inputs={"x": "deep.y"})],
        edges=[edge("deep", "again")],
        output={"y": "again.y"},
    )
    fleet = nested(outer, inner)
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    assert numbers(fleet.one(fleet.ask("p", padding=b"." * (SMALL_BODY + 1)))) == (9.0, 9.0)
    carried = {one.route.stage: one.route.origin is not None for one in sent_of(fleet)}
    assert carried == {"first": True, "deep": True, "again": False}


def test_small_bodies_go_with_each_stage_and_large_ones_by_reference() -> None:
    fleet = Staged(CASCADE)
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    fleet.devices["w0"].says = {"cheap": 1.0}
    fleet.one(fleet.ask("p"))
    assert all(one.route.origin is not None and one.route.origin.body for one in sent_of(fleet))
    fleet = joined()
    assert numbers(fleet.one(fleet.ask("p"))) == (3.0, 3.0)
    last = sent_of(fleet)[-1]
    assert {ref.name for ref in last.route.refs or ()} == {"x", "z"}
    assert len(last.body) < 50
    assert max(len(encode(sent)) for sent in sent_of(fleet)) < 2 * LITTLE


JOINED = PipelineRecord(
    vertices=[vertex("a"), vertex("b"), PipelineVertex(name="c", app="c", inputs={"x": "a.y", "z": "b.y"})],
    edges=[edge("a", "c"), edge("b", "c")],
    output={"y": "c.y"},
)
LITTLE = 400  # bytes, of which a message may hold no more in these tests


def small_messages(record: PipelineRecord, **options: Any) -> Staged:
    fleet = Staged(record, settings=Settings(dispatcher=DispatcherSettings(max_inline=LITTLE)), **options)
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    return fleet


def joined() -> Staged:
    """The answers of a and b are the inputs of c; each fits into a message, and both together do not."""
    fleet = small_messages(JOINED)
    wide = [replace(SIGNATURE.inputs[0], name=name, shape=[-1]) for name in ("x", "z")]
    fleet.change("c", signature=replace(SIGNATURE, inputs=wide))
    fleet.behave(wide={"a": 60, "b": 60, "c": 2}, says={"c": 3.0})
    return fleet


def test_what_cannot_be_stored_decided_or_divided_ends_the_query() -> None:
    fleet = joined()
    fleet.contexts.lost = "the disk is full"
    refused(fleet.one(fleet.ask("p")), "internal", "vertex c", "the disk is full")
    fleet = small_messages(CASCADE)
    fleet.devices["w0"].wide["cheap"] = 20_000
    refused(fleet.one(fleet.ask("p")), "model_error", "y is too large to decide by")
    fleet = nested()
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=CASCADE))
    refused(fleet.one(fleet.ask("p", items=2)), "bad_request")
    assert not fleet.stages(), "before any stage is asked"


def test_a_nested_pipelines_small_outputs_decide_although_its_answer_is_large() -> None:
    """Its answer goes by reference, and the condition behind it is decided all the same."""
    fleet = small_messages(
        PipelineRecord(
            vertices=[PipelineVertex(name="first", app="inner", inputs={"x": "$.x"}), vertex("dear", "first.y")],
            edges=[edge("first", "dear", when=UNSURE)],
            output={"y": "dear.y | first.y"},
        )
    )
    for name in ("deep", "broad"):
        fleet.add(*catalogue(variant(f"{name}-v1-ort-fp32-t1-b8", model=name), app=name))
    inner = PipelineRecord(vertices=[vertex("deep"), vertex("broad")], output={"y": "deep.y", "all": "broad.y"})
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=inner))
    fleet.change("p", latency_ms=None)
    fleet.devices["w0"].wide |= {"deep": 2, "broad": 200}
    fleet.devices["w0"].says = {"deep": 1.0, "dear": 5.0}
    assert numbers(fleet.one(fleet.ask("p"))) == (5.0, 5.0)


# -- who answers


def test_a_query_on_both_dispatchers_at_once_is_computed_once() -> None:
    """Its client has asked again. Both answer, alike; each vertex is computed once, and each row has one uid."""
    fleet = Staged(CASCADE, dispatchers=2, says={"cheap": 1.0, "dear": 2.0}, slow=5.0)
    fleet.change("p", latency_ms=20_000.0)
    fleet.asks(2, "p", id="q", retry_key=b"k" * 16, seconds=0.001)
    assert holders(fleet) == ["d0", "d1"]
    fleet.stage.run(10.0)
    replies = fleet.replies("q")
    assert {numbers(reply) for reply in replies} == {(2.0, 2.0)}
    assert 1 <= len(replies) <= 2
    assert len({reply["query"] for reply in replies}) == 1
    assert len(fleet.devices["w0"].batches) == 2
    assert len({one.uid for one in fleet.outcomes()}) == 3


@pytest.mark.parametrize("dispatchers", [2, 3])
@pytest.mark.parametrize("after", [0.002, 0.02, 0.2])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_dispatcher_leaves_in_the_middle_of_nested_stages(dispatchers: int, after: float, how: str) -> None:
    fleet = nested(dispatchers=dispatchers)
    fleet.devices["w0"].slow = 10.0
    labels = fleet.asks(6, "p", seconds=after)
    getattr(fleet.stage, how)("d0")
    assert {numbers(reply) for reply in fleet.each(labels, 20.0)} == {(9.0, 9.0)}
    outcomes = {one.uid: one for one in fleet.outcomes()}
    assert len(outcomes) == 4 * len(labels)
    assert len([one for one in outcomes.values() if one.parent is None]) == len(labels)


def test_a_query_whose_pipeline_is_deleted_before_it_is_taken_over_is_refused() -> None:
    fleet = Staged(CASCADE, dispatchers=2)
    fleet.change("p", latency_ms=20_000.0)
    fleet.devices["w0"].slow = 20.0
    label = fleet.ask("p", seconds=0.01)
    fleet.stage.kill(*holders(fleet))
    for name in fleet.stage.members.keys() & {"d0", "d1"}:
        fleet.stage.send(name, Changed("infaas-catalog", "app.p", None))
    assert (fleet.one(label, 15.0)["error"]["code"], fleet.query().code) == ("unknown_app", "unknown_app")


def test_a_dispatcher_leaves_while_a_stage_waits_and_executors_know_its_query() -> None:
    """Executors hand the query on, and it does not: else two of three dispatchers answer it."""
    fleet = Staged(CASCADE, dispatchers=3)
    plan = planned(batch=1)
    plan.vertices["dear"] = replace(plan.vertices.pop("a"), variant="dear-v1-ort-fp32-t1-b8")
    fleet.change("p", plan=plan, latency_ms=20_000.0)
    fleet.behave(says={"cheap": 1.0, "dear": 2.0}, late={"dear": 50.0})
    labels = fleet.asks(12, "p", seconds=0.1)
    assert fleet.dispatcher("d1").in_flight.waiting
    fleet.stage.stop("d1")
    assert {numbers(reply) for reply in fleet.each(labels, 20.0)} == {(2.0, 2.0)}


def test_late_stages_give_the_default_in_time_or_are_waited_for() -> None:
    fleet = Staged(CASCADE)
    fleet.change("p", default_output=[8.0])
    fleet.behave(says={"cheap": 1.0}, late={"dear": 500.0})
    seconds, reply = fleet.timed(fleet.ask("p"))
    assert (reply["default"], numbers(reply)) == (True, (8.0,))
    assert seconds <= 0.2 + 1e-3, "within its objective"
    assert fleet.query().outcome == "default"
    fleet = Staged(CASCADE)
    fleet.change("p", latency_ms=None)
    fleet.behave(says={"cheap": 1.0, "dear": 2.0}, slow=2000.0)
    reply = fleet.one(fleet.ask("p"), 40.0)
    assert (numbers(reply), reply["missed"]) == ((2.0, 2.0), [])
    assert {part.slo_ms for part in fleet.stages().values()} == {None}


def test_a_stage_that_is_refused_while_others_run_ends_the_query_at_once() -> None:
    fleet = Staged(DIAMOND)
    fleet.change("b", links={})
    fleet.devices["w0"].late = {"c": 1000.0}
    seconds, reply = fleet.timed(fleet.ask("p"))
    assert "vertex b" in reply["error"]["message"]
    assert seconds < 0.05


def test_kept_answers_of_all_stages_make_one_answer() -> None:
    """Each stage has its answer at once, within the call that asks it. What no message holds is put together once."""
    record = PipelineRecord(vertices=[vertex("a"), vertex("b")], output={"first": "a.y", "second": "b.y"})
    fleet = small_messages(record)
    fleet.devices["w0"].wide = {"a": 60, "b": 60}
    for name in ("a", "b"):
        fleet.change(name, selection=Ensemble(cache_mb=1.0))
    first, second = (fleet.one(fleet.ask("p")) for _ in range(2))
    assert (first["cached"], second["cached"], second["cost"]) == (False, True, 0)
    assert fleet.contexts.gathered == [first["query"], second["query"]]


def test_a_large_answer_goes_to_both_dispatchers_that_wait_for_it() -> None:
    """The first one dies while the answer is on its way to the object store."""
    record = replace(CASCADE, vertices=[vertex("cheap"), vertex("dear")], output={"y": "dear.y | $.x"})
    fleet = small_messages(record, dispatchers=2)
    fleet.devices["w0"].wide["cheap"] = 200
    fleet.behave(says={"cheap": 1.0, "dear": 2.0}, late={"cheap": 20.0})
    fleet.change("p", latency_ms=20_000.0)
    fleet.asks(2, "p", id="q", retry_key=b"k" * 16, seconds=0.01)
    fleet.stage.kill("d0")
    assert numbers(fleet.reply("q", 1.0)) == (2.0, 2.0)
    assert len(fleet.devices["w0"].batches) == 2


# -- graphs at random


@st.composite
def graphs(draw_: Any) -> tuple[PipelineRecord, dict[str, float]]:
    """A DAG whose vertices read what came before them, with conditions, chances and plain edges; what each vertex says."""
    names = [f"v{i}" for i in range(draw_(st.integers(1, 5)))]
    edges = []
    for i, target in enumerate(names):
        for source in names[:i]:
            kind = draw_(st.sampled_from(["none", "none", "plain", "when", "chance"]))
            if kind == "none":
                continue
            op, value = draw_(st.sampled_from(["<", ">", "==", "!="])), draw_(st.sampled_from([0.0, 0.5, 1.0]))
            when = EdgeCondition(output="y", op=op, value=value) if kind == "when" else None
            probability = 0.5 if kind == "chance" else None
            edges.append(edge(source, target, when=when, probability=probability))
    vertices = [
        vertex(name, " | ".join([*(f"{into.source}.y" for into in edges if into.target == name), "$.x"]))
        for name in names
    ]
    output = {"y": " | ".join([*(f"{name}.y" for name in reversed(names)), "$.x"])}
    says = {name: draw_(st.sampled_from([0.0, 0.5, 1.0, 2.0])) for name in names}
    return PipelineRecord(vertices=vertices, edges=edges, output=output), says


COMPARED = {"<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne}


def visits(record: PipelineRecord, says: dict[str, float], uid: bytes) -> list[str]:
    """Which vertices the graph and its conditions say, by another algorithm: edges from visited vertices, in the order of the names."""
    found: list[str] = []
    for one in record.vertices:
        into = [each for each in record.edges if each.target == one.name]
        follows = []
        for each in into:
            if each.source not in found:
                continue
            if each.when is not None:
                follows.append(COMPARED[each.when.op](says[each.source], each.when.value))
            elif each.probability is not None:
                follows.append(draw(uid, f"{each.source}>{each.target}") < each.probability)
            else:
                follows.append(True)
        if not into or any(follows):
            found.append(one.name)
    return found


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.sampled_from(["", "", "w0/cpu", "d0"]), st.floats(0.0, 0.03), st.integers(0, 5), st.integers(1, 4))
def test_any_graph_gives_one_reply_and_visits_what_its_conditions_say(
    graph: tuple[PipelineRecord, dict[str, float]], victim: str, at: float, provided: int, batch: int
) -> None:
    """provided: how many of its vertices a plan provides for."""
    record, says = graph
    fleet = Staged(record, dispatchers=2, workers=2)
    plan = planned(batch=batch)
    stage = plan.vertices.pop("a")
    for one in record.vertices[:provided]:
        plan.vertices[one.name] = replace(stage, variant=f"{one.app}-v1-ort-fp32-t1-b8")
    fleet.change("p", latency_ms=20_000.0, plan=plan if plan.vertices else None)
    for device in fleet.devices.values():
        device.says, device.slow = says, 3.0
    labels = fleet.asks(3, "p", seconds=at)
    if victim:
        fleet.stage.kill(victim)
    fleet.stage.run(15.0)
    outcomes = {one.uid: one for one in fleet.outcomes()}
    for label in labels:
        replies = fleet.replies(label)
        if not replies:
            assert victim == "d0"
            assert at < 0.001, "it died unread in its mailbox"
            continue
        [reply] = replies
        uid = bytes.fromhex(reply["query"])
        wanted = visits(record, says, uid)
        assert sorted(member.partition("@")[0] for member in reply["members"]) == sorted(wanted)
        parts = [one for one in outcomes.values() if one.parent == uid]
        assert sorted(one.stage for one in parts) == sorted(wanted)
        last = wanted[-1] if wanted else None
        assert numbers(reply) == ((says[last],) * 2 if last else (0.0, 0.0))
        assert outcomes[uid].cost == pytest.approx(reply["cost"])
        if not victim:
            assert reply["cost"] == pytest.approx(sum(one.cost for one in parts))


def test_tensors_of_the_query_are_passed_on_as_they_came() -> None:
    fleet = Staged(CASCADE)
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    given_ = Tensor("FP32", [1, 2], b"\1\2\3\4\5\6\7\10")
    body = encode({"inputs": {"x": given_}, "id": "named"})
    fleet.stage.publish(fleet.subjects.query("p"), body, "_INBOX.test.named")
    fleet.one("named")
    assert bytes(given_.data) in bytes(sent_of(fleet)[0].body)
