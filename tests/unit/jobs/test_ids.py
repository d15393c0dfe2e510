"""Ids of jobs, which clients may choose and others may know."""

from pathlib import Path
from typing import Any

import msgspec

from bus.codec import encode
from bus.port import Delivery
from infaas import following
from tests.support.clients.responders import until
from tests.support.data import offline_inputs
from tests.unit.jobs.test_coordinator import S, X, staged


async def test_two_who_choose_the_same_id_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        offline_inputs.write(scene.files / "in.npy", X)
        heard: dict[str, Any] = {}

        def hear(delivery: Delivery) -> None:
            heard[delivery.subject] = msgspec.msgpack.decode(delivery.data)

        await scene.bus.subscribe("mine.*", hear)
        source = (scene.files / "in.npy").as_uri()
        for name in ("one", "two"):
            ask = {"job": "nightly", "input": source, "output": (scene.files / f"{name}.npy").as_uri()}
            scene.bus.publish(S.job("app"), encode(ask), f"mine.{name}")
        await until(lambda: len(heard) == 2)
        assert heard["mine.one"] == {"job": "nightly"}
        assert "in use already" in heard["mine.two"]["error"]["message"]


async def test_clients_of_other_apps_learn_of_no_such_job(tmp_path: Path) -> None:
    async with staged(tmp_path) as scene:
        await scene.start("c1")
        job = await scene.submit()
        heard: dict[str, Any] = {}

        def hear(delivery: Delivery) -> None:
            heard[delivery.subject.rpartition(".")[2]] = msgspec.msgpack.decode(delivery.data)

        await scene.bus.subscribe("_INBOX_.>", hear)
        for number, subject in enumerate((S.job_status(job), S.job_cancel(job))):
            scene.bus.publish(subject, b"", f"_INBOX_.numbers.thief.x.{number}")
        await until(lambda: len(heard) == 2)
        assert all("there is none" in heard[key]["error"]["message"] for key in ("0", "1"))
        assert (await following.status(scene.bus, S, job)).state not in ("cancelled", "failed")
        scene.bus.publish(S.job_status(job), b"", "_INBOX_.app.phone.x.2")
        scene.bus.publish(S.job_cancel(job), b"", "_INBOX_.@.operator.x.3")
        await until(lambda: len(heard) == 4)
        assert heard["2"]["job"] == job
        assert "error" not in heard["3"]
