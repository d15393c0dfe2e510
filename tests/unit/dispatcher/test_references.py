"""A variant that alone went wrong is found without labels: a share of the queries is answered once more."""

from typing import Any
from zlib import crc32

import pytest
from msgspec.structs import replace

from bus.messages.catalog import Ensemble
from bus.messages.events import CostEvent
from bus.messages.jobs import OFFLINE, SYSTEM
from bus.messages.public import ListRequest, Requirements
from bus.messages.quality import AppQuality
from infaas.cli.output import missed_words
from services.core.quality import SPARE
from services.core.settings import QualitySettings, Settings
from tests.support.simulated.fleet import Fleet, refused, variant
from tests.unit.dispatcher.test_quality import CHEAP, FLOOR, WRONG, known, labelled, serving

SURE = variant("sure-1", model="sure", accuracy=0.99, base_ms=6.0, per_item_ms=2.0)


def settings(share: float = 1.0) -> Settings:
    return replace(Settings(), quality=QualitySettings(reference_share=share))


def referred(*records: Any, share: float = 1.0, **how: Any) -> Fleet:
    fleet = serving(*(records or (CHEAP, SURE)), settings=settings(share), **how)
    fleet.stage.listen(fleet.subjects.execute("*", "*"))
    return fleet


def asked(fleet: Fleet, count: int, **needs: Any) -> dict[str, Any]:
    """So many queries, one after the other; the last answer."""
    answer = {}
    for _ in range(count):
        answer = fleet.reply(fleet.ask(**needs), 0.05)
    fleet.stage.run(3.0)
    return answer


def qualities(fleet: Fleet) -> list[AppQuality]:
    return [one for one in fleet.records if isinstance(one, AppQuality)]


def test_a_variant_that_alone_went_wrong_is_found_and_another_one_takes_over() -> None:
    fleet = referred()
    assert asked(fleet, 1, **FLOOR)["variant"] == "cheap-1"
    asked(fleet, 29, **FLOOR)
    answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
    assert (answer["variant"], answer["accuracy_source"], answer["missed"]) == ("sure-1", "registered", [])
    answer = fleet.reply(fleet.ask(), 0.05)
    live = known(fleet).variants["cheap-1"]
    assert (answer["variant"], answer["accuracy_source"]) == ("cheap-1", "reference")
    assert answer["accuracy"] == live.accuracy < 0.2
    assert live.high < 0.98
    assert "sure-1" not in known(fleet).variants
    found = fleet.request(fleet.subjects.explain("app"), Requirements(accuracy=0.95))
    [cheap] = [one for one in found["candidates"] if one["variant"] == "cheap-1"]
    assert (found["chosen"]["variant"], cheap["accuracy_source"]) == ("sure-1", "reference")
    items = fleet.request(fleet.subjects.list("variants"), ListRequest())["items"]
    [row] = [one for one in items if one["variant"] == "cheap-1"]
    assert (row["accuracy_source"], row["live"]["source"], row["registered"]) == ("reference", "reference", 0.98)
    [app] = fleet.request(fleet.subjects.list("apps"), ListRequest())["items"]
    assert missed_words(app).startswith(f"app (cheap-1): promised 0.98, found {live.accuracy:.3f}")
    assert f"({row['live']['labels']} references)" in missed_words(app)


def test_while_it_answers_as_its_reference_does_nothing_changes() -> None:
    fleet = referred(says={})
    assert asked(fleet, 100, **FLOOR)["variant"] == "cheap-1"
    live = known(fleet).variants["cheap-1"]
    assert live.low < 0.98 <= live.high
    assert live.labels == len(fleet.copies()) >= 90


def test_when_the_world_goes_back_so_does_the_choice() -> None:
    fleet = referred()
    asked(fleet, 30, **FLOOR)
    assert asked(fleet, 1, **FLOOR)["variant"] == "sure-1"
    fleet.behave(says={})
    assert asked(fleet, 60, **FLOOR)["variant"] == "cheap-1"


def test_a_variant_of_few_samples_is_explored_by_offline_work_before_it_gets_queries() -> None:
    """It is loaded and idle, and too inaccurate for those that come; what it does is known when one comes that it suffices for."""
    new = variant("new-1", model="new", accuracy=0.96, accuracy_low=0.86, accuracy_high=0.99, base_ms=1.0)
    fleet = referred(CHEAP, SURE, new, says={"new": 1.0})
    asked(fleet, 120, accuracy=0.97)
    assert {one.variant for one in fleet.outcomes()} == {"cheap-1"}
    assert {one.variant for one in fleet.copies()} == {"sure-1", "new-1"}
    live = known(fleet).variants["new-1"]
    assert live.high < 0.5
    assert live.source == "reference"
    assert asked(fleet, 1, accuracy=0.95)["variant"] == "cheap-1", "by its samples it would be the cheapest"
    fleet = referred(CHEAP, SURE, replace(new, accuracy_low=0.95, accuracy_high=0.97), says={})
    asked(fleet, 40, accuracy=0.97)
    assert {one.variant for one in fleet.copies()} == {"sure-1"}, "it is known well enough"


def test_it_is_offline_work_that_the_system_pays_and_no_demand() -> None:
    fleet = referred(says={})
    fleet.stage.run(20.0)
    before = len(fleet.stage.records)
    asked(fleet, 20)
    fleet.stage.run(20.0)
    rows = fleet.copies()
    assert {(one.variant, one.policy, one.priority, one.latency_ms) for one in rows} == {("sure-1", OFFLINE, 9, None)}
    assert {one.id for one in rows} == {f"reference/{one.uid.hex()}" for one in fleet.outcomes()}
    costs = [one for _, one in fleet.stage.records[before:] if isinstance(one, CostEvent) and one.variant == "sure-1"]
    by = {app: sum(one.cost for one in costs if one.app == app) for app in ("app", SYSTEM)}
    assert 0.0 < by[SYSTEM] < 0.05 * by["app"]
    assert fleet.dispatcher()._demand.report(fleet.stage.now, {}) is not None
    answers = [one for one in fleet.stage.heard if ".reference" in one[1]]
    assert answers == []


@pytest.mark.parametrize(
    "why", ["none", "ensemble", "no idle one", "less accurate", "not loaded", "another metric", "remote", "killed"]
)
def test_who_is_not_asked_again(why: str) -> None:
    sure = {
        "less accurate": replace(SURE, accuracy=0.97),
        "another metric": replace(SURE, metric="top5"),
        "remote": replace(SURE, hardware="remote"),
    }.get(why, SURE)
    fleet = Fleet(CHEAP, sure, settings=settings(0.0 if why == "none" else 1.0), says=WRONG)
    fleet.stage.listen(fleet.subjects.execute("*", "*"))
    for record in (CHEAP,) if why == "not loaded" else (CHEAP, sure):
        fleet.order(record, seconds=0.5)
    if why == "ensemble":
        fleet.change(selection=Ensemble(policy="majority"), seconds=0.1)
    if why == "no idle one":
        fleet.behave(late={"sure": 1000.0})
        fleet.ask(model="sure", seconds=0.1)
    asked(fleet, 3)
    if why == "killed":
        fleet.behave(late={"sure": 1000.0})
        asked(fleet, 1)
        fleet.end_executor("w0", seconds=0.1)
        fleet.start_executor("w0", seconds=3.0)
        assert len(fleet.copies()) == 4
        return
    assert fleet.copies() == []
    assert not qualities(fleet)


def test_as_large_a_share_as_the_settings_say() -> None:
    fleet = referred(share=0.2, says={})
    asked(fleet, 400)
    assert 50 <= len(fleet.copies()) <= 110


def test_more_are_asked_for_after_one_that_disagrees_and_no_more_than_twice_the_share_in_the_long_run() -> None:
    fleet = referred(share=0.02)
    assert asked(fleet, 150, **FLOOR)["variant"] == "sure-1"
    assert sum(crc32(one.uid) < 0.02 * 2**32 for one in fleet.outcomes()) < 10, "by the share alone it is not found yet"
    fleet = referred(
        replace(CHEAP, accuracy=0.6), replace(SURE, accuracy=0.61), share=0.02
    )  # disagreeing shows nothing
    asked(fleet, 3000)
    by_share = sum(crc32(one.uid) < 0.02 * 2**32 for one in fleet.outcomes())
    assert by_share + 20 < len(fleet.copies()) <= 2 * by_share + SPARE


@pytest.mark.parametrize("right", ["labels", "reference"])
def test_labels_win_over_references(right: str) -> None:
    fleet = referred(says={"sure": 1.0} if right == "labels" else WRONG)
    asked(fleet, 30, **FLOOR)
    assert known(fleet).variants["cheap-1"].source == "reference"
    answer = labelled(fleet, 60)
    live = known(fleet).variants["cheap-1"]
    assert live.source == "labels"
    assert (live.high < 0.5) == (right == "reference")
    assert answer["variant"] == "cheap-1"


def test_a_kept_answer_and_two_dispatchers() -> None:
    fleet = referred(dispatchers=2)
    fleet.change(selection=Ensemble(cache_mb=1.0), seconds=0.1)
    asked(fleet, 60)
    assert 0 < len(fleet.copies()) <= 2  # equal queries are computed once
    fleet.change(selection=None, seconds=0.1)
    asked(fleet, 40, **FLOOR)
    assert {fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] for _ in range(6)} == {"sure-1"}
    fleet.stage.kill("d0")
    fleet.start_dispatcher("next", seconds=1.0)
    assert {fleet.reply(fleet.ask(**FLOOR), 0.05)["variant"] for _ in range(6)} == {"sure-1"}


@pytest.mark.parametrize("shown_by", ["labels", "labels that are early", "references"])
def test_an_app_that_refuses_comes_back_and_answers_nobody_before(shown_by: str) -> None:
    sure = replace(SURE, accuracy=0.94)
    fleet = referred(CHEAP, sure, share=0.1)
    fleet.change(quality_act="refuse")
    labelled(fleet, 30, **FLOOR)
    refused(fleet.reply(fleet.ask(**FLOOR), 0.05), "unsatisfiable", "accuracy")
    before, rows = len(fleet.copies()), len(fleet.outcomes())
    fleet.behave(says={})
    fleet.end_executor("w0", seconds=0.1)  # nothing is loaded any more, and nobody else asks for it
    fleet.start_executor("w0", seconds=3.0)
    answered = 0
    for number in range(150):
        name = fleet.ask(id=f"r{number}", seconds=0.0005, **FLOOR)
        if shown_by == "labels":
            fleet.stage.run(0.1)
        if shown_by != "references":
            fleet.stage.publish(fleet.subjects.feedback("app"), {"id": name, "label": 0}, "", 0.0)
        answered += "error" not in fleet.reply(name, 0.5)
    fleet.stage.run(3.0)
    assert len(fleet.copies()) > before + 50
    assert len(fleet.outcomes()) == rows + 150, "a copy has no row"
    live = known(fleet).variants["cheap-1"]
    if shown_by == "references":
        assert answered == 0, "labels have said that it is wrong, and none say otherwise"
        return
    assert live.accuracy > 0.9
    assert 1 < answered < 120
    answer = fleet.reply(fleet.ask(**FLOOR), 0.05)
    assert (answer["variant"], answer["accuracy_source"], answer["missed"]) == ("cheap-1", "registered", [])


def test_an_app_does_not_compute_what_it_refuses_where_references_are_off() -> None:
    fleet = referred(CHEAP, share=0.0)
    fleet.change(quality_act="refuse")
    labelled(fleet, 30, **FLOOR)
    asked(fleet, 20, **FLOOR)
    assert fleet.copies() == []
