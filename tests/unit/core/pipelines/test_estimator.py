"""The estimator against a simulation that follows single queries."""

from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import PipelineEdge, PipelineRecord, PipelineVertex
from services.core.pipelines.branching import visits
from services.core.pipelines.estimator import LatencyEstimator, MeasuredHop, at_percentile, resampled
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.queueing import StageConfiguration, served
from tests.support.data.examples import examples
from tests.support.data.pipelines import Floats, chain, gamma_arrivals


def stage(fixed: float, item: float, batch: int, replicas: int) -> StageConfiguration:
    return StageConfiguration((0.0, *(fixed + item * n for n in range(1, batch + 1))), batch, replicas)


def one_by_one(ready: list[float], stage: StageConfiguration, hops: Floats | None = None) -> list[float]:
    """When each query's batch ends: events in order of time, one queue by deadline, which is the order of the list."""
    waiting: list[int] = []
    idle, begun, ends = stage.replicas, 0, [0.0] * len(ready)
    events = [(at, 1, i) for i, at in enumerate(ready)]
    events.sort()
    while events:
        at, kind, which = heappop(events)
        if kind:
            heappush(waiting, which)
        else:
            idle += 1
        if events and events[0][0] == at:
            continue  # all that happens at this moment happens before a batch begins
        while idle and waiting:
            batch = [heappop(waiting) for _ in range(min(stage.batch, len(waiting)))]
            idle -= 1
            end = at + stage.seconds[len(batch)] + (0.0 if hops is None else float(hops[begun]))
            begun += len(batch)
            for query in batch:
                ends[query] = end
            heappush(events, (end, 0, 0))
    return ends


def reference(
    graph: PipelineGraph, arrivals: Floats, stages: dict[str, StageConfiguration], hop: float = 0.0
) -> Floats:
    visited = visits(graph, np.arange(len(arrivals), dtype=np.uint64))
    known: dict[str, Floats] = {}
    for name in graph.order:
        before = np.max([known[edge.source] for edge in graph.into[name]] or [arrivals], axis=0)
        rows = np.repeat(np.arange(len(arrivals)), visited[name])
        known[name] = before.copy()
        one = stages[name]
        turnaround = StageConfiguration((0.0, *(each + hop for each in one.seconds[1:])), one.batch, one.replicas)
        np.maximum.at(known[name], rows, one_by_one(before[rows].tolist(), turnaround))
    found: Floats = np.max([known[name] for name in graph.sinks], axis=0) + hop - arrivals
    return found


DIAMOND = PipelineRecord(
    vertices=[PipelineVertex(name=name, app="app") for name in "abcd"],
    edges=[
        PipelineEdge(source="a", target="b", probability=0.5),
        PipelineEdge(source="a", target="c"),
        PipelineEdge(source="b", target="d"),
        PipelineEdge(source="c", target="d"),
    ],
    output={"y": "d.y"},
)
FANNED = PipelineRecord(  # three items of an answer of a, each with some of its own; d is asked once for all that b was asked for
    vertices=[
        PipelineVertex(name=name, app="app", inputs={"x": text})
        for name, text in (("a", "$.x"), ("b", "a.y"), ("c", "b.y"), ("d", "b.y"))
    ],
    edges=[
        PipelineEdge(source="a", target="b", items="y", items_mean=3.0, items_dispersion=2.0),
        PipelineEdge(source="b", target="c", items="y", items_mean=0.8),
        PipelineEdge(source="b", target="d"),
    ],
    output={"y": "c.y", "z": "d.y"},
)
MS = st.integers(1, 40)
STAGES = st.builds(
    lambda fixed, item, batch, replicas: stage(fixed / 1000, item / 1000, batch, replicas),
    st.integers(0, 40),
    MS,
    st.sampled_from([1, 1, 2, 3, 8]),
    st.integers(1, 5),
)


@given(
    gaps=st.lists(st.integers(0, 60), min_size=1, max_size=120),
    stages=st.tuples(STAGES, STAGES, STAGES, STAGES),
    record=st.sampled_from([chain(4), DIAMOND, FANNED]),
)
@settings(max_examples=examples(150), deadline=None)
def test_it_agrees_with_single_queries(
    gaps: list[int], stages: tuple[StageConfiguration, ...], record: PipelineRecord
) -> None:
    """Any arrivals, batches and replicas. No two queries arrive at exactly the same time, as on a real bus."""
    graph = PipelineGraph(record)
    arrivals = np.cumsum(np.array(gaps)) / 1000.0 + np.arange(len(gaps)) * np.pi * 1e-6
    configured = dict(zip(graph.order, stages, strict=True))
    found = LatencyEstimator(graph, arrivals).latencies(configured)
    assert found == pytest.approx(reference(graph, arrivals, configured), abs=1e-9)


@pytest.mark.parametrize("cv", [1.0, 2.0])
@pytest.mark.parametrize(
    "stages",
    [
        [stage(0.01, 0.005, 8, 5)] * 4,
        [stage(0.0, 0.02, 1, 8)] * 4,
        [stage(0.01, 0.01, 2, 6), stage(0.002, 0.001, 4, 1)] * 2,
    ],
)
@pytest.mark.parametrize("record", [chain(4), DIAMOND, FANNED], ids=["chain", "diamond", "fanned"])
def test_long_samples_agree_too(record: PipelineRecord, stages: list[StageConfiguration], cv: float) -> None:
    graph = PipelineGraph(record)
    arrivals = gamma_arrivals(250, cv, 40, seed=3)
    configured = dict(zip(graph.order, stages, strict=True))
    found = LatencyEstimator(graph, arrivals, hop=MeasuredHop(0.3)).latencies(configured)
    assert found == pytest.approx(reference(graph, arrivals, configured, 0.0003), abs=1e-7)


@pytest.mark.parametrize(
    "configured",
    [
        stage(0.01, 0.01, 2, 7),  # side by side
        stage(0.01, 0.005, 8, 3),
        stage(0.002, 0.0031, 4, 2),
        stage(0.01, 0.005, 8, 8),
        stage(0.02, 0.01, 6, 5),  # no power of two
        stage(0.08, 0.03, 8, 40),
        stage(0.08, 0.03, 16, 40),  # one after the other
        stage(0.005, 0.002, 16, 4),  # most find an idle replica
        stage(0.0, 0.02, 1, 7),
    ],
    ids=str,
)
def test_short_cuts_change_nothing(configured: StageConfiguration) -> None:
    """Many queries, some of which have overtaken others."""
    arrivals = gamma_arrivals(300, 2.0, 400, seed=8)[:110_000]
    ready = arrivals + 0.02 * (np.arange(len(arrivals)) % 7 == 0)
    assert np.allclose(served(ready, configured), one_by_one(ready.tolist(), configured), rtol=0.0, atol=1e-7)


@given(
    queries=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0, 0, 1, 5, 20, 400])), min_size=1, max_size=300),
    configured=STAGES,
    overtaken=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=examples(150), deadline=None)
def test_each_batch_may_have_a_hop_of_its_own(
    queries: list[tuple[int, int]], configured: StageConfiguration, overtaken: float
) -> None:
    gaps, hops = np.array(queries).T / 1000.0
    arrivals = np.cumsum(gaps) + np.arange(len(gaps)) * np.pi * 1e-6
    ready = arrivals + overtaken * (np.arange(len(gaps)) % 7 == 0)
    expected = one_by_one(ready.tolist(), configured, hops)
    assert served(ready, configured, hops) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("configured", [stage(0.01, 0.005, 8, 3), stage(0.0, 0.01, 1, 7)], ids=str)
def test_short_cuts_change_nothing_where_hops_vary(configured: StageConfiguration) -> None:
    arrivals = gamma_arrivals(300, 2.0, 400, seed=8)[:110_000]
    ready = arrivals + 0.02 * (np.arange(len(arrivals)) % 7 == 0)
    hops = 0.002 + 0.05 * (np.arange(len(arrivals)) % 97 == 0)
    expected = one_by_one(ready.tolist(), configured, hops)
    assert np.allclose(served(ready, configured, hops), expected, rtol=0.0, atol=1e-7)


def test_long_hops_and_batches_outlast_single_queries_that_began_after_them() -> None:
    """The third query waits, and one of two replicas needs 100 s for it. The other serves single queries meanwhile, until two come together."""
    alone = StageConfiguration((0.0, 0.5), 1, 2)
    ready = np.array([0.0, 0.01, 0.02, *(1.1 + 0.6 * n for n in range(100)), 70.0, 70.1])
    hops = 100.0 * (np.arange(len(ready)) == 2)
    assert served(ready, alone, hops)[-2:] == pytest.approx([70.5, 71.0])
    # One of two replicas serves a batch of four for 100 s. Two queries that come together meanwhile have only the other.
    lengths = StageConfiguration((0.0, 0.5, 100.0, 100.0, 100.0), 4, 2)
    singles = [1.0 + 0.6 * n for n in range(100)]
    ready = np.array([0.0, 0.01, 0.02, 0.03, 0.04, 0.05, *singles, 70.0, 70.1])
    assert served(ready, lengths)[-2:] == pytest.approx([70.5, 71.0])
    assert served(ready, lengths) == pytest.approx(one_by_one(ready.tolist(), lengths))


def test_a_batch_draws_its_hop_from_those_that_were_measured() -> None:
    """The same again for the same queries. Queries of other stages and samples have other ones."""
    graph, arrivals = PipelineGraph(chain(2)), np.arange(10_000.0)
    configured = dict.fromkeys(graph.order, stage(0.0, 0.01, 1, 1))
    measured = np.random.default_rng(1).exponential(2.0, 1000)
    hop = MeasuredHop.of(measured)
    one, again, other = (LatencyEstimator(graph, arrivals, hop=hop, first=n).latencies(configured) for n in (0, 0, 9))
    assert one.tolist() == again.tolist() != other.tolist()
    sums = 1000.0 * one - 20.0  # of two stages and the client
    assert sums.mean() == pytest.approx(3 * measured.mean(), rel=0.05)
    assert sums.std() == pytest.approx(3**0.5 * measured.std(), rel=0.08)


def test_messages_take_time_between_stages_and_before_the_next_batch() -> None:
    graph, arrivals = PipelineGraph(chain(3)), np.array([0.0, 10.0])
    configured = dict.fromkeys(graph.order, stage(0.0, 0.01, 1, 1))
    assert LatencyEstimator(graph, arrivals, hop=MeasuredHop(2.0)).latencies(configured) == pytest.approx(
        [0.038, 0.038]
    )
    graph = PipelineGraph(chain(1))
    configured = {"v0": stage(0.0, 0.01, 1, 1)}
    found = LatencyEstimator(graph, np.array([0.0, 0.0, 0.0]), hop=MeasuredHop(2.0)).latencies(configured)
    assert found == pytest.approx([0.014, 0.026, 0.038])


def test_percentiles_were_seen_and_drawn_samples_are_the_same_again() -> None:
    latencies = np.arange(1.0, 101.0)
    assert at_percentile(latencies, 0.99) == 99.0
    assert at_percentile(latencies, 1.0) == 100.0
    assert at_percentile(latencies[:1], 0.5) == 1.0
    assert at_percentile(np.empty(0), 0.99) == 0.0
    sample = gamma_arrivals(50, 1.0, 60, seed=2)
    assert resampled(sample, 0).tolist() == resampled(sample, 0).tolist()
    assert resampled(sample, 0).tolist() != resampled(sample, 1).tolist()
    for few in ([], [1.0], [1.0, 2.0], [1.0, 2.0, 4.0]):
        assert len(resampled(np.array(few), 0)) == len(few)


def test_what_is_kept_of_one_estimate_changes_no_other() -> None:
    graph, arrivals = PipelineGraph(DIAMOND), gamma_arrivals(100, 1.0, 10, seed=1)
    estimator = LatencyEstimator(graph, arrivals)
    slow, fast = stage(0.0, 0.02, 1, 3), stage(0.0, 0.005, 1, 3)
    before = estimator.latencies(dict.fromkeys("abcd", fast)).copy()
    assert (estimator.latencies({**dict.fromkeys("abcd", fast), "c": slow}) > before - 1e-9).all()
    assert estimator.latencies(dict.fromkeys("abcd", fast)).tolist() == before.tolist()
    assert estimator.latencies_within(dict.fromkeys("abcd", slow), 0.01, 5) is None


# -- other samples of the same law


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_a_drawn_sample_has_the_law_of_its_own(cv: float) -> None:
    sample = gamma_arrivals(150, cv, 600, seed=1)
    drawn = resampled(sample, 0)
    assert len(drawn) == len(sample)
    assert (np.diff(drawn) >= 0).all()
    gaps = np.diff(drawn)
    assert gaps.mean() == pytest.approx(1 / 150, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_bursts_come_elsewhere_than_in_the_sample() -> None:
    """Else a plan that suits the sample's own bursts would suit those of the others too."""
    sample = gamma_arrivals(150, 2.0, 600, seed=3)
    graph, configured = PipelineGraph(chain(1)), {"v0": stage(0.0, 0.011, 1, 2)}
    late = [
        float((LatencyEstimator(graph, one).latencies(configured) > 0.3).mean())
        for one in [
            sample,
            *(resampled(sample, i) for i in range(4)),
            *(gamma_arrivals(150, 2.0, 600, 40 + i) for i in range(4)),
        ]
    ]
    assert np.mean(late[1:5]) == pytest.approx(np.mean(late[5:]), rel=0.5)
    assert len({round(share, 5) for share in late[:5]}) == 5
