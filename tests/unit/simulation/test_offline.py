"""Offline jobs in the simulator: each input once, whoever dies; nothing while the worker has more urgent work; the same twice."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.messages.events import Event, JobEvent, OutcomeEvent
from bus.messages.jobs import OFFLINE, Chunk
from services.jobs.commands import Assemble, ChunkRange
from services.jobs.runner.edge import ACK_WAIT_S
from services.simulation.offline import BODY, WorkQueue
from services.simulation.report import MEASURED, JobCounts, RunReport
from services.simulation.run import Run, simulate
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario

FIG8 = Path(__file__).resolve().parents[3] / "benches" / "paper" / "fig8.toml"
BASE = """
[scenario]
name = "offline"
duration_s = {duration}
seed = 1
policies = ["static"]
metrics_every_s = 1.0
[[app]]
name = "a"
latency_ms = 500
[[variant]]
app = "a"
model = "m"
name = "fast"
hardware = "cpu"
batch_latency_ms = {{ 1 = 20.0, 8 = 90.0 }}
accuracy = 0.7
load_s = 1.0
memory_gb = 1.0
uses = {{ cpu_cores = 4 }}
[[worker]]
kind = "cpu"
devices = {{ cpu = 4 }}
price_per_hour = 0.4
start = {workers}
max = {workers}
[baseline]
a = {{ variant = "fast", instances = {workers} }}
[[load]]
app = "a"
arrivals = "uniform"
rate = {rate}
[[job]]
app = "a"
at_s = 1
inputs = {inputs}
"""


def scenario(tmp_path: Path, more: str = "", **given: Any) -> Scenario:
    """One app whose instances take all four cores of a worker: 20 ms for one item."""
    fields = {"duration": 20, "workers": 1, "rate": 1, "inputs": 200} | given
    path = tmp_path / "offline.toml"
    path.write_text(BASE.format(**fields) + more)
    return read_scenario(path)


class Watched(Run):
    """A run that notes what was delivered, appended and recorded."""

    def __init__(self, given: Scenario) -> None:
        self.chunks: list[ChunkRange] = []
        self.delivered: list[int] = []
        self.outcomes: list[OutcomeEvent] = []
        super().__init__(given, given.policies[0], RunReport.of(given, given.policies[0]))
        offline = self.system.offline
        coordinate, take = offline.coordinate, offline.queue.take

        def coordinating(command: Any) -> tuple[float, Any]:
            if isinstance(command, Assemble):
                self.chunks += command.chunks
            return coordinate(command)

        def taking(now: float) -> tuple[int, Chunk] | None:
            found = take(now)
            self.delivered += [found[1].number] if found is not None else []
            return found

        offline.coordinate, offline.queue.take = coordinating, taking  # type: ignore[method-assign]

    def _recorded(self, name: str, event: Event) -> None:
        super()._recorded(name, event)
        if isinstance(event, OutcomeEvent) and event.policy == OFFLINE:
            self.outcomes.append(event)


def run(given: Scenario) -> dict[str, Any]:
    return simulate(given, given.policies[0], RunReport.of(given, given.policies[0]))


def rate(result: dict[str, Any], begin: int, end: int) -> float:
    """Outputs/s from one second to another."""
    return float(sum(result["series"]["offline_done"][begin:end])) / (end - begin)


def test_each_input_is_computed_and_written_once(tmp_path: Path) -> None:
    watched = Watched(scenario(tmp_path))
    result = watched()
    [job] = result["jobs"]
    assert (job["app"], job["inputs"], job["done"]) == ("a", 200, 200)
    assert 1.0 < job["finished_s"] < 20.0
    assert sum(result["series"]["offline_done"]) == pytest.approx(200)
    assert [item for chunk in watched.chunks for item in range(chunk.first, chunk.first + chunk.items)] == list(
        range(200)
    )
    assert len(watched.delivered) == len(set(watched.delivered)) == len(watched.chunks)
    assert sorted(event.items for event in watched.outcomes) == sorted(chunk.items for chunk in watched.chunks)
    assert len({event.uid for event in watched.outcomes}) == len(watched.chunks)
    assert len(watched.system.offline.queue) == 0
    assert not watched.system.offline.parts


def test_chunks_aboard_a_worker_that_dies_are_computed_by_another(tmp_path: Path) -> None:
    dies = '[[fault]]\nkind = "worker-dies"\nat_s = 3\n'
    watched = Watched(scenario(tmp_path, dies, workers=2, inputs=600, duration=40))
    [job] = watched()["jobs"]
    again = len(watched.delivered) - len(set(watched.delivered))
    assert again > 0, "nothing was aboard: the test shows nothing"
    assert (job["done"], job["finished_s"] is not None) == (600, True)
    assert [item for chunk in watched.chunks for item in range(chunk.first, chunk.first + chunk.items)] == list(
        range(600)
    )
    assert len({event.uid for event in watched.outcomes}) == len(watched.chunks)  # each is charged once
    assert len({event.worker for event in watched.outcomes}) == 2


def test_it_waits_while_others_use_the_worker_and_not_for_itself(tmp_path: Path) -> None:
    busy = "[[0, 30], [9.9, 30], [10, 1]]"  # 20 ms on all cores: 60 %, then 2 %
    result = run(scenario(tmp_path, rate=busy, inputs=10**6))
    assert rate(result, 0, 10) == 0.0
    assert rate(result, 12, 20) > 20.0
    assert result["series"]["utilisation"][-1] > 0.8


@pytest.mark.parametrize(("factor", "pauses"), [(1.0, False), (3.0, True)])
def test_it_waits_while_an_online_variant_is_slower_than_its_profile(
    tmp_path: Path, factor: float, pauses: bool
) -> None:
    slow = f'[[fault]]\nkind = "device-slow"\nat_s = 6\nuntil_s = 14\nfactor = {factor}\n'
    result = run(scenario(tmp_path, slow, rate=4, inputs=10**6))
    assert rate(result, 3, 6) > 20.0
    assert (rate(result, 9, 14) < 1.0) is pauses
    assert rate(result, 16, 20) > 20.0


def test_online_queries_do_not_notice_a_job_beside_them() -> None:
    """The figure's own scenario, its first plateau."""
    given = replace(read_scenario(FIG8, policies=["static"]), duration_s=45.0)
    beside, alone = run(given), run(replace(given, jobs=()))
    assert beside["jobs"][0]["done"] > 20
    for what in ("queries", "answered", "slo_violation_ratio", "p50_ms", "p99_ms", "apps"):
        assert beside[what] == alone[what]
    assert (alone["jobs"], "offline_done" in alone["series"]) == ([], False)


def test_a_job_keeps_an_instance_that_no_query_needs_until_it_has_ended() -> None:
    """The plan marks it as reclaimable, and it goes on computing: on a paid machine it costs nothing more."""
    given = replace(read_scenario(FIG8, policies=["infaas"]), duration_s=40.0, metrics_every_s=1.0)
    calm = replace(given, loads=(replace(given.loads[0], rate=((0.0, 3.0),)),))
    short = replace(calm, jobs=(replace(calm.jobs[0], inputs=5),))
    for one, then in ((calm, ["release"]), (short, ["release", "unload"])):
        result = run(one)
        changes = [row for row in result["scaling"]["decisions"] if row["variant"] == "resnet50-pytorch-cpu"]
        assert [row["action"] for row in changes] == ["load", *then]
        [job] = result["jobs"]
        if one is short:
            assert (job["done"], changes[-1]["reason"]) == (5, "no offline job needs it any more")
        else:
            assert changes[-1]["time"] < 5
            assert rate(result, 5, 40) > 1.0


def test_a_job_that_nothing_can_compute_is_refused_and_told(tmp_path: Path) -> None:
    given = scenario(tmp_path, duration=5)
    given = replace(given, jobs=(replace(given.jobs[0], accuracy=0.9), given.jobs[0]))
    refused, other = run(given)["jobs"]
    assert (refused["done"], refused["finished_s"]) == (0, None)
    assert refused["reason"] == "accuracy: no variant reaches 0.9, the most accurate one has 0.7"
    assert (other["done"] > 0, "reason" in other) == (True, False)


def test_a_job_can_name_its_variant() -> None:
    """By cost the other one would do as well."""
    for name in ("resnet50-tf-cpu", "resnet50-pytorch-cpu"):
        given = replace(read_scenario(FIG8, policies=["static"]), duration_s=10.0)
        watched = Watched(replace(given, jobs=(replace(given.jobs[0], model=None, variant=name),)))
        watched()
        assert {event.variant for event in watched.outcomes} == {name}


def test_the_same_scenario_gives_the_same_result(tmp_path: Path) -> None:
    given = scenario(tmp_path, '[[fault]]\nkind = "worker-dies"\nat_s = 4\n', workers=2, rate=20)
    first, second = ({key: value for key, value in run(given).items() if key not in MEASURED} for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


def chunk(number: int) -> Chunk:
    return Chunk("j", number, number, 1, BODY)


def test_a_chunk_comes_back_unless_its_runner_is_done_with_it_in_time() -> None:
    queue = WorkQueue()
    for number in range(3):
        queue.put(chunk(number))
    taken = [queue.take(0.0) for _ in range(4)]
    assert [found and found[1].number for found in taken] == [0, 1, 2, None]
    numbers = [found[0] for found in taken if found is not None]
    queue.done(numbers[0])
    queue.hold(numbers[1], 8.0)  # still at work
    assert queue.take(ACK_WAIT_S - 0.1) is None
    assert queue.take(ACK_WAIT_S) == (numbers[2], chunk(2))
    queue.hold(numbers[2], ACK_WAIT_S + 1.0)  # given back, for later
    queue.put(chunk(3))
    assert [queue.take(9.0) for _ in range(4)] == [(numbers[2], chunk(2)), (numbers[1], chunk(1)), (4, chunk(3)), None]
    assert len(queue) == 3
    for number in (2, 3, 4):
        queue.done(number)
        queue.done(number)
    assert (len(queue), queue.take(100.0)) == (0, None)


def test_what_is_written_after_the_end_does_not_count() -> None:
    tally = JobCounts(every_s=2.0, duration_s=5.0)
    assert tally.series(3) == {}
    tally.job("j", "a", 10)
    for at, items in ((0.0, 1), (1.9, 2), (4.5, 3), (5.0, 4)):
        tally.written("j", items, at)
    tally.event(event("done"), 5.5)
    assert tally.rows() == [{"app": "a", "inputs": 10, "done": 6, "finished_s": None}]
    assert tally.series(4) == {"offline_done": [1.5, 0.0, 3.0, 0.0]}  # the third interval is half as long
    tally.event(event("failed", "input: no"), 4.0)
    assert tally.rows()[0]["reason"] == "input: no"


def event(state: str, reason: str | None = None) -> JobEvent:
    return JobEvent(
        time=1.0, job="j", app="a", model=None, variant=None, accuracy=None, input="", output="", state=state, total=10,
        done=6, failed=0, reason=reason, cost=0.0, created=0.0, started=None, finished=None,
    )  # fmt: skip
