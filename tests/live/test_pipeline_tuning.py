"""A deployed pipeline on simulated devices: its replicas are loaded, follow its load, and outlive the leader."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

import infaas
from bus.codec import decode
from bus.messages.scaling import PipelineReplicas
from bus.natsbus import NatsBus
from bus.port import KeyValue, NotFound
from bus.subjects import Subjects
from tests.live.test_faults import System, up
from tests.support.clients.constant_load import APP, PATIENT_MS, LibraryLoad
from tests.support.clients.responders import until
from tests.support.data.pipelines import plan_of
from tests.support.models import tiny_models
from tests.support.servers.nats import run

NAME = "twice"
PLANNED = {"a": 1, "b": 2}
RATE = 20.0  # of the plan's sample


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with up(tmp_path_factory.mktemp("tuning") / "data", "--simulate", "gpu=4") as system:
        system.register(APP, tiny_models.mlp())
        yield system


async def deploy(client: infaas.Client) -> None:
    await client.admin(
        "set-pipeline",
        pipeline={"name": NAME, "latency_ms": 5000.0},
        vertex=[{"name": name, "app": APP, "inputs": {"x": "$.x"}} for name in PLANNED],
        edge=[{"from": "a", "to": "b"}],
        output={"scores": "b.scores"},
    )
    found = plan_of(PLANNED, {"a": "", "b": ""}, hardware="gpu", sampled=RATE, pipeline=NAME)
    await client.admin("deploy-pipeline", app=NAME, plan=msgspec.to_builtins(found))


class Seen:
    """What a deployed pipeline is to have, and what it has."""

    def __init__(self, system: System, client: infaas.Client, bucket: KeyValue) -> None:
        self.system = system
        self._client = client
        self._bucket = bucket

    async def wanted(self) -> PipelineReplicas | None:
        try:
            return decode(PipelineReplicas, (await self._bucket.get(f"pipeline.{NAME}")).value or b"")
        except NotFound:
            return None

    async def loaded(self) -> int:
        """Instances of the planned variant that serve and that somebody needs."""
        vertex = (await self._client.pipelines(app=NAME))[0]["vertices"][0]  # one variant serves both
        [row] = [one for one in await self._client.variants(app=APP) if one["variant"] == vertex["variant"]]
        return int(vertex["instances"] - row["reclaimable"])

    async def as_wanted(self) -> bool:
        state = await self.wanted()
        return state is not None and await self.loaded() == sum(state.replicas.values())

    def events(self) -> list[tuple[Any, ...]]:
        """(action, vertex, from, to, time), in order."""
        return self.system.rows(
            "SELECT action, vertex, from_replicas, to_replicas, time FROM infaas.pipeline_events"
            " WHERE pipeline = %s ORDER BY time, vertex",
            NAME,
        )


async def follow(system: System) -> None:
    bus = await NatsBus.connect(system.nats, name="tuning")
    async with infaas.connect(system.nats) as client:
        seen = Seen(system, client, await bus.key_value(Subjects().control_bucket))
        await deploy(client)
        await until(seen.as_wanted)
        async with LibraryLoad(system.nats, "jump", 3 * RATE, app=NAME, latency_ms=PATIENT_MS) as load:
            await until(lambda: _grown(seen))
            await until(seen.as_wanted)
            await until(seen.events)
            many = await seen.wanted()
            assert many is not None
            system.kill("registrar")
            await until(lambda: _followed(seen, many.epoch))
            after = await seen.wanted()
            assert all(after.replicas[name] >= count for name, count in many.replicas.items())
            await until(seen.as_wanted)
            await asyncio.sleep(1)  # under the new leader
        assert load.others == {}
        await until(lambda: _calm(seen))
        await until(seen.as_wanted)
        await until(lambda: _recorded_down(seen))
    await bus.close()


async def _grown(seen: Seen) -> bool:
    state = await seen.wanted()
    return state is not None and all(state.replicas[name] >= 2 * count for name, count in PLANNED.items())


async def _followed(seen: Seen, epoch: int) -> bool:
    state = await seen.wanted()
    return state is not None and state.epoch > epoch


def _recorded_down(seen: Seen) -> bool:
    """Whether the last event of each vertex is in SQL: the one that leaves a single replica."""
    return {vertex: end for _, vertex, _, end, _ in seen.events()} == dict.fromkeys(PLANNED, 1)


async def _calm(seen: Seen) -> bool:
    state = await seen.wanted()
    return state is not None and set(state.replicas.values()) == {1}


def test_replicas_follow_the_load_also_when_the_leader_is_killed(system: System) -> None:
    run(follow(system))
    found = Seen(system, None, None).events()  # type: ignore[arg-type]
    assert [row[:4] for row in found[:2]] == [("deploy", "a", 0, 1), ("deploy", "b", 0, 2)]
    ups = [row for row in found if row[0] == "up"]
    assert {vertex for _, vertex, _, _, at in ups if at == ups[0][4]} == set(PLANNED)
    assert [row for row in found[2:] if row[0] not in ("up", "down")] == []
    for vertex in PLANNED:  # whoever led; of the killed leader's last decision, the event may have been lost with it
        steps = [(begin, end) for _, name, begin, end, _ in found if name == vertex]
        assert sum(end != begin for (_, end), (begin, _) in pairwise(steps)) <= 1, steps
        assert steps[-1][1] == 1
