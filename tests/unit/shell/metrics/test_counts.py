"""What is counted of recorded events."""

from bus.messages.events import ClientError, CostEvent, JobEvent, OutcomeEvent, ScalingEvent, WorkerEvent
from bus.messages.jobs import OFFLINE
from services.core.metric import Histogram, MetricFamily
from services.shell.metrics.counts import EventTotals
from tests.support.data.events import event


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def outcome(app: str = "a", outcome: str = "ok", **more: object) -> OutcomeEvent:
    fields = {"variant": "v", "latency_ms": 20.0, "accuracy": 0.9, "cost": 0.5, "policy": "infaas", **more}
    return OutcomeEvent(time=1.0, uid=b"u", id=None, app=app, outcome=outcome, **fields)


def values(tally: EventTotals, name: str) -> dict[tuple[str, ...], float | Histogram]:
    (family,) = (family for family in tally.families() if family.name == name)
    assert isinstance(family, MetricFamily)
    return {tuple(labels.values()): value for labels, value in family.samples}


def test_outcomes() -> None:
    clock = Clock()
    tally = EventTotals(clock)
    refused = outcome(outcome="refused", variant=None, code="deadline", accuracy=None, cost=0.0)
    tally.fold("outcome", [outcome(), outcome(accuracy=0.7, variant="w"), outcome(outcome="late"), refused])
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 2, ("a", "late"): 1, ("a", "refused"): 1}
    assert values(tally, "infaas_refusals_total") == {("a", "deadline"): 1}
    assert values(tally, "infaas_answers_total") == {("a", "v"): 2, ("a", "w"): 1}
    assert values(tally, "infaas_query_cost_dollars_total") == {("a", "v"): 1.0, ("a", "w"): 0.5}
    assert values(tally, "infaas_slo_attainment_ratio") == {("a",): 0.5}
    assert values(tally, "infaas_effective_accuracy_ratio") == {("a",): 0.8}
    assert values(tally, "infaas_rated_answers_total") == {("a",): 2}
    latency = values(tally, "infaas_query_latency_seconds")["a",]
    assert isinstance(latency, Histogram)
    assert latency.count == 3  # refusals are no answers


def test_the_ratios_are_of_the_last_minute() -> None:
    clock = Clock()
    tally = EventTotals(clock)
    tally.fold("outcome", [outcome(outcome="late")] * 8)
    for clock.now in range(0, 100, 5):
        tally.fold("outcome", [outcome()])
    assert values(tally, "infaas_slo_attainment_ratio") == {("a",): 1.0}
    clock.now = 300.0
    tally.families()
    clock.now = 400.0
    assert values(tally, "infaas_slo_attainment_ratio") == {}  # nothing was offered
    assert values(tally, "infaas_queries_total") == {("a", "late"): 8, ("a", "ok"): 20}


def test_names_that_anybody_may_invent_make_no_series() -> None:
    tally = EventTotals(Clock(), most=3)
    strange = [outcome(f"x{i}", "refused", code="unknown_app", variant=None) for i in range(1000)]
    tally.fold("outcome", strange)
    assert values(tally, "infaas_queries_total") == {}
    assert values(tally, "infaas_client_errors_total") == {("unknown_app",): 1000}
    tally.fold("outcome", [outcome(f"app{i}", variant=f"v{i}") for i in range(10)])
    queries = values(tally, "infaas_queries_total")
    assert sum(queries.values()) == 10
    assert len(queries) <= 4
    assert len(values(tally, "infaas_answers_total")) <= 4
    assert queries["_other", "ok"] == 7


def test_what_clients_did_wrong_lowers_no_ratio() -> None:
    tally = EventTotals(Clock())
    failed = [
        outcome("a", end, code=code, variant=None)
        for end, code in (("refused", "bad_request"), ("error", "bad_request"), ("refused", "overloaded"))
    ]
    tally.fold("outcome", [outcome("a"), *failed, outcome("a", "default", code="unknown_model")])
    tally.fold("client-error", [event(ClientError, code="bad_request", count=5)])
    assert values(tally, "infaas_client_errors_total") == {("bad_request",): 7}
    assert values(tally, "infaas_refusals_total") == {("a", "overloaded"): 1}
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 1, ("a", "refused"): 1, ("a", "default"): 1}


def test_offline_work_is_no_query() -> None:
    tally = EventTotals(Clock())
    tally.fold("outcome", [outcome(policy=OFFLINE)])
    assert values(tally, "infaas_queries_total") == {}
    assert values(tally, "infaas_offline_chunks_total") == {("ok",): 1}


def test_the_parts_of_a_query_are_no_queries() -> None:
    tally = EventTotals(Clock())
    parts = [outcome(parent=b"u", stage=f"m{i}", variant=f"m{i}-v1", outcome="ok" if i else "late") for i in range(5)]
    whole = outcome(variant=None, confidence=0.8, missing=1, cost=2.5, accuracy=0.8)
    unsure = outcome(outcome="default", variant=None, confidence=0.4, missing=0, code="confidence", accuracy=None)
    tally.fold("outcome", [*parts[:2], whole, *parts[2:], unsure, outcome(variant=None, missing=0, accuracy=0.6)])
    assert values(tally, "infaas_queries_total") == {("a", "ok"): 2, ("a", "default"): 1}
    assert values(tally, "infaas_parts_total") == {
        ("a", "m0", "m0-v1", "late"): 1,
        **{("a", f"m{i}", f"m{i}-v1", "ok"): 1 for i in range(1, 5)},
    }
    assert values(tally, "infaas_query_cost_dollars_total") == {("a", ""): 3.5}, "parts are in their query's"
    assert values(tally, "infaas_effective_accuracy_ratio") == {("a",): 0.7}
    assert values(tally, "infaas_default_outputs_total") == {("a", "confidence"): 1}
    confidence = values(tally, "infaas_answer_confidence_ratio")["a",]
    assert isinstance(confidence, Histogram)
    assert (confidence.count, confidence.total) == (2, 0.8 + 0.4)


def test_costs_scaling_and_jobs() -> None:
    tally = EventTotals(Clock())
    row = CostEvent(
        time=1.0, seconds=10.0, worker="w", hardware="cpu", app="a", model="m", variant="v", busy_seconds=2.0, cost=3.0
    )
    idle = CostEvent(
        time=1.0,
        seconds=10.0,
        worker="w",
        hardware="cpu",
        app=None,
        model=None,
        variant=None,
        busy_seconds=0.0,
        cost=1.0,
    )
    tally.fold("cost", [row, row, idle])
    assert values(tally, "infaas_cost_dollars_total") == {
        ("w", "cpu", "a", "v", "false"): 6.0,
        ("w", "cpu", "_idle", "_idle", "false"): 1.0,
    }
    assert values(tally, "infaas_busy_seconds_total")["w", "cpu", "a", "v", "false"] == 4.0
    action = ScalingEvent(
        time=1.0, scaler="model", worker="w", app="a", model="m", variant="v", action="evict", count=1, reason="?"
    )
    tally.fold("scaling", [action, action])
    assert values(tally, "infaas_scaling_actions_total") == {("model", "evict"): 2}
    moves = [("Booting", "Ready"), ("Ready", "Ready")]
    changes = [
        WorkerEvent(time=1.0, worker="w", hardware="cpu", from_state=old, to_state=new, reason="?")
        for old, new in moves
    ]
    tally.fold("worker", changes)
    assert values(tally, "infaas_worker_changes_total") == {("Ready",): 1}
    job = JobEvent(
        time=1.0,
        job="j",
        app="a",
        model=None,
        variant=None,
        accuracy=None,
        input="i",
        output="o",
        total=1,
        done=0,
        failed=0,
        reason=None,
        cost=0.0,
        created=0.0,
        started=None,
        finished=None,
        state="running",
    )
    tally.fold("job", [job])
    assert values(tally, "infaas_jobs_ended_total") == {}
    assert values(tally, "infaas_events_total") == {("cost",): 3, ("scaling",): 2, ("worker",): 2, ("job",): 1}
