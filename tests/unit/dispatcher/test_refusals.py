"""Refusals come in time, whatever is broken: at most 0.1 s after the deadline, and one for each query. Virtual time."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, PipelineRecord
from bus.messages.public import ListRequest, Requirements
from services.core.actor import Changed
from services.core.cost import load_seconds
from services.core.line import ECHO_S
from services.core.outcomes import GRACE, NOT_STORED, SILENT
from services.core.placement import container_kind
from services.core.selection.cluster import LOAD_AGAIN, WAY_S
from services.core.selection.policy import BruteForce, InfaasPolicy, RoundRobin, SelectionPolicy
from services.core.settings import DispatcherSettings, Settings
from services.dispatcher.inflight import InFlight
from tests.support.servers.processes import ROOT
from tests.support.simulated.fleet import SIGNATURE, Fleet, catalogue, metrics, refused, variant
from tests.unit.dispatcher.test_pipelines import CHAIN, FORK, ONE, Staged, alone, planned

RULES = ROOT / "ops/prometheus/infaas.rules.yml"
LATEST = 0.1  # s after the deadline
HUNG = 1e6


def warm(**options: Any) -> Fleet:
    fleet = Fleet(**options)
    fleet.ask(seconds=2.0)
    return fleet


def hang(fleet: Fleet, worker: str = "w0") -> None:
    fleet.devices[worker].slow = HUNG


def fall_silent(fleet: Fleet) -> None:
    fleet.stage.kill("w0/cpu")
    fleet.stage.listen(fleet.subjects.execute("w0", "cpu"))  # what is sent there is taken, and nothing comes of it


def die(fleet: Fleet) -> None:
    fleet.end_executor("w0")


@pytest.mark.parametrize("broken", [hang, fall_silent, die])
@pytest.mark.parametrize("default", [None, 7])
def test_nothing_ends_later(broken: Callable[[Fleet], None], default: int | None) -> None:
    fleet = warm()
    fleet.change(default_output=default)
    broken(fleet)
    asked: dict[str, float] = {}
    for number in range(20):  # the first run, or wait behind them
        asked[fleet.ask(latency_ms=200.0 + 10.0 * number)] = fleet.stage.now + 0.2 + 0.01 * number
        fleet.stage.run(0.005)
    fleet.stage.run(3.0)
    for label, deadline in asked.items():
        after, reply = fleet.timed(label, 0.0)
        assert fleet.stage.now + after <= deadline + LATEST
        assert reply["default"] if default is not None else reply["error"]["code"] in ("deadline", "overloaded")
    ends = [one for one in fleet.outcomes() if one.id in asked]
    assert len({one.uid for one in ends}) == len(ends) == len(asked)


@pytest.mark.parametrize("lag_s", [0.05, 0.15, 0.3, 0.38, 1.0, 5.0])
@pytest.mark.parametrize("slo_s", [0.1, 0.5])
def test_what_waits_to_be_read_by_its_dispatcher_has_only_the_time_that_is_left(lag_s: float, slo_s: float) -> None:
    """More comes than the dispatcher can read: time counts from when a query reached the server. What it has read too late it refuses at once."""
    fleet = warm()
    hang(fleet)
    fleet.stage.lag("d0", lag_s)
    fleet.stage.run(3.0 * lag_s + 3.0)
    asked = {}
    for _ in range(50):
        asked[fleet.ask(latency_ms=1000.0 * slo_s)] = fleet.stage.now
        fleet.stage.run(0.013)
    fleet.stage.run(2.0 * lag_s + 2.0)
    for label, sent in asked.items():
        [at] = [at for at, subject, _ in fleet.stage.heard if subject == f"_INBOX.test.{label}"]
        assert at <= sent + max(slo_s, lag_s) + LATEST


@pytest.mark.parametrize("stop_s", [0.3, 0.38])
@pytest.mark.parametrize("slo_s", [0.1, 0.25])
def test_what_came_while_its_dispatcher_stood_still_has_waited_since_its_echo_was_due(
    stop_s: float, slo_s: float
) -> None:
    """A short stop, which it takes for slowness: nothing else tells it how long it was."""
    fleet = warm()
    hang(fleet)
    fleet.stage.pause("d0")
    asked = {}
    for _ in range(10):
        asked[fleet.ask(latency_ms=1000.0 * slo_s)] = fleet.stage.now
        fleet.stage.run(stop_s / 10)
    went_on = fleet.stage.now
    fleet.stage.go_on("d0", seconds=2.0)
    for label, sent in asked.items():
        [at] = [at for at, subject, _ in fleet.stage.heard if subject == f"_INBOX.test.{label}"]
        assert at <= max(sent + ECHO_S + slo_s, went_on) + LATEST


def test_a_model_that_hangs_is_refused_by_its_executor_shortly_after_the_deadline() -> None:
    fleet = warm()
    hang(fleet)
    seconds, reply = fleet.timed(fleet.ask(latency_ms=200.0))
    assert seconds == pytest.approx(0.2 + GRACE, abs=0.005)
    assert "had not answered" in reply["error"]["message"]
    assert not fleet.dispatcher().in_flight.dispatched


# -- true: an objective that no idle fleet meets is unsatisfiable, and what is offered instead is served


def served(fleet: Fleet, error: dict[str, Any], app: str = "app") -> dict[str, Any]:
    """The reply to a query with exactly the figures on offer."""
    closest = error["closest"]
    label = fleet.ask(app, accuracy=closest["accuracy"], latency_ms=closest["latency_ms"], cost=closest["cost"])
    return fleet.reply(label, 3.0)


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("latency_ms", [0.1, 4.0, 5.9])
def test_an_objective_that_no_way_through_a_pipeline_meets_is_unsatisfiable(plan: bool, latency_ms: float) -> None:
    fleet = Staged(ONE if plan else CHAIN)  # 2.5 ms a stage
    if plan:
        fleet.change("p", plan=planned(batch=4))
        latency_ms /= 2.0
    error = refused(fleet.reply(fleet.ask("p", latency_ms=latency_ms), 1.0), "unsatisfiable")
    assert "retry_after_ms" not in error
    assert served(fleet, error, "p")["missed"] == []


@pytest.mark.parametrize("latency_ms", [None, 900.0])
@pytest.mark.parametrize("record", [CHAIN, FORK])
def test_a_limit_below_what_a_pipeline_may_cost_is_unsatisfiable(
    record: PipelineRecord, latency_ms: float | None
) -> None:
    """What is offered instead is the cheapest way that is accurate enough. It is served, though stage a takes longer than measured."""
    fleet = Staged(record, changes={"c": {"base_ms": 9.0}})
    good = variant("a-v1-ort-fp64-t1-b8", model="a", accuracy=0.97, base_ms=20.0)
    faster = variant("a-v1-ort-fp64-t4-b8", model="a", accuracy=0.97, base_ms=12.0, threads=4)  # and dearer
    nowhere = variant("a-v1-ort-fp32-gpu-b8", model="a", accuracy=0.97, hardware="gpu", price_per_s=1e-9)
    fleet.add(good, faster, nowhere)
    fleet.change("a", links={"a": "1"})
    fleet.order(good, app="a", seconds=1.0)
    fleet.devices["w0"].late, fleet.devices["w0"].says = {"a": 1.15}, {"a": 1.0}
    for accuracy, first in ((0.5, "a-v1-ort-fp32-t1-b8"), (0.95, good.variant)):
        reply = fleet.reply(fleet.ask("p", cost=1e-9, accuracy=accuracy, latency_ms=latency_ms), 1.0)
        error = refused(reply, "unsatisfiable", "pipeline 'p' may cost US$")
        assert error["closest"]["variant"].split(", ")[0] == first
        assert served(fleet, error, "p")["missed"] == []


def test_an_objective_below_the_measured_way_there_is_unsatisfiable_and_what_is_offered_holds() -> None:
    """What a query takes beside computing is measured, and in every latency that is compared with an objective."""
    fleet = Fleet(variant(base_ms=0.1, per_item_ms=0.1))
    compute, way = 0.2, 2.0
    fleet.stage.lag("w0/cpu", way / 1000.0)
    for _ in range(2 * round(WAY_S)):
        fleet.ask(seconds=1.0)
    error = refused(fleet.reply(fleet.ask(latency_ms=compute + 0.9 * way), 1.0), "unsatisfiable", "the fastest takes")
    assert error["closest"]["latency_ms"] > compute + way
    assert served(fleet, error)["missed"] == []
    explained = fleet.request(fleet.subjects.explain("app"), Requirements())
    assert explained["chosen"]["latency_ms"] >= compute + way


def test_a_load_that_fits_nowhere_is_refused_soon_with_its_numbers_and_the_setting() -> None:
    fleet = Fleet(variant(), settings=convert({"monitor": {"device_mb": 40}}, Settings))
    for latency_ms in (None, 5000.0):
        seconds, reply = fleet.timed(fleet.ask(latency_ms=latency_ms))
        assert seconds < 1.0
        words = "needs 50 MB, cpu sets 40 MB aside: use a larger device or raise monitor.device_mb"
        assert "retry_after_ms" not in refused(reply, "unsatisfiable", words)
        assert words in alarms(fleet)["app"]
    hurried = fleet.reply(fleet.ask(latency_ms=20.0), 1.0)  # less than a load takes
    assert "monitor.device_mb" in hurried["error"]["message"]


def test_a_load_that_fits_nowhere_offers_what_is_loaded() -> None:
    small = variant("small", accuracy=0.8)
    large = variant("large", accuracy=0.95)
    large = replace(large, profile=replace(large.profile, memory_mb=5000.0))
    fleet = Fleet(small, large)
    fleet.change(links={"m": "1"})
    words = "needs 5000 MB, cpu sets 3200 MB aside"
    error = refused(fleet.reply(fleet.ask(accuracy=0.9), 2.0), "unsatisfiable", words)
    assert error["closest"]["variant"] == "small"
    fleet.ask(accuracy=0.8, seconds=1.0)
    assert "outputs" in served(fleet, error)


@pytest.mark.parametrize("needs", [{"accuracy": 0.99}, {"cost": 1e-12}, {"latency_ms": 0.01}])
def test_an_offer_of_what_is_not_loaded_leaves_the_time_to_load_it(needs: dict[str, float]) -> None:
    fleet = Fleet(variant(accuracy=0.95))
    error = refused(fleet.reply(fleet.ask(**needs), 2.0), "unsatisfiable")
    assert "outputs" in served(fleet, error)


def test_explain_offers_what_the_whole_pipeline_can_do() -> None:
    fleet = Staged(CHAIN)
    error = refused(fleet.reply(fleet.ask("p", accuracy=0.999), 1.0), "unsatisfiable")
    explained = fleet.request(fleet.subjects.explain("p"), Requirements(accuracy=0.999))["refusal"]
    assert explained["closest"] == error["closest"]
    assert served(fleet, explained, "p")["missed"] == []


def test_quarantined_variants_and_absent_containers_are_refused_soon() -> None:
    fleet = Fleet(variant())
    fleet.devices["w0"].broken = "no such operator"
    fleet.ask(seconds=10.0)
    seconds, reply = fleet.timed(fleet.ask())
    assert seconds < 1.0
    words = "is quarantined on w0 until infaas.admin.release-variant names it: its last 3 loads failed"
    refused(reply, "unsatisfiable", words)
    assert words in alarms(fleet)["app"]
    fleet = Fleet(variant("user", hardware=container_kind("m", "1")))
    words = "no container of m@1 runs: start it (infaas container)"
    refused(fleet.reply(fleet.ask(), 1.0), "unsatisfiable", words)


def alarms(fleet: Fleet) -> dict[str, str]:
    """Why nobody can serve which app: as the list says, and for the same apps the alert's expression holds."""
    items = fleet.request(fleet.subjects.list("apps"), ListRequest())["items"]
    found = {item["app"]: item["unserved"] for item in items if item["unserved"]}
    [alert] = re.findall(r"- alert: InfaasAppUnserved\n +expr: max by \(app\) \((\w+)\) > 0\n", RULES.read_text())
    series = {key[1]: value for key, value in metrics(fleet).items() if key[0] == alert}
    assert {app for app, value in series.items() if value > 0} == found.keys()
    assert series.keys() == {item["app"] for item in items}
    return found


def stopped(fleet: Fleet) -> None:
    fleet.stage.stop(f"w0/{fleet.kind}")
    fleet.stage.stop("w0")


def killed(fleet: Fleet) -> None:
    fleet.kill_worker("w0")


@pytest.mark.parametrize("goes", [killed, stopped])
def test_an_app_whose_only_container_has_gone_is_an_alarm_until_it_is_back(goes: Callable[[Fleet], None]) -> None:
    kind = container_kind("m", "1")
    fleet = Fleet(variant("user", hardware=kind), kind=kind)
    fleet.add(AppRecord(app="p", links={}, signature=SIGNATURE, pipeline=alone("a", "app")))
    fleet.ask(seconds=2.0)
    assert alarms(fleet) == {}
    goes(fleet)
    fleet.stage.run(fleet.settings.dispatcher.failure_timeout_s + 1.0)
    seconds, reply = fleet.timed(fleet.ask())
    assert seconds < 1.0
    words = "no instance and none can be started: container w0 of m@1 has gone at "
    why = refused(reply, "unsatisfiable", words)["message"]
    assert alarms(fleet) == {"app": why, "p": f"vertex a: {why}"}
    fleet.start_worker("w0", seconds=5.0)
    assert "outputs" in fleet.reply(fleet.ask(), 2.0)
    assert alarms(fleet) == {}


@pytest.mark.parametrize("policy", [InfaasPolicy(), RoundRobin(), BruteForce()], ids=lambda policy: policy.name)
def test_a_query_whose_app_is_deleted_while_it_waits_is_refused_and_others_are_served(policy: SelectionPolicy) -> None:
    """They are decided again at the next check, the deleted app's first."""
    fleet = Fleet(policy=policy)
    fleet.add(*catalogue(variant("other-v1-ort-fp32-t1-b8", model="other"), app="other"))
    die(fleet)
    labels = [fleet.ask(latency_ms=8000.0), fleet.ask("other", latency_ms=9000.0)]
    fleet.stage.run(0.2)
    assert not any(map(fleet.replies, labels))
    fleet.stage.send("d0", Changed("infaas-catalog", "app.app", None), seconds=0.5)
    fleet.start_executor("w0")
    gone, served = fleet.each(labels, 9.0)
    refused(gone, "unknown_app", "deleted meanwhile")
    assert "outputs" in served


# -- The object store hangs: queries whose outputs go there end in time, and nobody waits for them. Virtual time.
LARGE = 8  # items whose outputs are too large for a message
DEADLINE_MS = 2000.0


def hung() -> Fleet:
    fleet = Fleet(settings=Settings(dispatcher=DispatcherSettings(max_inline=1000)))
    fleet.ask(id="warm", seconds=2.0)
    hang_store(fleet)
    return fleet


def hang_store(fleet: Fleet, store_s: float = 1e6) -> None:
    device = fleet.devices["w0"]
    device.store_s = store_s
    device.wide = {variant().model: 100}


def in_flight(fleet: Fleet) -> InFlight:
    return fleet.dispatcher().in_flight


def test_a_hung_object_store_refuses_what_goes_there_and_holds_nothing_else() -> None:
    fleet = hung()
    large = fleet.asks(100, items=LARGE, latency_ms=DEADLINE_MS, seconds=1.0)
    flight = in_flight(fleet)
    assert len(flight.dispatched) == len(large), "all are computed"
    [instance] = {query.instance for query in flight.dispatched.values()}
    assert (instance.own, instance.others, instance.idle) == (0, 0, True)
    assert fleet.reply(fleet.ask(latency_ms=20.0), 0.1)["missed"] == []
    for reply in fleet.each(large, DEADLINE_MS / 1000.0 - 1.1 + SILENT):
        assert refused(reply, "deadline")["message"].startswith(NOT_STORED)
    fleet.stage.run(1.0)
    assert (len(flight), flight.storing) == (0, set())
    assert (instance.own, instance.others, sum(instance.levels)) == (0, 0, 0)
    assert [event.code for event in fleet.outcomes() if event.items == LARGE] == ["deadline"] * len(large)


@pytest.mark.parametrize("running", [[], None])
def test_an_executor_that_ends_before_the_outputs_are_stored_loses_no_answer(running: list[bytes] | None) -> None:
    fleet = hung()
    label = fleet.ask(items=LARGE, latency_ms=DEADLINE_MS, seconds=0.2)
    assert len(in_flight(fleet).storing) == 1
    fleet.end_executor("w0", running)
    fleet.start_executor("w0")
    hang_store(fleet, 0.001)
    assert fleet.reply(label, 1.0)["outputs_ref"]["key"]
    [row] = [event for event in fleet.outcomes() if event.items == LARGE]
    assert row.code in (None, "")


def test_a_suspect_that_is_computed_lets_the_next_one_go() -> None:
    fleet = hung()
    labels = fleet.asks(2, items=LARGE, latency_ms=DEADLINE_MS, seconds=0.0005)
    fleet.end_executor("w0", None)
    fleet.start_executor("w0")
    hang_store(fleet)
    fleet.stage.run(1.0)
    flight = in_flight(fleet)
    assert {query.head.id: query.crashes for query in flight.dispatched.values()} == dict.fromkeys(labels, 1)
    assert len(flight.storing) == 2


# -- No worker at all, where one may be started: the refusal says when it can answer.
BOOT_S = 20.0


def from_nothing(**kind: Any) -> Fleet:
    kinds = {"cpu": {"maximum": 1, "boot_s": BOOT_S} | kind}
    settings = convert({"machines": {"provider": "simulated", "kinds": kinds}}, Settings)
    return Fleet(variant(load_ms=3000.0), workers=0, settings=settings)


def ask_again_after(fleet: Fleet) -> float:
    """Seconds, as an answer to a short query says."""
    error = refused(fleet.reply(fleet.ask(latency_ms=1000.0), 1.5), "deadline", "none can be started: ", "worker")
    return error["retry_after_ms"] / 1000.0


def test_who_finds_no_worker_hears_how_long_a_new_one_takes_to_come_and_to_load() -> None:
    """The time counts from the first query that lacks it, and then from what the last one took."""
    fleet = from_nothing()
    began = fleet.stage.now
    load_s = load_seconds(variant(load_ms=3000.0))
    for _ in range(3):
        left = began + BOOT_S - fleet.stage.now
        assert left - 1.5 <= ask_again_after(fleet) - load_s <= left
    fleet.stage.run(30.0)
    assert ask_again_after(fleet) == LOAD_AGAIN, "it is late: nobody knows when it comes"
    fleet.start_worker("w0", seconds=5.0)
    took = fleet.stage.now - 5.0 - began
    assert "outputs" in fleet.reply(fleet.ask(), 5.0)
    fleet.kill_worker("w0")
    fleet.stage.run(fleet.settings.dispatcher.failure_timeout_s + 1.0)
    assert took - 2.0 <= ask_again_after(fleet) - load_s <= took + 2.0


def test_a_machine_that_nobody_asked_for_is_waited_for_anew() -> None:
    fleet = from_nothing()
    first = ask_again_after(fleet)
    fleet.stage.run(10.0 * BOOT_S)
    assert abs(ask_again_after(fleet) - first) < 0.5


@pytest.mark.parametrize("kind", [{"maximum": 0}, {"boot_s": 0.0}])
def test_where_none_may_be_started_or_nothing_is_known_a_query_is_asked_again_soon(kind: dict[str, Any]) -> None:
    assert ask_again_after(from_nothing(**kind)) == LOAD_AGAIN


@pytest.mark.parametrize(("most", "remedy"), [(1, "one starts by itself"), (0, "start it (infaas run)")])
def test_nobody_is_told_to_start_what_starts_by_itself(most: int, remedy: str) -> None:
    fleet = from_nothing(maximum=most)
    refused(fleet.reply(fleet.ask(latency_ms=1000.0), 1.5), "deadline", f"no worker with cpu runs: {remedy}")
