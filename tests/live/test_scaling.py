"""Scaling, and what it costs, in a whole system: the model-autoscaler follows a load, and the rows of the meter make the bill."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from bus.codec import decode
from bus.messages.scaling import ObjectiveReport
from bus.natsbus import NatsBus
from bus.port import Delivery
from bus.subjects import Subjects
from tests.support.models import tiny_models
from tests.support.servers.processes import ROOT, eventually
from tests.support.servers.system import Whole, running

CONFIG = """
[registrar]
threads = [1]
max_batches = [64]
[autoscaler]
hold_s = 2.0
[monitor]
cost_s = 2.0
"""
ITEMS = 64
X, Y = tiny_models.images(ITEMS)


class World(Whole):
    """A running system with one app, `pictures`."""

    async def load(self, rate: float, seconds: float, x: np.ndarray = X, **needs: Any) -> list[Any]:
        """An open loop; all ends, answers and refusals."""
        async with infaas.connect(self.nats) as client:
            start, tasks = time.monotonic(), []
            for n in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, start + n / rate - time.monotonic()))
                tasks.append(asyncio.create_task(client.query("pictures", x, raise_refused=False, **needs)))
            return await asyncio.gather(*tasks)


@contextmanager
def up(directory: Path, config: str, *options: str, **more: str) -> Iterator[World]:
    (directory / "infaas.toml").write_text(config)
    with running(directory / "data", "--config", str(directory / "infaas.toml"), *options, **more) as whole:
        whole.register("pictures", tiny_models.convnet(), X, Y)
        yield World(*whole)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up(tmp_path_factory.mktemp("scaling"), CONFIG, "--simulate", "gpu=1") as made:
        yield made


PLANNED = "SELECT action, variant, reason, solver, solve_ms, objective FROM infaas.scaling_events WHERE scaler = 'vm'"
OBJECTIVES = "SELECT slo_target, load, forecast, capacity, headroom FROM infaas.objective_events WHERE app = 'pictures'"


def test_a_load_beyond_one_instance_is_planned_for_and_reclaimable_after_it(world: World) -> None:
    fastest = max(one["saturation_qps"] for one in world.told("variants") if one["hardware"] == "cpu")
    rate = 1.3 * fastest / ITEMS
    reports: list[ObjectiveReport] = []

    def loaded() -> bool:
        return any(action in ("replicate", "upgrade", "load") for action, *_ in world.rows(PLANNED))

    async def scaled() -> bool:
        """One hears, as workers do, what the leader has planned."""
        bus = await NatsBus.connect(world.nats, name="test")
        try:

            def heard(delivery: Delivery) -> None:
                reports.append(decode(ObjectiveReport, delivery.data))

            await bus.subscribe(Subjects().controller("objectives"), heard)
            for _ in range(20):
                await world.load(rate, 3.0, latency_ms=2000)
                if await asyncio.to_thread(loaded):
                    return True
            return False
        finally:
            await bus.close()

    assert asyncio.run(scaled())
    # A slow machine may have answered none of them in time: it answers what has time.
    assert eventually(lambda: isinstance(asyncio.run(world.load(1, 1, latency_ms=60_000))[-1], infaas.Answer))
    more = [row for row in world.rows(PLANNED) if row[0] in ("replicate", "upgrade", "load")]
    assert more
    assert all(row[2].startswith(("the plan wants ", "a device is idle, and pictures carries only ")) for row in more)
    assert all(row[3] == "ilp" and row[4] > 0 and row[5] is not None for row in more)
    apps = [app for report in reports for app in report.apps if app.app == "pictures"]
    assert max(app.forecast for app in apps) > 0
    assert {app.slo_target for app in apps} == {0.99}

    assert eventually(lambda: bool(world.rows(OBJECTIVES)))
    target, load, forecast, capacity, headroom = world.rows(OBJECTIVES)[-1]
    assert (target, capacity) == (0.99, pytest.approx(headroom * forecast))
    assert load >= 0

    def foreseen() -> bool:
        asyncio.run(world.load(rate, 3.0, latency_ms=2000))
        [app] = [one for one in world.told("status")["apps"] if one["app"] == "pictures"]
        return app["forecast"] > 0 and app["headroom"] > 0

    assert eventually(foreseen)
    # And when nothing comes any more, what was loaded for it is marked: its place is for others.
    assert eventually(lambda: any(action == "release" for action, *_ in world.rows(PLANNED)))
    assert "the plan needs " in next(row[2] for row in world.rows(PLANNED) if row[0] == "release")


def test_the_rows_of_the_meter_add_up_to_the_workers_bill(world: World) -> None:
    """Prices times time, within a thousandth, for each device; and an answer's cost is the one in SQL."""
    periods = "SELECT count(DISTINCT time) FROM infaas.cost_events WHERE app IS NULL"
    assert eventually(lambda: world.rows(periods)[0][0] >= 4)
    query = """
        SELECT c.hardware, sum(c.cost), sum(c.seconds) FILTER (WHERE c.app IS NULL AND c.variant IS NULL),
               sum(c.seconds) FILTER (WHERE c.app IS NULL AND c.variant IS NULL AND c.time > first.time),
               extract(epoch FROM max(c.time) - min(c.time))::float8
        FROM infaas.cost_events c JOIN (SELECT hardware, min(time) AS time FROM infaas.cost_events GROUP BY 1) first USING (hardware)
        GROUP BY 1
        """
    prices = {
        device["kind"]: device["price_per_hour"] for worker in world.told("workers") for device in worker["devices"]
    }

    def adds_up() -> bool:  # also of a look between the rows of one period, at the next look
        bill = world.rows(query)
        return {row[0] for row in bill} == {"cpu", "gpu"} and all(
            cost == pytest.approx(prices[hardware] / 3600 * seconds, rel=1e-3)
            and after_the_first == pytest.approx(span, rel=1e-3)  # no period is missing or twice
            for hardware, cost, seconds, after_the_first, span in bill
        )

    assert eventually(adds_up), world.rows(query)

    ends: list[Any] = []

    def answered() -> bool:
        ends.extend(asyncio.run(world.load(1, 1, latency_ms=30_000, id=f"priced-{len(ends)}")))
        return isinstance(ends[-1], infaas.Answer)

    assert eventually(answered), ends[-1]
    answer = ends[-1]
    told = "SELECT cost FROM infaas.query_outcomes WHERE outcome <> 'refused' AND id LIKE 'priced-%%'"
    assert eventually(lambda: bool(world.rows(told)))
    assert world.rows(told)[0][0] == pytest.approx(answer.cost, rel=1e-9)


# -- a user's own policy

OWN = '''
from services.core.selection import Decision

class Slowest:
    """Queries go to the variant with the largest name; of each that runs there are two instances. Priority 9 makes it fail."""
    name = "slowest"
    def __init__(self):
        self.ended = 0
    def select(self, ask, now, view):
        if ask.priority == 9:
            raise LookupError("the worst priority")
        eligible = view.apps[ask.app].eligibility(ask)
        groups = {group.record.variant: group for group in (*eligible.active, *eligible.troubled)}
        if len(groups) < 2:
            return None
        largest = groups[max(groups)]
        return Decision((*largest.active, *largest.troubled)[0].id)
    def scale(self, problem, now):
        return {one.name: 2 for one in problem.candidates if one.running}
    def observe(self, outcome):
        self.ended += 1
        if self.ended == 5:
            raise LookupError("the fifth")
'''


def test_a_users_own_class_is_used_by_queries_and_by_scaling_decisions(tmp_path: Path) -> None:
    """Loaded by its import path in every process; where it fails, the built-in policy answers."""
    (tmp_path / "own_policy_of_mine.py").write_text(OWN)
    path = "own_policy_of_mine:Slowest"
    config = (
        f'[dispatcher]\npolicy = "{path}"\n[autoscaler]\npolicy = "{path}"\n[registrar]\nthreads = [1, 2]\nmax_batches = [8]\n'
        "[worker]\ncores = 4\n"
    )
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    with up(tmp_path, config, "--no-dashboard", "--no-gateway", **found) as world:
        read = "SELECT variant FROM infaas.variants ORDER BY variant"
        assert eventually(lambda: len(world.rows(read)) >= 2)
        variants = [name for (name,) in world.rows(read)]

        async def ask() -> None:
            async with infaas.connect(world.nats) as client:
                chosen: set[str | None] = set()
                for _ in range(20):  # where an instance has gone meanwhile, the built-in policy decides
                    for variant in (variants[0], variants[-1]):
                        answer = await client.query("pictures", X[:1], variant=variant, timeout=60)
                        assert answer.variant == variant
                    chosen = {(await client.query("pictures", X[:1], timeout=60)).variant for _ in range(20)}
                    if chosen == {variants[-1]}:
                        break
                assert chosen == {variants[-1]}
                answers = [await client.query("pictures", X[:1], priority=9, timeout=60) for _ in range(5)]
                assert len(answers) == 5, "what it fails on the built-in policy decides"

        asyncio.run(ask())
        orders = "SELECT reason FROM infaas.scaling_events WHERE scaler = 'vm' AND action = 'replicate'"

        async def loaded() -> bool:
            await world.load(20.0, 1.0, X[:1])
            return any("slowest wants 2 in all" in reason for (reason,) in await asyncio.to_thread(world.rows, orders))

        assert eventually(lambda: asyncio.run(loaded()))
        named = "SELECT count(*) FROM infaas.query_outcomes WHERE policy = 'slowest'"
        assert eventually(lambda: world.rows(named)[0][0] >= 27)
    log = (tmp_path / "data" / "logs" / "dispatcher-0.log").read_text()
    assert (
        "select() of the policy own_policy_of_mine:Slowest failed (number 1): the built-in policy decides instead: LookupError: the worst priority"
        in log
    )
    assert "observe() of the policy own_policy_of_mine:Slowest failed (number 1): LookupError: the fifth" in log
