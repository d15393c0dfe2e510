"""A real worker on a real nats-server: quarantine of a damaged artifact, loads beside a slow one, and drain."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.messages.fleet import EnsureLoaded, Release
from bus.messages.scaling import Drain
from bus.messages.verbs import ReleaseVariant
from services.core.settings import MonitorSettings
from services.monitor.__main__ import wire as wire_monitor
from services.registrar.__main__ import wire as wire_registrar
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.worker import APP, Worker, measured, worker

BRISK = MonitorSettings(heartbeat_s=0.1, idle_s=0.0)
GOOD = tiny_models.mlp()
DAMAGED = GOOD[:200] + bytes(len(GOOD) - 200)


async def ready(here: Worker) -> None:
    await until(lambda: here.beats and here.beats[-1].devices[0].alive)


async def test_a_damaged_artifact_is_quarantined_shown_kept_and_released(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    x, _ = tiny_models.digits(4)
    record = replace(measured(GOOD, x, [tiny_models.CLASSES]), artifact=hashlib.sha256(DAMAGED).hexdigest())

    async with worker(nats_url, prefix, tmp_path, BRISK) as here:
        await here.start("registrar", wire_registrar)
        await here.catalogue(record, DAMAGED)
        await ready(here)
        load = here.subjects.worker("w1", "load")

        async def quarantined() -> bool:
            await here.order(load, EnsureLoaded(variant=record, app=APP))
            return record.variant in here.beats[-1].quarantined

        await until(quarantined)
        refusal = await here.order(load, EnsureLoaded(variant=record, app=APP))
        assert "is quarantined here until infaas.admin.release-variant names it" in refusal["reason"]
        assert "its last 3 loads failed: onnxruntime cannot load this model" in refusal["reason"]

        async def told() -> bool:
            [item] = (await here.order(here.subjects.list("variants"), {}))["items"]
            return item["state"] == "Quarantined" and "onnxruntime cannot load" in item["quarantined"]["w1"]

        await until(told)  # a dispatcher hears of it by itself
        reply = await here.ask(x, latency_ms=2000.0)
        assert reply["error"]["code"] == "unsatisfiable", reply
        assert "last 3 loads failed" in reply["error"]["message"]

        async def quarantines() -> int:
            return [row["to_state"] for row in await here.rows("state")].count("Quarantined")

        await until(quarantines)
        assert await quarantines() == 1

        # A monitor that is started again still knows.
        await here.stop("monitor")
        here.beats.clear()
        await here.start("monitor", wire_monitor)
        await until(lambda: here.beats and record.variant in here.beats[-1].quarantined)

        # Repaired: the record names the good artifact, and an operator releases the variant.
        await here.catalogue(replace(record, artifact=hashlib.sha256(GOOD).hexdigest()), GOOD)
        verb = here.subjects.admin("release-variant")
        assert (await here.order(verb, {}))["error"]["message"].startswith("variant: ")
        assert await here.order(verb, ReleaseVariant(variant=record.variant)) == {"done": True}
        await until(lambda: not here.beats[-1].quarantined)

        async def answered() -> bool:
            return "outputs" in await here.ask(x, latency_ms=5000.0)

        await until(answered)
        again = await here.order(verb, ReleaseVariant(variant=record.variant))
        assert again["error"]["code"] == "bad_request"
        await here.stop("registrar")


async def test_a_damaged_copy_on_the_workers_disk_is_fetched_anew(nats_url: str, prefix: str, tmp_path: Path) -> None:
    x, _ = tiny_models.digits(4)
    record = measured(GOOD, x, [tiny_models.CLASSES])
    cache = tmp_path / "workers" / "w1" / "artifacts"
    cache.mkdir(parents=True)
    (cache / f"{record.artifact}.onnx").write_bytes(DAMAGED)

    async with worker(nats_url, prefix, tmp_path, BRISK) as here:
        await here.catalogue(record, GOOD)
        await ready(here)

        async def loaded() -> bool:
            await here.order(here.subjects.worker("w1", "load"), EnsureLoaded(variant=record, app=APP))
            return set(here.states().values()) == {"Active"}

        await until(loaded)
        assert here.beats[-1].quarantined == {}
        assert hashlib.sha256((cache / f"{record.artifact}.onnx").read_bytes()).hexdigest() == record.artifact


async def test_others_are_decided_and_loaded_while_one_loads_slowly(nats_url: str, prefix: str, tmp_path: Path) -> None:
    x, _ = tiny_models.digits(4)
    quick = measured(GOOD, x, [tiny_models.CLASSES])
    built = tiny_models.slow_to_load(24)
    slow = replace(quick, variant="slow", model="slow", artifact=hashlib.sha256(built).hexdigest())
    # a hundredth of it is how long it is waited for
    slow = replace(slow, profile=replace(slow.profile, load_ms=60_000.0))

    async with worker(nats_url, prefix, tmp_path, BRISK) as here:
        await here.catalogue(slow, built)
        await here.catalogue(quick, GOOD)
        await ready(here)
        load, release = here.subjects.worker("w1", "load"), here.subjects.worker("w1", "release")

        def state_of(variant: str) -> str:
            return next((s for name, s in here.states().items() if name.startswith(f"{variant}.")), "")

        await here.order(load, EnsureLoaded(variant=slow, app=APP))
        await until(lambda: state_of("slow") == "Loading")
        rounds = 0
        while state_of("slow") == "Loading":
            await here.order(load, EnsureLoaded(variant=quick, app=APP))
            await until(lambda: state_of(quick.variant) == "Active")
            assert "outputs" in await here.ask(x)
            await here.order(release, Release(variant=quick.variant))
            await until(lambda: not state_of(quick.variant))
            rounds += 1
        assert rounds > 2, "it was loaded, asked and unloaded again and again before the slow one served"
        assert state_of("slow") == "Active"


@pytest.mark.parametrize("resume", [False, True])
async def test_a_draining_worker_answers_what_it_has_and_loads_nothing(
    nats_url: str, prefix: str, tmp_path: Path, *, resume: bool
) -> None:
    x, _ = tiny_models.digits(4)
    record = measured(GOOD, x, [tiny_models.CLASSES])

    async with worker(nats_url, prefix, tmp_path, BRISK) as here:
        await here.catalogue(record, GOOD)
        await ready(here)
        assert "outputs" in await here.ask(x)
        asked = [asyncio.create_task(here.ask(x)) for _ in range(50)]
        await asyncio.sleep(0)
        drain = here.subjects.worker("w1", "drain")
        reply = await here.order(drain, Drain(epoch=2, reason="not needed", orderer="vm-1"))
        assert reply["instances"] == list(here.states())
        await until(lambda: here.beats[-1].draining)
        assert all("outputs" in reply or reply["error"] for reply in await asyncio.gather(*asked))
        assert list(here.states()) == reply["instances"], "they are there if it is to take work again"
        late = await here.order(here.subjects.worker("w1", "load"), EnsureLoaded(variant=record, at_least=2))
        assert late["reason"] == "this worker is draining: not needed"
        old = await here.order(drain, Drain(epoch=1, resume=True))
        assert "a later leader has spoken in epoch 2" in old["reason"]
        if resume:
            await here.order(drain, Drain(epoch=2, resume=True))
            await until(lambda: not here.beats[-1].draining)

            async def answered() -> bool:
                return "outputs" in await here.ask(x, latency_ms=2000.0)

            await until(answered)
