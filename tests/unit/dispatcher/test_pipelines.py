"""A pipeline's query visits its vertices and ends once, whatever is slow or dies. Virtual time."""

import struct
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import (
    AppRecord,
    EdgeCondition,
    Ensemble,
    PipelineEdge,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    Signature,
    TensorSpec,
)
from bus.messages.public import ObjectRef
from bus.messages.scaling import PipelineArrivals
from services.core.actor import Changed
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.join import LINGER, Intermediates, part_uid
from tests.support.simulated.fleet import SIGNATURE, Fleet, catalogue, refused, variant
from tests.unit.dispatcher.test_join import holders

SLO_MS = 200.0
SURE = EdgeCondition(output="y", op="<", value=0.5)
UNSURE = EdgeCondition(output="y", op=">", value=0.5)


def vertex(name: str, x: str = "$.x", **needs: Any) -> PipelineVertex:
    return PipelineVertex(name=name, app=name, inputs={"x": x}, **needs)


def alone(name: str, app: str = "", x: str = "$.x") -> PipelineRecord:
    """A pipeline of one vertex, whose output is the pipeline's."""
    return PipelineRecord(
        vertices=[PipelineVertex(name=name, app=app or name, inputs={"x": x})], output={"y": f"{name}.y"}
    )


def edge(source: str, target: str, **more: Any) -> PipelineEdge:
    return PipelineEdge(source=source, target=target, **more)


CHAIN = PipelineRecord(vertices=[vertex("a"), vertex("b", "a.y")], edges=[edge("a", "b")], output={"y": "b.y"})


CASCADE = PipelineRecord(
    vertices=[vertex("cheap"), vertex("dear", "cheap.y")],
    edges=[edge("cheap", "dear", when=UNSURE, probability=0.3)],
    output={"y": "dear.y | cheap.y"},
)
DIAMOND = PipelineRecord(
    vertices=[vertex("a"), vertex("b", "a.y"), vertex("c", "a.y"), vertex("d", "b.y")],
    edges=[edge("a", "b"), edge("a", "c"), edge("b", "d"), edge("c", "d")],
    output={"first": "d.y", "second": "c.y", "asked": "$.x"},
)
FORK = PipelineRecord(
    vertices=[vertex("a"), vertex("b", "a.y"), vertex("c", "a.y")],
    edges=[edge("a", "b", when=SURE), edge("a", "c", when=UNSURE)],
    output={"y": "b.y | c.y"},
)


class Staged(Fleet):
    """A fleet with an app, of one model, for each vertex, and the pipeline `p`. load: each model is loaded on each worker."""

    def __init__(
        self,
        record: PipelineRecord,
        *,
        changes: dict[str, dict[str, Any]] | None = None,
        load: bool = True,
        **options: Any,
    ) -> None:
        names = [one.app for one in record.vertices if one.app != "inner"]
        made = {
            name: variant(f"{name}-v1-ort-fp32-t1-b8", model=name, **(changes or {}).get(name, {})) for name in names
        }
        first, *others = dict.fromkeys(names)
        super().__init__(made[first], **options)
        self.change(links={first: "1"})
        for name in others:
            self.add(*catalogue(made[name], app=name))
        self.add(AppRecord(app=first, links={first: "1"}, signature=SIGNATURE))
        self.add(AppRecord(app="p", links={}, signature=SIGNATURE, pipeline=record, latency_ms=SLO_MS))
        for worker, device in self.devices.items():
            device.wide = dict.fromkeys(names, 2)
            for name in names if load else ():
                self.order(made[name], worker, app=name)
        self.stage.run(2.0)

    def one(self, label: str, seconds: float = 5.0) -> dict[str, Any]:
        return self.reply(label, seconds)

    def stages(self) -> dict[str, Any]:
        """Outcomes of parts, by stage."""
        return {one.stage: one for one in self.outcomes() if one.parent is not None}

    def query(self) -> Any:
        [one] = [one for one in self.outcomes() if one.parent is None]
        return one


def numbers(reply: dict[str, Any], output: str = "y") -> tuple[float, ...]:
    data: bytes = reply["outputs"][output]["data"]
    return struct.unpack(f"<{len(data) // 4}f", data)


@pytest.mark.parametrize("unsure", [False, True])
def test_a_condition_on_an_answer_decides_whether_the_next_vertex_is_asked(unsure: bool) -> None:
    fleet = Staged(CASCADE, says={"cheap": float(unsure), "dear": 7.0})
    reply = fleet.one(fleet.ask("p"))
    assert numbers(reply) == ((7.0, 7.0) if unsure else (0.0, 0.0))
    assert reply["members"] == (["cheap@1", "dear@1"] if unsure else ["cheap@1"])
    assert set(fleet.stages()) == ({"cheap", "dear"} if unsure else {"cheap"})
    query, parts = fleet.query(), fleet.stages().values()
    assert (query.app, query.outcome, query.stage) == ("p", "ok", None)
    assert query.cost == pytest.approx(sum(part.cost for part in parts)) == pytest.approx(reply["cost"])
    assert {part.parent for part in parts} == {query.uid} == {bytes.fromhex(reply["query"])}
    assert fleet.stages()["cheap"].uid == part_uid(query.uid, 0)


def test_a_join_waits_for_all_its_edges_and_outputs_come_from_where_the_pipeline_says() -> None:
    fleet = Staged(DIAMOND, says={"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, late={"c": 5.0})
    reply = fleet.one(fleet.ask("p"))
    assert (numbers(reply, "first"), numbers(reply, "second"), numbers(reply, "asked")) == ((4, 4), (3, 3), (0, 0))
    stages = fleet.stages()
    ended = {name: one.time + one.latency_ms / 1000 for name, one in stages.items()}
    assert stages["d"].time >= max(ended["b"], ended["c"]) - 1e-6, "it begins when both are there"
    assert stages["b"].time == pytest.approx(stages["c"].time), "side by side"


def test_each_stage_leaves_time_for_those_behind_it() -> None:
    fleet = Staged(DIAMOND, changes={"d": {"base_ms": 60.0}, "c": {"base_ms": 30.0}})
    fleet.one(fleet.ask("p"))
    slo = {name: one.slo_ms for name, one in fleet.stages().items()}
    assert (slo["a"], slo["b"]) == (pytest.approx(SLO_MS - 60.5 - 30.5), slo["c"])
    assert slo["d"] == pytest.approx(SLO_MS - 30.5 - 2.5)


def test_refusals_of_stages_and_what_cannot_begin_end_the_query() -> None:
    fleet = Staged(CASCADE, changes={"dear": {"accuracy": 0.5}})
    strict = [vertex("cheap"), vertex("dear", accuracy=0.8)]
    fleet.change("p", pipeline=replace(CASCADE, vertices=strict, edges=[edge("cheap", "dear")]))
    reply = fleet.one(fleet.ask("p"))
    assert refused(reply, "unsatisfiable")["message"].startswith("vertex dear: ")
    assert fleet.query().cost > 0, "what the first stage cost"
    fleet = Staged(CASCADE)
    fleet.stage.send("d0", Changed("infaas-catalog", "app.dear", None))
    refused(fleet.one(fleet.ask("p")), "unknown_app")
    fleet = Staged(CASCADE, says={"cheap": 1.0})
    fleet.change("dear", selection=Ensemble(policy="majority", members=["gone"]))
    refused(fleet.one(fleet.ask("p"), 0.1), "unknown_model", "vertex dear")


@pytest.mark.parametrize(("stage", "code"), [("a", "bad_request"), ("d", "model_error")])
def test_what_a_stage_refuses_of_the_querys_own_inputs_is_the_clients_mistake(stage: str, code: str) -> None:
    fleet = Staged(DIAMOND)
    for device in fleet.devices.values():
        device.refuses[stage] = "no picture"
    assert refused(fleet.one(fleet.ask("p")), code)["message"] == f"vertex {stage}: no picture"


@pytest.mark.parametrize("needs", [{"model": "cheap"}, {"items": 2}])
def test_what_a_pipeline_cannot_take_is_refused(needs: dict[str, Any]) -> None:
    fleet = Staged(CASCADE)
    refused(fleet.one(fleet.ask("p", **needs)), "bad_request")


def test_a_vertex_may_be_an_app_of_which_several_models_answer() -> None:
    fleet = Staged(CASCADE, says={"cheap": 1.0})
    fleet.change("dear", selection=Ensemble(policy="majority"))
    reply = fleet.one(fleet.ask("p"))
    assert numbers(reply) == (0.0, 0.0)
    outcomes = {(one.app, one.stage): one for one in fleet.outcomes()}
    assert set(outcomes) == {("p", None), ("cheap", "cheap"), ("dear", "dear")} | {("dear", "dear")}
    assert reply["cost"] == pytest.approx(fleet.query().cost)


DEEP = alone("deep")
OUTER = PipelineRecord(
    vertices=[vertex("first"), PipelineVertex(name="rest", app="inner", inputs={"x": "first.y"})],
    edges=[edge("first", "rest")],
    output={"y": "rest.y"},
)


def nested(record: PipelineRecord = OUTER, inner: PipelineRecord = DEEP, **options: Any) -> Staged:
    """A fleet whose pipeline has a pipeline in it: first, then within `inner` deep, which says 9."""
    fleet = Staged(record, **options)
    fleet.add(*catalogue(variant("deep-v1-ort-fp32-t1-b8", model="deep"), app="deep"))
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=inner))
    for device in fleet.devices.values():
        device.says = {"deep": 9.0}
        device.wide["deep"] = 2
    fleet.change("p", latency_ms=20_000.0)
    return fleet


def test_vertices_may_be_pipelines_or_served_like_any_other() -> None:
    fleet = nested()
    assert numbers(fleet.one(fleet.ask("p"))) == (9.0, 9.0)
    by_app = {one.app: one for one in fleet.outcomes()}
    assert (by_app["deep"].parent, by_app["inner"].parent) == (by_app["inner"].uid, by_app["p"].uid)
    fleet = Staged(ONE)
    other = variant("a-v1-ort-fp32-t2-b8", model="a", threads=2)
    fleet.add(other)
    fleet.change("p", plan=planned(name=other.variant))
    assert "outputs" in fleet.one(fleet.ask("p"))


# -- a plan


def planned(replicas: int = 1, batch: int = 4, name: str = "a-v1-ort-fp32-t1-b8") -> PipelinePlan:
    stage = PlannedStage(
        hardware="cpu", batch=batch, replicas=replicas, scale=1.0, service_ms=4.0, rho=0.5, variant=name
    )
    return PipelinePlan(
        pipeline="p", policy="inferline", status="feasible", cost_per_s=0.0, p99_ms=10.0, vertices={"a": stage},
        envelope=[(0.01, 3)], dispersion=[1.0], steps=[], rate=100.0, latency_ms=SLO_MS,
    )  # fmt: skip


ONE = PipelineRecord(vertices=[vertex("a")], output={"y": "a.y"})


@pytest.mark.parametrize("dispatchers", [1, 2])
def test_fast_and_slow_replicas_share_a_queue_by_their_speed(dispatchers: int) -> None:
    fleet = Staged(ONE, workers=2, dispatchers=dispatchers)
    fleet.change("p", plan=planned(), latency_ms=2000.0)
    fleet.devices["w0"].slow = 4.0
    for _ in range(400):
        fleet.ask("p", seconds=0.0006)
    fleet.stage.run(3.0)
    share = {worker: sum(len(batch) for batch in device.batches) for worker, device in fleet.devices.items()}
    assert sum(share.values()) == 400
    assert share["w1"] / share["w0"] == pytest.approx(4.0, rel=0.15)
    assert max(len(batch) for device in fleet.devices.values() for batch in device.batches) == 4, "the planned batch"


def test_arrivals_at_a_pipeline_with_a_plan_are_told_in_bins_of_10_ms_and_are_no_demand() -> None:
    fleet = Staged(ONE)
    fleet.stage.listen("infaas.pipeline.arrivals")
    fleet.stage.listen("infaas.demand.d0")
    fleet.one(fleet.ask("p"))
    assert not fleet.sent(PipelineArrivals, "arrivals"), "without a plan nobody tunes"
    fleet.change("p", plan=planned(), seconds=1.0)
    fleet.stage.heard.clear()
    at = fleet.stage.now
    for wait in (0.015, 0.0, 2.0):
        fleet.ask("p", seconds=wait)
    [one] = fleet.sent(PipelineArrivals, "arrivals")
    assert (one.pipeline, one.dispatcher, sum(one.counts), one.counts[0]) == ("p", "d0", 3, 1)
    assert one.start == pytest.approx(at, abs=0.011)
    demand = [body for _, subject, body in fleet.stage.heard if subject == "infaas.demand.d0"]
    assert not any(b"a-v1" in body or b'"a"' in body for body in demand)


def test_a_dispatcher_that_takes_over_asks_for_the_same_parts() -> None:
    fleet = Staged(CASCADE, dispatchers=2, says={"cheap": 1.0, "dear": 2.0}, late={"dear": 300.0})
    fleet.change("p", latency_ms=20_000.0)
    label = fleet.ask("p", seconds=0.05)
    [taken] = holders(fleet)
    fleet.stage.kill(taken)
    assert numbers(fleet.one(label, 15.0)) == (2.0, 2.0)
    assert len(fleet.devices["w0"].batches) == 2, "each vertex is computed once"
    assert len({(one.parent, one.stage) for one in fleet.outcomes()}) == 3


# -- Results that stages hand on by way of the object store go when the query ends, and have a bound. Virtual time.
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


def test_intermediates_go_when_the_query_has_ended_or_its_time_is_up() -> None:
    fleet = chain()
    label = fleet.ask("p", seconds=LINGER - 1.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    assert len(fleet.contexts.objects) == 2, "another dispatcher may still have to go on with it"
    fleet.stage.run(3.0)
    assert fleet.contexts.objects == {}
    fleet = chain(wide=(200, 200))
    reply = fleet.one(fleet.ask("p"), 10.0)
    assert set(fleet.contexts.objects) == {reply["outputs_ref"]["key"]} == {reply["query"]}
    assert reply["outputs_ref"]["bytes"] > 800
    fleet = chain()
    fleet.devices["w0"].late = {"a": 60.0}
    assert "error" in fleet.one(fleet.ask("p", latency_ms=100.0), 0.3)
    fleet.stage.run(0.3)
    stored = len(fleet.contexts.objects)
    fleet.stage.run(2 * LINGER)
    assert (stored, fleet.contexts.objects) == (1, {})


@pytest.mark.parametrize("needs", [{}, {"accuracy": 0.8}])
def test_they_go_when_a_later_stage_refuses(needs: dict[str, Any]) -> None:
    fleet = chain(changes={"b": {"accuracy": 0.5}})
    if not needs:
        fleet.change("b", links={})
    assert "vertex b" in fleet.one(fleet.ask("p", **needs), 10.0)["error"]["message"]
    assert fleet.contexts.objects == {}


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
    label = fleet.ask("p", seconds=2.0)
    assert len(fleet.contexts.objects) == 3, "what `a` gave, the inner pipeline's own answer, inputs of `slow`"
    fleet.stage.run(60.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    assert fleet.contexts.objects == {}


def test_a_query_that_is_taken_over_goes_on_with_them_and_they_go_afterwards() -> None:
    fleet = chain(dispatchers=2)
    fleet.change("p", latency_ms=20_000.0)
    fleet.devices["w0"].late = {"b": 200.0}
    label = fleet.ask("p", seconds=0.1)
    assert len(fleet.contexts.objects) == 2
    fleet.stage.kill("d0", seconds=10.0)
    assert [numbers(reply) for reply in fleet.replies(label)] == [(3.0, 3.0)]
    fleet.stage.run(2 * LINGER)
    assert fleet.contexts.objects == {}


def test_a_query_that_exceeds_the_bound_is_refused_with_its_setting() -> None:
    fleet = chain(most=4000)
    fleet.change("p", latency_ms=20_000.0)
    fleet.devices["w0"].late = {"b": 200.0}
    labels = fleet.asks(2, "p", seconds=0.1)
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
