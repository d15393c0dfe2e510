"""Several models answer one query: parts, their join, its one end, whatever is slow or dies. Virtual time."""

import struct
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import Ensemble, VariantRecord
from bus.messages.public import Error, Requirements
from bus.messages.scaling import DemandReport
from bus.subjects import Subjects
from bus.tensors import from_array
from services.core.ensemble.base import Combined, Learnt
from services.core.outcomes import GRACE, PART_GRACE
from services.core.settings import EnsembleSettings, Settings
from services.dispatcher.commands import RunPolicy
from services.dispatcher.join import REMEMBER, Joins, chance, part_uid
from services.dispatcher.query import PartReply
from tests.support.simulated.fleet import Fleet, metrics, refused, variant

MODELS = ("a", "b", "c", "d", "e")
SLO_MS = 100.0


def members(*models: str, **changes: Any) -> list[VariantRecord]:
    return [variant(f"{model}-v1-ort-fp32-t1-b8", model=model, **changes) for model in models]


class Several(Fleet):
    """A fleet whose app asks all its models, each loaded once. They answer 0 unless `says` has something else."""

    def __init__(self, *variants: VariantRecord, selection: Ensemble | None = None, **options: Any) -> None:
        variants = variants or tuple(members(*MODELS))
        super().__init__(*variants, **options)
        self.change(selection=selection or Ensemble(policy="majority"), latency_ms=SLO_MS)
        for record in variants:
            self.order(record)
        self.stage.run(2.0)

    def one(self, label: str, seconds: float = 5.0) -> tuple[float, dict[str, Any]]:
        return self.timed(label, seconds)

    def ended(self) -> tuple[list[Any], list[Any]]:
        """Outcomes of queries, and of their parts."""
        every = self.outcomes()
        return [one for one in every if one.parent is None], [one for one in every if one.parent is not None]

    @property
    def computed(self) -> int:
        return sum(len(device.batches) for device in self.devices.values())


def value(reply: dict[str, Any]) -> float:
    [number] = struct.unpack("<f", reply["outputs"]["y"]["data"])
    return float(number)


USERS = Ensemble(policy="mine:Policy")


def with_users_policy(selection: Ensemble = USERS, **faults: Any) -> Several:
    """A fleet whose app has a user's policy, scripted with these faults."""
    fleet = Several(selection=selection)
    fleet.contexts.policy = Scripted(**faults)
    return fleet


def holders(fleet: Fleet) -> list[str]:
    """The dispatchers that have a query with parts."""
    return [
        name
        for name in ("d0", "d1", "d2")
        if name in fleet.stage.members and fleet.dispatcher(name).composites.joins.open
    ]


def test_all_members_answer_and_the_query_ends_once_with_the_sum_of_their_costs() -> None:
    fleet = Several()
    seconds, reply = fleet.one(fleet.ask())
    assert seconds < SLO_MS / 1000.0
    assert reply["members"] == [f"{model}@1" for model in MODELS]
    assert (reply["missing"], reply["confidence"], reply["missed"], reply["cached"]) == (0, 1.0, [], False)
    assert "confidences" not in reply
    [query], parts = fleet.ended()
    assert sorted(part.stage for part in parts) == list(MODELS)
    assert {part.parent for part in parts} == {query.uid} == {bytes.fromhex(reply["query"])}
    assert {part.uid for part in parts} == {part_uid(query.uid, i) for i in range(5)}
    assert query.cost == pytest.approx(sum(part.cost for part in parts)) == pytest.approx(reply["cost"])
    assert query.cost > 0
    assert (query.outcome, query.policy, query.stage) == ("ok", "majority", None)
    assert (query.confidence, query.missing) == (1.0, 0)
    assert {(part.missing, part.payer) for part in parts} == {(None, None)}, "their app is the one that pays"


def test_an_app_without_selection_and_a_query_that_names_a_model_are_answered_by_one_variant() -> None:
    fleet = Several()
    _, reply = fleet.one(fleet.ask(model="b"))
    assert reply["model"] == "b"
    assert "members" not in reply
    assert len(reply["query"]) == 32
    fleet.change(selection=None)
    _, reply = fleet.one(fleet.ask())
    assert "members" not in reply
    queries, parts = fleet.ended()
    assert (len(queries), parts) == (2, [])


def test_a_straggler_is_left_out_at_its_time_and_the_answer_is_that_of_the_others() -> None:
    fleet = Several()
    fleet.behave(says={"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 6.0}, late={"e": 400.0})  # ten times the objective
    seconds, reply = fleet.one(fleet.ask())
    assert 0.96 * SLO_MS / 1000 < seconds <= SLO_MS / 1000.0
    assert (reply["missing"], len(reply["members"]), reply["confidence"]) == (1, 4, pytest.approx(0.8))
    assert value(reply) == pytest.approx(1.0)  # what the four say, not a default
    assert reply["missed"] == []
    queries, parts = fleet.ended()
    assert [(query.outcome, query.confidence, query.missing) for query in queries] == [("ok", pytest.approx(0.8), 1)]
    assert len(parts) == 5


def test_a_part_that_is_answered_twice_counts_with_its_first_answer() -> None:
    fleet = Several(says=dict.fromkeys(MODELS, 1.0), late={"e": 400.0})
    label = fleet.ask(seconds=0.05)
    [uid] = [part.uid for part in fleet.ended()[1] if part.stage == "a"]
    again = PartReply(outputs={"y": from_array(np.full((1, 1), 6.0, "f4"))}, model="a", version="1", cost=1.0)
    fleet.stage.publish(fleet.subjects.part("d0", uid.hex()), again)
    _, reply = fleet.one(label)
    assert (value(reply), reply["missing"]) == (pytest.approx(1.0), 1)
    assert reply["cost"] < 1.0


def test_metrics_tell_which_member_is_missing_and_count_no_part_as_a_query() -> None:
    fleet = Several(late={"e": 400.0})
    fleet.ask(seconds=0.09)
    under_way = metrics(fleet)
    assert [under_way["infaas_dispatcher_queries", place] for place in ("joining", "executor")] == [1, 0]
    assert under_way["infaas_dispatcher_parts", "executor"] == 1, "the last one"
    fleet.stage.run(0.02)
    answered = metrics(fleet)
    assert answered["infaas_dispatcher_queries", "joining"] == 0
    for model in MODELS:
        assert answered["infaas_members_asked_total", "app", model] == 1
    assert answered["infaas_members_missing_total", "app", "e"] == 1
    assert ("infaas_members_missing_total", "app", "a") not in answered
    fleet.stage.run(1.0)
    assert metrics(fleet)["infaas_members_late_total", "app", "e"] == 1


@pytest.mark.parametrize("wait_s", [0.5, 1.0])
def test_without_an_objective_a_straggler_holds_the_answer_for_the_settings_time_only(wait_s: float) -> None:
    fleet = Several(settings=Settings(selection=EnsembleSettings(wait_s=wait_s)))
    fleet.change(latency_ms=None)
    fleet.devices["w0"].late = {"e": 4000.0}
    seconds, reply = fleet.one(fleet.ask())
    assert seconds == pytest.approx(wait_s, rel=0.05)
    assert reply["missing"] == 1


def test_with_an_objective_the_first_member_is_waited_for_if_none_is_there_at_the_share_of_it() -> None:
    fleet = Several(
        selection=Ensemble(policy="majority", wait_share=0.5), late={"a": 30.0} | dict.fromkeys("bcde", 400.0)
    )
    seconds, reply = fleet.one(fleet.ask())  # the first one takes 75 ms
    assert 0.5 * SLO_MS / 1000.0 < seconds <= SLO_MS / 1000.0
    assert (reply["members"], reply["missing"], reply["missed"]) == (["a@1"], 4, [])


def test_without_an_objective_the_first_member_is_waited_for_if_none_is_there_in_time() -> None:
    fleet = Several()
    fleet.change(latency_ms=None)
    fleet.devices["w0"].late = dict.fromkeys("abcde", 1000.0) | {"b": 800.0}  # 2.5 s and 2 s
    seconds, reply = fleet.one(fleet.ask())
    assert 1.5 < seconds < 3.0
    assert 1 <= len(reply["members"]) < 5


def test_nobody_there_is_a_refusal_or_the_default_output() -> None:
    fleet = Several(late=dict.fromkeys("abcde", 400.0))
    _, reply = fleet.one(fleet.ask())
    refused(reply, "deadline", "none of 5 models")
    fleet.stage.run(20.0)
    fleet.change(default_output=7)
    seconds, reply = fleet.one(fleet.ask())
    assert reply["default"]
    assert value(reply) == 7.0
    assert seconds <= SLO_MS / 1000.0
    queries, _ = fleet.ended()
    assert [query.outcome for query in queries] == ["refused", "default"]


def test_below_its_threshold_the_app_gives_its_default_and_says_how_sure_it_was() -> None:
    fleet = Several(selection=Ensemble(policy="majority", confidence=0.9), late={"e": 400.0})
    _, reply = fleet.one(fleet.ask())
    assert (reply["missed"], reply["confidence"]) == (["confidence"], pytest.approx(0.8))  # no default output: as it is
    fleet.stage.run(20.0)
    fleet.change(default_output=7)
    _, reply = fleet.one(fleet.ask())
    assert (reply["default"], reply["reason"], value(reply)) == (True, "confidence: 0.8 < 0.9", 7.0)
    assert [query.code for query in fleet.ended()[0]] == [None, "confidence"]
    assert fleet.ended()[0][1].cost > 0  # what was computed is paid


def test_a_query_may_ask_for_confidence_and_accuracy() -> None:
    fleet = Several(late={"e": 400.0})
    _, reply = fleet.one(fleet.ask(confidence=0.9, accuracy=0.95))
    assert (sorted(reply["missed"]), value(reply)) == (["accuracy", "confidence"], 0.0)


def test_the_mean_of_equal_accuracies_is_that_accuracy() -> None:
    """Of three times 0.7 the sum of binary fractions is below 2.1."""
    fleet = Several(*members("a", "b", "c", accuracy=0.7))
    _, reply = fleet.one(fleet.ask(accuracy=0.7))
    assert (reply["accuracy"], reply["missed"]) == (0.7, [])


@pytest.mark.parametrize("policy", ["exp4", "majority", "weighted"])
def test_members_whose_outputs_differ_in_shape_cost_that_query_only(policy: str) -> None:
    fleet = Several(selection=Ensemble(policy=policy))
    fleet.devices["w0"].wide = {"c": 3}
    refused(fleet.one(fleet.ask())[1], "model_error", "output 'y' of c has shape [1, 3], but that of a [1, 1]")
    [query], parts = fleet.ended()
    assert (query.outcome, query.code, len(parts)) == ("error", "model_error", 5)
    assert "outputs" in fleet.one(fleet.ask(model="c"))[1], "its own queries are answered"
    fleet.devices["w0"].wide.clear()
    assert "outputs" in fleet.one(fleet.ask())[1]


def test_resent_queries_have_the_same_parts_and_get_the_straggler() -> None:
    fleet = Several()
    key = b"k" * 16
    label = fleet.ask(retry_key=key)
    fleet.ask(id=label, retry_key=key)
    fleet.one(label)
    assert fleet.computed == 5
    fleet.ask(id=label, retry_key=key, seconds=2.0)  # its answer was lost
    assert fleet.computed == 5, "executors repeat what they have answered"
    first, again = fleet.replies(label)
    assert first["query"] == again["query"]
    assert chance(bytes.fromhex(first["query"])) == chance(bytes.fromhex(again["query"]))
    fleet = Several(says={"e": 5.0}, late={"e": 80.0})  # 200 ms
    label = fleet.ask(retry_key=b"k" * 16, seconds=0.15)
    assert fleet.replies(label)[0]["missing"] == 1
    fleet.ask(id=label, retry_key=b"k" * 16, latency_ms=400.0, seconds=5.0)
    assert [reply["missing"] for reply in fleet.replies(label)] == [1, 0]
    assert fleet.computed == 5
    view = fleet.dispatcher().view
    assert all(instance.own == 0 for instance in view.instances.values()), "each part left its instance once"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_another_dispatcher_takes_over_when_one_dies(how: str) -> None:
    fleet = Several(dispatchers=2)
    fleet.change(latency_ms=20_000.0)
    fleet.devices["w0"].late = {"d": 1200.0, "e": 1200.0}  # 3 s
    label = fleet.ask(seconds=0.1)
    getattr(fleet.stage, how)(*holders(fleet))
    reply = fleet.reply(label, 25.0)
    assert (len(reply["members"]), reply["missing"]) == (5, 0)
    queries, parts = fleet.ended()
    assert {query.uid for query in queries} == {bytes.fromhex(reply["query"])}
    assert fleet.computed == 5, "what was answered or under way is not computed again"
    assert {part.uid for part in parts} == {part_uid(queries[0].uid, i) for i in range(5)}


def test_a_query_of_a_dead_dispatcher_is_started_again_once_however_many_executors_hand_it_on() -> None:
    joins, uid = Joins("d0", Subjects(), 2**20), bytes(16)
    assert [joins.adopt(uid, at) for at in (0.0, 1.0, REMEMBER - 1.0)] == [True, False, False]
    joins.forget(REMEMBER + 1.0)
    assert joins.adopt(uid, REMEMBER + 1.0)


def test_a_query_that_has_ended_is_not_started_again_when_its_dispatcher_dies() -> None:
    fleet = Several(dispatchers=2)
    fleet.change(latency_ms=20_000.0)
    labels = [fleet.ask() for _ in range(10)]
    while not all(fleet.replies(label) for label in labels):
        fleet.stage.run(0.001)
    fleet.stage.kill("d0")  # in the millisecond after its last answer
    fleet.each(labels, 25.0)
    assert fleet.computed <= 50


def test_an_executor_that_dies_costs_no_answer() -> None:
    fleet = Several(workers=2)
    fleet.change(latency_ms=10_000.0)
    for record in members(*MODELS):
        fleet.order(record, "w1")
    fleet.stage.run(2.0)
    for device in fleet.devices.values():
        device.slow = 100.0
    labels = fleet.asks(4, seconds=0.1)
    fleet.kill_worker("w0")
    assert all("outputs" in reply for reply in fleet.each(labels, 30.0))


def test_demand_counts_parts_and_objectives_count_queries() -> None:
    fleet = Several()
    fleet.stage.listen(fleet.subjects.demand())
    fleet.asks(4, seconds=2.0)
    reports = fleet.sent(DemandReport, "infaas.demand.")
    assert sum(row.items for report in reports for row in report.rows) == 20
    served = [report.served["app"] for report in reports if report.served]
    assert (sum(ended for ended, _ in served), sum(missed for _, missed in served)) == (4, 0)


def test_what_is_open_is_forgotten() -> None:
    fleet = Several(dispatchers=1, late={"e": 400.0})
    for _ in range(20):
        fleet.ask(seconds=0.5)
    fleet.stage.run(20.0)
    joins = fleet.dispatcher().composites.joins
    assert (len(joins.open), len(joins.parts)) == (0, 0)
    assert not fleet.stage.members["w0/cpu"].actor.dispatchers._known["d0"].parents


class Scripted:
    """A user's policy, as its process answers. faults: method to what comes of it."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.called: list[str] = []

    def __call__(self, call: RunPolicy) -> tuple[float, Any]:
        self.called.append(call.method)
        if call.method in self.faults:
            return self.faults[call.method]  # type: ignore[no-any-return]
        if call.method == "learnt":
            return 0.001, [Learnt(member.model, 0.2, 0.5, 0) for member in call.args[1]]
        if call.method == "select":
            assert type(call.args[2]) is Requirements, "what the query needs, without its inputs"
            return 0.001, ["b", "d"]
        first = next(iter(call.args[2].values()))
        return 0.001, Combined({name: np.asarray(array) + 40 for name, array in first.items()}, np.array([1]))


def test_a_users_policy_chooses_and_combines_in_its_own_process_and_in_time() -> None:
    fleet = with_users_policy()
    _, reply = fleet.one(fleet.ask())
    assert fleet.contexts.policy.called == ["learnt", "select", "combine"]
    assert (reply["members"], reply["confidence"], value(reply)) == (["b@1", "d@1"], 0.5, 40.0)
    [query], parts = fleet.ended()
    assert (query.policy, [part.stage for part in parts]) == ("mine:Policy", ["b", "d"])
    fleet = with_users_policy(select=(3.0, ["a"]))
    seconds, reply = fleet.one(fleet.ask())
    assert seconds <= SLO_MS / 1000.0
    assert "had not been chosen" in reply["error"]["message"]
    assert fleet.ended()[1] == []


def test_what_comes_while_a_users_policy_combines_is_late() -> None:
    """The answer says whom it was made of."""
    fleet = with_users_policy(
        replace(USERS, wait_share=0.5), combine=(0.1, Combined({"y": np.array([[7.0]], "f4")}, np.array([1])))
    )
    fleet.change(latency_ms=1000.0)
    fleet.devices["w0"].late = {"d": 204.0}  # 0.51 s, and the members' time is up at 0.5 s
    at, reply = fleet.one(fleet.ask())
    assert 0.6 <= at < 0.61
    assert (reply["members"], reply["missing"], reply["confidence"]) == (["b@1"], 1, 0.5)


@pytest.mark.parametrize("method", ["learnt", "select", "combine"])
def test_a_users_policy_that_fails_costs_its_own_query_only(method: str) -> None:
    fleet = with_users_policy(**{method: (0.01, RuntimeError(f"policy 'mine:Policy': {method} raises"))})
    refused(fleet.one(fleet.ask())[1], "model_error", method)
    fleet.contexts.policy = Scripted()
    assert "outputs" in fleet.one(fleet.ask())[1]


@pytest.mark.parametrize("default", [None, 7])
def test_a_users_policy_that_does_not_combine_in_time_is_not_waited_for(default: int | None) -> None:
    fleet = with_users_policy(combine=(3.0, Combined({"y": np.ones((1, 1), "<f4")}, np.array([5]))))
    fleet.change(default_output=default)
    seconds, reply = fleet.one(fleet.ask())
    assert seconds <= SLO_MS / 1000.0 + GRACE + 0.002
    if default is None:
        refused(reply, "deadline", "had not combined")
    else:
        assert (reply["default"], "had not combined" in reply["reason"]) == (True, True)
    [query], _ = fleet.ended()
    assert query.outcome == ("refused" if default is None else "default")


def test_an_app_that_only_keeps_answers_is_answered_late_as_any_other() -> None:
    fleet = Several(*members("a"), selection=Ensemble(cache_mb=1.0), late={"a": 48.0})  # 120 ms
    seconds, reply = fleet.one(fleet.ask())
    assert (reply["model"], reply["missed"]) == ("a", ["latency"])
    assert seconds > SLO_MS / 1000.0
    fleet.devices["w0"].late = {"a": 800.0}
    fleet.stage.run(5.0)
    seconds, reply = fleet.one(fleet.ask(items=3))
    refused(reply, "deadline")
    assert seconds == pytest.approx(SLO_MS / 1000.0 + GRACE, abs=0.005)
    fleet.stage.run(5.0)
    fleet.change(default_output=7)
    seconds, reply = fleet.one(fleet.ask(items=2))
    assert reply["default"]
    assert seconds <= SLO_MS / 1000.0


@pytest.mark.parametrize("how", ["refused", "forgotten"])
def test_a_part_that_ends_leaves_that_of_the_same_query_asked_again(how: str) -> None:
    fleet = Several(late={"e": 400.0})
    fleet.one(fleet.ask(retry_key=b"k" * 16), SLO_MS / 1000.0)
    joins = fleet.dispatcher("d0").composites.joins
    [before] = joins.parts.values()
    label = fleet.ask(retry_key=b"k" * 16, latency_ms=30_000.0, seconds=0.01)
    if how == "refused":
        joins.refused(before, Error(code="internal", message="lost"))
    else:
        joins.forget(fleet.stage.now + PART_GRACE)
    _, again = fleet.one(label)
    assert again["missing"] == 0
