"""A query's needs reach all that answers for it: parts, plans, explain, another dispatcher. Virtual time."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import fields, replace

from bus.messages.catalog import AppRecord, Ensemble, PipelineRecord, PipelineVertex
from bus.messages.flow import Execute
from bus.messages.public import QueryHead, Requirements
from services.core.selection.eligibility import NO_WISH, Ask
from services.dispatcher.needs import needs_again, needs_of
from services.dispatcher.query import Query
from tests.support.simulated.fleet import SIGNATURE, catalogue, refused, variant
from tests.unit.dispatcher.test_pipelines import CHAIN, DIAMOND, FORK, ONE, Staged, alone, edge, planned, vertex

BETTER = variant("a-v1-ort-fp64-t1-b8", model="a", accuracy=0.97, base_ms=6.0)
WISH: dict[str, Any] = {
    "latency_ms": 250.0, "accuracy": 0.5, "cost": 0.25, "model": "m", "version": "1", "variant": "v", "context": "c", "priority": 2,
    "deadline": 2e9, "confidence": 0.75, "metric": "mae",
}  # fmt: skip


def explained(fleet: Staged, app: str = "p", **needs: Any) -> dict[str, Any]:
    return fleet.request(fleet.subjects.explain(app), Requirements(**needs))


def test_a_message_with_all_needs_is_one_with_every_field_there_is() -> None:
    assert set(WISH) == set(Requirements.__struct_fields__)


def test_every_need_survives_the_way_to_another_dispatcher() -> None:
    ask = needs_of(QueryHead(**WISH), "app", 3, 16, None, 1e9, 30.0)
    for name in WISH.keys() - {"latency_ms", "deadline"}:
        assert getattr(ask, name, getattr(ask.wish, name)) == WISH[name], name
    assert (ask.app, ask.items, ask.length, ask.latency_s, ask.deadline) == ("app", 3, 16, 0.25, 1e9 + 0.25)
    found_by_all = ("wish", "arm", "labels")  # whoever decides draws the same arm, and reads the same labels
    stated = [field for field in fields(Ask) if field.name not in found_by_all]
    assert all(getattr(ask, field.name) != field.default for field in stated), "the test states each"
    query = Query(b"u" * 16, "app", QueryHead(**WISH), ask, "reply", b"", 1e9)
    assert needs_again(query.route("d0", "", "infaas"), "app", query.head) == ask
    plain = needs_of(QueryHead(latency_ms=250.0, inputs=Raw(b"\x01")), "app", 3, 16, None, 1e9, 30.0)
    assert plain.wish is NO_WISH, "most queries have nothing to keep, and making it takes time"


@pytest.mark.parametrize(
    ("latency_ms", "objective_ms", "deadline", "after"),
    [
        (None, None, None, 30.0),  # the setting
        (None, None, 1e9 + 3600.0, 3600.0),  # it is stated, so the setting says nothing
        (None, None, 1e9 + 2.0, 2.0),
        (250.0, None, 1e9 + 3600.0, 0.25),
        (None, 500.0, 1e9 + 3600.0, 0.5),
        (None, 500.0, 1e9 + 0.1, 0.1),
    ],
)
def test_the_earlier_of_latency_and_deadline_counts_and_of_neither_the_setting(
    latency_ms: float | None, objective_ms: float | None, deadline: float | None, after: float
) -> None:
    wish = QueryHead(latency_ms=latency_ms, deadline=deadline)
    assert needs_of(wish, "app", 1, None, objective_ms, 1e9, 30.0).deadline - 1e9 == pytest.approx(after, abs=1e-6)


# -- a plan


@pytest.mark.parametrize("better", [True, False])
def test_a_planned_variant_below_the_querys_accuracy_does_not_answer(better: bool) -> None:
    """A better one does; where there is none, the query is refused, and explain says the same."""
    fleet = Staged(ONE)
    fleet.change("p", plan=planned(), latency_ms=2000.0)
    if better:
        fleet.add(BETTER)
        fleet.change("a", links={"a": "1"})
    fine, strict = fleet.ask("p", accuracy=0.9), fleet.ask("p", accuracy=0.95)
    fleet.stage.run(3.0)
    [reply], [other] = fleet.replies(fine), fleet.replies(strict)
    assert reply["accuracy"] == 0.9
    [stage] = explained(fleet, accuracy=0.95)["stages"]
    assert (stage["planned"], stage["accuracy"]) == (False, 0.95)
    assert explained(fleet, accuracy=0.9)["stages"][0]["planned"]
    if better:
        assert (other["accuracy"], other["missed"]) == (0.97, [])
        assert stage["variant"] == BETTER.variant
    else:
        refused(other, "unsatisfiable", "accuracy 0.95")
        assert stage["why"].startswith("the plan's a-v1-ort-fp32-t1-b8 does not meet its needs; it would be refused: ")
        assert stage["refused"]


# -- stages


@pytest.mark.parametrize(("floor", "asked"), [(0.8, 0.95), (0.95, 0.8), (None, 0.95), (0.95, None)])
def test_of_a_vertex_floor_and_the_querys_the_stricter_one_counts(floor: float | None, asked: float | None) -> None:
    record = replace(CHAIN, vertices=[vertex("a", accuracy=floor), vertex("b", "a.y")])
    fleet = Staged(record, changes={"b": {"accuracy": 0.99}})
    fleet.add(BETTER)
    fleet.change("a", links={"a": "1"})
    needs = {} if asked is None else {"accuracy": asked}
    reply = fleet.one(fleet.ask("p", **needs, latency_ms=2000.0))
    assert (reply["accuracy"], reply["missed"]) == (0.97, []), "of its stages, the least"
    assert (fleet.stages()["a"].accuracy_required, fleet.stages()["b"].accuracy_required) == (0.95, asked)
    assert explained(fleet, **needs)["stages"][0]["accuracy"] == 0.95


def test_an_accuracy_is_that_of_the_stages_which_are_measured_as_it_is_stated() -> None:
    """Here the first one, by its error; the second one is a pipeline whose stage has a share of right answers."""
    fleet = Staged(alone("b"), changes={"b": {"accuracy": 0.9}})
    fleet.add(*catalogue(variant("e-v1-ort-fp32-t1-b8", model="e", metric="mae", accuracy=0.25), app="e"))
    inner = PipelineVertex(name="rest", app="p", inputs={"x": "e.y"}, accuracy=0.8)
    chain = PipelineRecord(vertices=[vertex("e"), inner], edges=[edge("e", "rest")], output={"y": "rest.y"})
    fleet.add(AppRecord(app="outer", links={}, signature=SIGNATURE, pipeline=chain))
    fleet.devices["w0"].wide = dict.fromkeys("be", 2)

    def floors(**needs: Any) -> dict[str, Any]:
        reply = fleet.one(fleet.ask("outer", latency_ms=3000.0, **needs))
        assert (reply["accuracy"], reply["metric"], reply["missed"]) == (0.25, "mae", [])
        assert "refusal" not in explained(fleet, "outer", **needs)
        return {name: one.accuracy_required for name, one in fleet.stages().items()}

    assert floors(accuracy=0.2, metric="mae") == {"e": 0.2, "rest": 0.8, "b": 0.8}
    assert floors(accuracy=0.85) == {"e": None, "rest": 0.85, "b": 0.85}
    for needs in ({"accuracy": 0.2, "metric": "f1"}, {"metric": "f1"}):
        reply = fleet.one(fleet.ask("outer", **needs))
        assert refused(reply, "bad_request", "f1: the metric of app 'outer' is mae")["field"] == "f1"
        assert explained(fleet, "outer", **needs)["refusal"] == reply["error"]
    refused(fleet.one(fleet.ask("outer", accuracy=0.5, metric="mae", latency_ms=3000.0)), "unsatisfiable", "vertex e: ")
    flat = replace(chain, vertices=[vertex("e"), replace(inner, app="b")])
    fleet.add(AppRecord(app="flat", links={}, signature=SIGNATURE, pipeline=flat))
    for metric, best in (("mae", 0.25), (None, 0.9)):  # what is on offer keeps the accuracy that counts
        reply = fleet.one(fleet.ask("flat", accuracy=best, latency_ms=1.0, **({"metric": metric} if metric else {})))
        closest = refused(reply, "unsatisfiable", "")["closest"]
        assert (closest["accuracy"], closest["metric"]) == (best, metric or "top1")


def test_an_accuracy_is_in_the_metric_of_the_version_that_is_asked() -> None:
    fleet = Staged(ONE)
    new = variant("a-v2-ort-fp32-t1-b8", model="a", version="2", metric="f1", accuracy=0.9)
    fleet.add(*catalogue(new, app="a"))
    for needs, version in (({"metric": "f1"}, None), ({}, "1")):
        reply = fleet.one(fleet.ask("a", accuracy=0.8, **needs, **({"version": version} if version else {})))
        assert reply["version"] == (version or "2")
    refused(fleet.one(fleet.ask("a", accuracy=0.8)), "bad_request", "accuracy: the metric of app 'a' is f1")
    assert "accuracy: the metric" in explained(fleet, "a", accuracy=0.8)["error"]["message"]


def test_a_stage_gets_the_querys_context_priority_and_confidence_and_a_deadline_of_its_own() -> None:
    fleet = Staged(CHAIN, changes={"b": {"base_ms": 40.0}})
    fleet.change("b", selection=Ensemble(policy="exp4", contextual=True))
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))
    fleet.one(fleet.ask("p", context="ann", priority=2, confidence=1.0, deadline=fleet.stage.now + 0.15))
    a, b = (one.route for one in fleet.sent(Execute, "execute"))
    for route in (a, b):
        assert (route.context, route.priority, route.confidence) == ("ann", 2, 1.0)
    assert (a.stage, b.app, b.deadline - a.arrived) == ("a", "b", pytest.approx(0.15, abs=0.001))
    assert b.deadline - a.deadline == pytest.approx(0.0405), "what is behind it has its time"
    assert explained(fleet, "b", context="ann")["members"][0]["weight"] == 1.0, "it was read"
    assert explained(fleet, "b", context="bob")["members"][0]["weight"] is None


@pytest.mark.parametrize("agree", [True, False])
def test_a_pipeline_tells_what_a_stage_of_several_models_says(agree: bool) -> None:
    """Two models vote in its first stage; the answer has their names, who was missing, and how many agree."""
    fleet = Staged(CHAIN)
    fleet.add(variant("c-v1-ort-fp32-t1-b8", model="c"))
    other = fleet.records[-1]
    fleet.add(*(one for one in catalogue(other, app="c")))
    fleet.change("a", links={"a": "1", "c": "1"}, selection=Ensemble(policy="majority"))
    fleet.devices["w0"].wide = dict.fromkeys("abc", 2)
    fleet.one(fleet.ask("p", latency_ms=3000.0))
    fleet.devices["w0"].late = {} if agree else {"c": 100.0}
    reply = fleet.one(fleet.ask("p", confidence=0.75, latency_ms=200.0))
    assert reply["members"] == (["a@1", "c@1", "b@1"] if agree else ["a@1", "b@1"])
    assert (reply["missing"], reply["confidence"]) == ((0, 1.0) if agree else (1, 0.5))
    assert reply["missed"] == ([] if agree else ["confidence"])
    fleet.devices["w0"].late = {}
    assert fleet.one(fleet.ask("p", items=2, latency_ms=3000.0))["confidences"] == [1.0, 1.0]


# -- cost: a ceiling of what the query is charged


def cost_of(fleet: Staged, app: str = "a", items: int = 1) -> float:
    """US$ per 1,000 queries of so many items, each alone on the app's first variant."""
    return float(fleet.dispatcher().view.apps[app].charge(items)[0])


def test_no_query_is_charged_more_than_its_limit_whatever_shares_its_batch() -> None:
    fleet = Staged(ONE)
    asked: dict[str, tuple[float, bool]] = {}
    for n in range(60):
        items, share = (1, 3, 8, 20)[n % 4], (0.5, 0.999, 1.001, 3.0)[n // 4 % 4]
        limit = share * cost_of(fleet, items=items)
        asked[fleet.ask("a", items=items, cost=limit, latency_ms=5000.0)] = limit, share > 1.0
        fleet.stage.run(0.001)
    fleet.stage.run(5.0)
    for label, (limit, fits) in asked.items():
        [reply] = fleet.replies(label)
        if fits:
            assert 1000.0 * reply["cost"] <= limit
            assert reply["missed"] == []
        else:
            assert refused(reply, "unsatisfiable", "costs at most US$")["closest"]["cost"] > limit


@pytest.mark.parametrize(("app", "items"), [("b", 1), ("b", 5), ("p", 1), ("p", 5)])
def test_a_charge_that_turns_out_higher_is_said_to_be_missed(app: str, items: int) -> None:
    fleet = Staged(CHAIN, late={"b": 3.0})
    limit = 2.5 * cost_of(fleet, items=items)
    reply = fleet.one(fleet.ask(app, cost=limit, latency_ms=3000.0, items=items))
    assert reply["missed"] == ["cost"]
    assert 1000.0 * reply["cost"] > limit


def test_limits_hold_along_the_dearest_way_and_before_the_next_stage() -> None:
    fleet = Staged(CHAIN, late={"a": 3.0})
    reply = fleet.one(fleet.ask("p", cost=2.5 * cost_of(fleet), latency_ms=3000.0))
    assert refused(reply, "unsatisfiable")["message"].startswith("vertex b: no variant of app 'b' costs at most US$")
    assert (set(fleet.stages()), fleet.stages()["b"].cost) == ({"a", "b"}, 0.0)
    fleet = Staged(FORK, changes={"c": {"base_ms": 20.0}})
    fleet.add(AppRecord(app="outer", links={}, signature=SIGNATURE, pipeline=alone("d", "p")))
    limit = 1.001 * (cost_of(fleet, "a") + cost_of(fleet, "c"))
    assert fleet.one(fleet.ask("outer", cost=limit))["missed"] == []
    assert "may cost US$" in fleet.one(fleet.ask("outer", cost=0.99 * limit))["error"]["message"]


def test_a_limit_is_divided_among_stages_and_what_exceeds_it_asks_none() -> None:
    fleet = Staged(CHAIN, changes={"b": {"base_ms": 20.0}})
    both = cost_of(fleet, "a") + cost_of(fleet, "b")
    reply = fleet.one(fleet.ask("p", cost=1.5 * both))
    limits = {name: one.cost_limit for name, one in fleet.stages().items()}
    assert limits["a"] == pytest.approx(1.5 * cost_of(fleet, "a"))
    assert limits["b"] == pytest.approx(1.5 * both - 1000.0 * fleet.stages()["a"].cost), "all that is left"
    assert 1000.0 * reply["cost"] <= 1.5 * both
    before = len(fleet.outcomes())
    reply = fleet.one(fleet.ask("p", cost=0.99 * both))
    assert refused(reply, "unsatisfiable")["message"].startswith("pipeline 'p' may cost US$")
    assert len(fleet.outcomes()) == before + 1, "no stage was asked"
    assert "refusal" not in explained(fleet, cost=1.5 * both)
    assert explained(fleet, cost=0.99 * both)["refusal"] == reply["error"]
    dear = variant("a-v1-ort-fp64-t1-b8", model="a", base_ms=40.0)
    fleet.add(dear)
    fleet.change("a", links={"a": "1"})
    [one] = [one for one in explained(fleet, cost=1.5 * both)["candidates"] if one["variant"] == dear.variant]
    assert one["why_not"].startswith("costs US$"), "more than its share"


@pytest.mark.parametrize("unsure", [False, True])
def test_stages_that_exclude_each_other_share_one_part_of_the_limit(unsure: bool) -> None:
    """B or c follows a. What both cost together is more than the limit, and the dearer way just fits it."""
    fork = replace(FORK, vertices=[*FORK.vertices, vertex("d", "a.y")], edges=[*FORK.edges, edge("a", "d")])
    fleet = Staged(fork, changes={"c": {"base_ms": 20.0}}, says={"a": float(unsure)})
    least = {name: cost_of(fleet, name) for name in "abcd"}
    limit = 1.001 * (least["a"] + least["c"] + least["d"])
    assert "refusal" not in explained(fleet, cost=limit)
    reply = fleet.one(fleet.ask("p", cost=limit))
    assert (reply["missed"], 1000.0 * reply["cost"] <= limit) == ([], True)
    stages = fleet.stages()
    assert set(stages) == {"a", "d", "c" if unsure else "b"}
    limits = {name: one.cost_limit for name, one in stages.items()}
    left = limit - 1000.0 * stages["a"].cost
    assert limits["a"] == pytest.approx(limit * least["a"] / (least["a"] + least["c"] + least["d"]))
    one = "c" if unsure else "b"
    assert limits[one] == pytest.approx(left * least[one] / (least[one] + least["d"])), "the other one has no part"
    assert limits["d"] == pytest.approx(left - limits[one]), "all that is left"
    refused = fleet.one(fleet.ask("p", cost=0.99 * limit))["error"]
    assert refused["message"].startswith("pipeline 'p' may cost US$")
    assert explained(fleet, cost=0.99 * limit)["refusal"] == refused
    dear = variant("b-v1-ort-fp64-t1-b8", model="b", base_ms=5.0)  # b may cost so much, as c has no part
    fleet.add(dear)
    fleet.change("b", links={"b": "1"})
    [one] = [one for one in explained(fleet, cost=limit)["candidates"] if one["variant"] == dear.variant]
    assert "costs US$" not in one["why_not"]


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("first", ["a", "p"])
def test_where_a_simulated_device_may_make_up_an_answer_branches_without_probabilities_are_added_up(
    first: str, simulated: bool
) -> None:
    fleet = Staged(ONE, changes={"a": {"simulated": simulated}}, load=False)
    fork = replace(FORK, vertices=[replace(one, app=first if one.name == "a" else "a") for one in FORK.vertices])
    fleet.add(AppRecord(app="fork", links={}, signature=SIGNATURE, pipeline=fork))
    assert ("refusal" in explained(fleet, "fork", cost=2.5 * cost_of(fleet))) == simulated


def test_a_stage_may_not_take_what_those_under_way_may_cost() -> None:
    """B and c are asked side by side; together with d they keep the limit."""
    fleet = Staged(DIAMOND, changes={"c": {"base_ms": 10.0}})
    least = {name: cost_of(fleet, name) for name in "abcd"}
    limit = 1.2 * sum(least.values())
    fleet.one(fleet.ask("p", cost=limit))
    stages = fleet.stages()
    left = limit - 1000.0 * stages["a"].cost
    limits = {name: stages[name].cost_limit for name in "bcd"}
    assert limits["b"] + limits["c"] + least["d"] <= left * (1 + 1e-9)
    assert limits["d"] == pytest.approx(left - 1000.0 * (stages["b"].cost + stages["c"].cost))


def three_members(policy: str = "weighted") -> Staged:
    """App a has models a (0.9), c (0.95) and e (0.6), which cost alike."""
    fleet = Staged(ONE)
    for model, accuracy in (("c", 0.95), ("e", 0.6)):
        more = variant(f"{model}-v1-ort-fp32-t1-b8", model=model, accuracy=accuracy)
        fleet.add(*(one for one in catalogue(more, app=model)))
        fleet.order(more, app="a")
    fleet.change("a", links=dict.fromkeys("ace", "1"), selection=Ensemble(policy=policy))
    fleet.devices["w0"].wide = dict.fromkeys("ace", 2)
    fleet.stage.run(2.0)
    fleet.one(fleet.ask("a", latency_ms=3000.0))
    return fleet


@pytest.mark.parametrize(("share", "members"), [(3.01, "ace"), (2.5, "ac"), (1.5, "c"), (0.9, "")])
def test_members_that_do_not_fit_the_limit_together_are_left_out_the_least_weight_first(
    share: float, members: str
) -> None:
    fleet = three_members()
    limit = share * cost_of(fleet)
    reply = fleet.one(fleet.ask("a", cost=limit))
    found = explained(fleet, "a", cost=limit)
    if not members:
        refused(reply, "unsatisfiable", "costs at most US$")
        assert "costs at most US$" in found["refusal"]["message"]
        return
    assert "".join(sorted(name[0] for name in reply["members"])) == members
    assert (reply["missing"], reply["missed"]) == (0, [])
    assert 1000.0 * reply["cost"] <= limit
    assert "".join(sorted(row["member"][0] for row in found["members"] if row["variant"])) == members
    assert all("left out" in row["why"] for row in found["members"] if not row["variant"])
    parts = [one for one in fleet.outcomes() if one.parent == bytes.fromhex(reply["query"])]
    assert sum(part.cost_limit for part in parts) == pytest.approx(limit)


def test_one_member_by_chance_fits_the_limit_and_kept_answers_cost_nothing() -> None:
    fleet = three_members("exp3")
    dear = variant("e-v2-ort-fp32-t1-b8", model="e", version="2", base_ms=30.0)
    fleet.add(*(one for one in catalogue(dear, app="e2")))
    fleet.change("a", links={"a": "1", "c": "1", "e": "2"})
    replies = [fleet.one(fleet.ask("a", cost=1.1 * cost_of(fleet))) for _ in range(12)]
    assert {name for reply in replies for name in reply["members"]} == {"a@1", "c@1"}
    fleet = three_members()
    fleet.change("a", selection=Ensemble(policy="weighted", cache_mb=1.0))
    fleet.one(fleet.ask("a"))
    reply = fleet.one(fleet.ask("a", cost=0.01 * cost_of(fleet)))
    assert (reply["cached"], reply["cost"], len(reply["members"])) == (True, 0.0, 3)


def test_an_accuracy_that_was_never_measured_is_said_to_be_missed() -> None:
    fleet = Staged(CHAIN, changes={"a": {"accuracy": None}})
    assert fleet.one(fleet.ask("a", accuracy=0.5))["missed"] == ["accuracy"]
    reply = fleet.one(fleet.ask("p", accuracy=0.5))
    assert (reply["accuracy"], reply["missed"]) == (None, ["accuracy"])
    assert fleet.one(fleet.ask("a"))["missed"] == []
