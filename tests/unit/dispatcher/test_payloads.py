"""Which queries are kept with their answers, as an app's owner says: by what their clients asked."""

from typing import Any

from bus.messages.flow import Execute
from tests.support.simulated.fleet import Fleet, variant
from tests.unit.dispatcher.test_join import Several
from tests.unit.dispatcher.test_pipelines import CHAIN, Staged


def listening(fleet: Fleet) -> Any:
    """To what executors are sent."""
    fleet.stage.listen(fleet.subjects.execute("*", "*"))
    return fleet


def routes(fleet: Fleet) -> list[Execute]:
    return fleet.sent(Execute, "execute")


def test_as_large_a_share_of_an_apps_queries_is_kept_as_its_owner_says() -> None:
    """set-app --payloads; none by default."""
    record = variant("m-1")
    fleet = listening(Fleet(record))
    fleet.order(record, seconds=0.5)
    fleet.each(fleet.asks(20), 1.0)
    assert not any(one.route.keep for one in routes(fleet))
    fleet.change(payloads=0.5)
    fleet.each(fleet.asks(200), 5.0)
    kept = [one.route.keep for one in routes(fleet)[20:]]
    assert 60 < sum(kept) < 140
    fleet.change(payloads=0.0)
    fleet.each(fleet.asks(20), 1.0)
    assert not any(one.route.keep for one in routes(fleet)[220:])


def test_of_an_ensembles_members_the_first_keeps_it() -> None:
    fleet = listening(Several())
    fleet.change(payloads=1.0)
    fleet.one(fleet.ask())
    assert sorted(one.route.keep for one in routes(fleet)) == [False] * 4 + [True]


def test_all_stages_of_a_pipeline_keep_the_same_queries_under_the_name_that_its_client_knows() -> None:
    fleet = listening(Staged(CHAIN))
    for app in "ab":
        fleet.change(app, payloads=0.5)
    fleet.each(fleet.asks(40, "p"), 10.0)
    kept: dict[str, set[str | None]] = {"a": set(), "b": set()}
    for one in routes(fleet):
        assert one.route.origin is not None
        if one.route.keep:
            kept[one.route.app].add(one.route.origin.route.id)
    assert 5 < len(kept["a"]) < 35
    assert kept["a"] == kept["b"]
