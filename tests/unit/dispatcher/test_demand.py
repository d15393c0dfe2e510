"""Dispatchers tell what they were asked for, by needs and by the worker that took it."""

from bus.codec import decode
from bus.messages.scaling import DemandReport
from tests.fleet import Fleet, variant


def reports(fleet: Fleet) -> list[DemandReport]:
    return [decode(DemandReport, body) for _, subject, body in fleet.stage.heard if ".demand." in subject]


def test_served_and_refused_items_are_told_apart() -> None:
    fleet = Fleet(variant(load_ms=50.0))
    fleet.stage.listen("infaas.demand.*")
    fleet.ask(latency_ms=1000.0)  # nobody has it yet: waits for the load
    fleet.stage.run(1.0)
    for _ in range(5):
        fleet.ask(latency_ms=1000.0)
    fleet.stage.run(1.6)
    rows = [row for report in reports(fleet) for row in report.rows]
    assert sum(row.items for row in rows if row.worker == "") == 1
    assert sum(row.items for row in rows if row.worker == "w0") == 5
    assert {(row.app, row.latency_ms) for row in rows} == {("app", 1000.0)}
    assert reports(fleet)[-1].rows == []  # and that it is over
    told = len(reports(fleet))
    fleet.stage.run(3.0)
    assert len(reports(fleet)) == told
