"""Registrations on a real bus with a real workshop: from a file to records that describe what was measured."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord
from bus.messages.public import AdminDone, Refusal, RegistrationStatus
from bus.messages.verbs import AddApp
from bus.natsbus import NatsBus
from bus.port import StreamSpec
from bus.subjects import Subjects
from infaas.client import Client
from infaas.demo import digits
from infaas.errors import Refused
from infaas.registering import cancel, last_status, register
from services.core.catalog import Catalog
from services.core.settings import BusSettings, RegistrarSettings, Settings, WorkerSettings
from services.dispatcher.__main__ import wire as wire_dispatcher
from services.executor.__main__ import wire as wire_executor
from services.monitor.__main__ import wire as wire_monitor
from services.registrar.__main__ import wire as wire_registrar
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.processes import environ

Wire = Callable[[Settings, NatsBus], Awaitable[list[Runtime]]]


class System:
    """Services of one cluster in this process, each on a connection of its own."""

    def __init__(self, url: str, prefix: str, directory: Path) -> None:
        self.subjects = Subjects(prefix)
        self.settings = Settings(
            prefix=prefix,
            data_dir=str(directory),
            bus=BusSettings(url=url),
            worker=WorkerSettings(name="w1"),
            registrar=RegistrarSettings(threads=(1,), max_batches=(8,)),
        )
        self.bus: NatsBus
        self.validation = digits.save_validation(directory / "validation.npz")
        self._running: list[tuple[NatsBus, list[Runtime]]] = []

    async def start(self, wire: Wire) -> NatsBus:
        """Start a service; returns its connection."""
        bus = await NatsBus.connect(self.settings.bus.url, name="test")
        runtimes = await wire(self.settings, bus)
        for runtime in runtimes:
            await runtime.start()
        self._running.append((bus, runtimes))
        return bus

    async def kill(self, bus: NatsBus) -> None:
        """Cut a service off: it cannot even say goodbye."""
        self._running = [(other, runtimes) for other, runtimes in self._running if other is not bus]
        await bus.close()

    async def stop(self) -> None:
        for bus, runtimes in reversed(self._running):
            for runtime in runtimes:
                await runtime.stop(1.0)
            await bus.close()

    async def catalog(self) -> Catalog:
        """What the catalogue bucket holds."""
        catalog = Catalog()
        bucket = await self.bus.key_value(self.subjects.catalog_bucket)
        for key in await bucket.keys():
            catalog.apply(key, (await bucket.get(key)).value)
        return catalog

    async def register(self, model_file: Path, model: str = "mlp", **options: object) -> RegistrationStatus:
        arguments = {"app": "digits", "model": model, "validation": self.validation, "timeout": 400.0, **options}
        return await register(self.bus, self.subjects, model_file, **arguments)  # type: ignore[arg-type]


@asynccontextmanager
async def cluster(url: str, prefix: str, directory: Path) -> AsyncIterator[System]:
    system = System(url, prefix, directory)
    system.bus = await NatsBus.connect(url, name="test client")
    events = StreamSpec(system.subjects.event_stream, (system.subjects.event(">"),), "limits", 2**24)
    await system.bus.ensure_stream(events)
    try:
        for wire in (wire_monitor, wire_executor):
            await system.start(wire)
        yield system
    finally:
        await system.stop()
        await system.bus.close()


def true_accuracy(model: Path, validation: Path) -> float:
    """Top-1 accuracy on the whole validation set, computed here."""
    with np.load(validation) as stored:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        outputs = session.run(None, {session.get_inputs()[0].name: stored["x"]})
        scores = next(output for output in outputs if output.ndim == 2)
        return float((scores.argmax(1) == stored["y"]).mean())


async def test_a_model_becomes_measured_variants(nats_url: str, prefix: str, tmp_path: Path) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        await system.start(wire_registrar)
        model = digits.models()["mlp-s"]
        told: list[RegistrationStatus] = []
        status = await system.register(model, latency_ms=50.0, on_progress=told.append)
        assert status.state == "done", status
        assert status.failures == []
        assert {"inspecting", "building", "profiling", "done"} <= {each.state for each in told}
        assert await last_status(system.bus, system.subjects, status.registration) == status
        catalog = await system.catalog()
        app = catalog.app("digits")
        assert (app.links, app.latency_ms) == ({"mlp": "1"}, 50.0)
        variants = catalog.variants_of("digits")
        assert {v.variant for v in variants} == set(status.variants)
        assert {v.precision for v in variants} == {"fp32", "int8"}
        expected = true_accuracy(model, system.validation)
        for variant in variants:
            assert variant.accuracy == pytest.approx(expected, abs=1e-9 if variant.precision == "fp32" else 0.03)
            assert variant.accuracy_low < variant.accuracy < variant.accuracy_high
            assert variant.profile.rows[0].p50_ms > 0
            assert variant.profile.saturation_qps > 0
        artifacts = await system.bus.object_store(system.subjects.artifacts_bucket)
        assert {v.artifact for v in variants} <= set(await artifacts.keys())
        uploads = await system.bus.object_store(system.subjects.uploads_bucket)
        bucket = await system.bus.key_value(system.subjects.status_bucket)
        await until_empty(lambda: left_over(uploads.keys(), bucket.keys()))


async def left_over(*listings: Awaitable[list[str]]) -> list[str]:
    found = [key for listing in listings for key in await listing]
    return [key for key in found if not key.startswith("registration.")]


async def until_empty(look: Callable[[], Awaitable[list[str]]]) -> None:
    async def empty() -> bool:
        return not await look()

    try:
        await until(empty)
    except TimeoutError:
        raise AssertionError(f"left behind: {await look()}") from None


async def test_another_registrar_finishes_what_a_dead_one_began(nats_url: str, prefix: str, tmp_path: Path) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        first = await system.start(wire_registrar)
        seen = asyncio.Event()

        def on_progress(status: RegistrationStatus) -> None:
            if status.state == "building":
                seen.set()

        registering = asyncio.create_task(system.register(digits.models()["logreg"], on_progress=on_progress))
        await asyncio.wait_for(seen.wait(), 120)
        await system.kill(first)
        await system.start(wire_registrar)
        status = await registering
        assert status.state == "done", status
        catalog = await system.catalog()
        assert {v.variant for v in catalog.variants_of("digits")} == set(status.variants)
        assert list(catalog.versions("mlp")) == ["1"]


async def test_a_cancelled_registration_leaves_nothing_and_the_next_one_is_served(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        await system.start(wire_registrar)
        building = asyncio.Event()
        ids: list[str] = []

        def on_progress(status: RegistrationStatus) -> None:
            ids.append(status.registration)
            if status.state == "building":
                building.set()

        registering = asyncio.create_task(system.register(digits.models()["cnn-s"], on_progress=on_progress))
        await asyncio.wait_for(building.wait(), 120)
        await cancel(system.bus, system.subjects, ids[0])
        assert (await asyncio.wait_for(registering, 120)).state == "cancelled"
        uploads = await system.bus.object_store(system.subjects.uploads_bucket)
        bucket = await system.bus.key_value(system.subjects.status_bucket)
        await until_empty(lambda: left_over(uploads.keys(), bucket.keys()))
        assert (await system.catalog()).app("digits") is None
        with pytest.raises(Refused, match="it is cancelled"):
            await cancel(system.bus, system.subjects, ids[0])
        status = await system.register(digits.models()["logreg"])
        assert (status.state, status.version) == ("done", "1")


async def command(system: System, *arguments: str) -> tuple[int, str, str]:
    """Run `infaas`; returns exit code, stdout and stderr."""
    endpoints = {"nats": system.settings.bus.url, "sql": "", "prefix": system.subjects.prefix, "running": True}
    directory = Path(system.settings.data_dir)
    (directory / "endpoints.json").write_text(json.dumps(endpoints))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "infaas.cli", *arguments, "--data-dir", str(directory)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ(),
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_the_command_prints_what_was_measured(nats_url: str, prefix: str, tmp_path: Path) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        for wire in (wire_registrar, wire_dispatcher):
            await system.start(wire)
        model, validation = str(digits.models()["cnn-s"]), str(system.validation)
        about = ("--app", "digits", "--model", "cnn", "--validation", validation)
        code, out, errors = await command(system, "register", model, *about, "--slo-target", "1")
        assert (code, out) == (2, "")
        assert "--slo-target. must be above 0 and below 1, not 1" in errors.splitlines()[-1]
        code, out, errors = await command(system, "register", model, *about, "--slo-target", "0.999", "--json")
        assert code == 0, errors
        document = json.loads(out)
        assert (document["state"], document["version"]) == ("done", "1")
        assert {item["precision"] for item in document["variants"]} == {"fp32", "int8"}
        for item in document["variants"]:
            assert item["accuracy"] > 0.9
            figures = ("load_ms", "latency_ms", "memory_mb", "saturation_qps", "price_per_hour", "cost_per_1000")
            assert all(item[figure] > 0 for figure in figures), item
            with np.load(validation) as stored:
                assert item["samples"] == len(stored["y"])
        assert document["unsure"] == []
        assert "profiling" in errors
        one = document["variants"][0]
        open_ = (one["accuracy"] + one["accuracy_high"]) / 2
        code, _, errors = await command(system, "admin", "set-target", "digits", "--accuracy-mean", str(open_))
        assert code == 0, errors
        code, out, errors = await command(system, "register", model, *about, "--contended")  # nothing of the target
        assert code == 0, errors
        assert f"± {max(one['accuracy'] - one['accuracy_low'], one['accuracy_high'] - one['accuracy']):.2g} of" in out
        unsure = [line for line in out.splitlines() if line.startswith("not sure: ")]
        assert any("accuracy_mean of digits asks for accuracy" in line for line in unsure), out
        catalog = await system.catalog()
        app = catalog.app("digits")
        beside = {v.profile.provenance.partition(":")[::2] for v in catalog.variants_of("digits")}
        assert {kind for kind, _ in beside} == {"measured"}
        assert all("further instance" in what for _, what in beside)
        assert (app.links, app.slo_target) == ({"cnn": "2"}, 0.999)
        code, out, errors = await command(system, "register", model, *about, "--version", "1")
        assert (code, out) == (1, "")
        assert errors.splitlines()[-1].startswith("infaas: bad_request: version: ")
        (tmp_path / "fake.onnx").write_bytes(b"this is not a model")
        code, out, errors = await command(system, "register", str(tmp_path / "fake.onnx"), *about)
        assert (code, out) == (1, "")
        assert "is not an ONNX model" in errors.splitlines()[-1]


async def test_a_deleted_version_gives_its_room_back(nats_url: str, prefix: str, tmp_path: Path) -> None:
    """In the object store and on the worker, whose engines go with the files that they were made of."""
    async with cluster(nats_url, prefix, tmp_path) as system:
        await system.start(wire_registrar)
        for model in ("old", "new"):
            assert (
                await system.register(digits.models()["mlp-s" if model == "old" else "cnn-s"], model=model, app=model)
            ).state == "done"
        variants = (await system.catalog()).variants
        old, new = ({one.artifact for one in variants if one.model == model} for model in ("old", "new"))
        place = tmp_path / "workers" / "w1" / "artifacts"
        for artifact in old | new:
            copies = [
                place / f"{artifact}.onnx",
                place / "engines" / f"{artifact[:12]}-h100-fp32-b8-x" / "model.engine",
            ]
            for copy in copies:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(b"x")
                os.utime(copy.parent if copy is copies[1] else copy, (0, 0))
        code, out, _ = await command(system, "prune", "--dry-run", "--json")
        assert (code, json.loads(out)["note"]) == (0, "0 files, 0.0 MB would be deleted")
        assert (await command(system, "app", "delete", "--app", "old"))[0] == 0
        code, out, errors = await command(system, "model", "delete-version", "--model", "old", "--version", "1")
        assert code == 0, errors
        assert re.search(r"[2-4] files, \d\.\d MB were deleted", out)
        there = await (await system.bus.object_store(system.subjects.artifacts_bucket)).keys()
        assert new < {*there} and not old & {*there}

        async def dropped() -> bool:
            names = {path.name for path in (*place.glob("*.onnx"), *place.glob("engines/*"))}
            return len(names) == 2 * len(new) and {name[:12] for name in names} == {one[:12] for one in new}

        await until(dropped)


async def test_two_models_of_an_app_make_a_cascade_which_goes_with_them(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    """It is listed and explained, serves a floor that the small one misses, gives either's answer, and is gone with a version."""
    small, large = tiny_models.pair()
    x, y = tiny_models.digits(600)
    system_files = {"small": small, "large": large}
    validation = tmp_path / "pair.npz"
    validation.write_bytes(tiny_models.npz(x=x, y=y))
    async with cluster(nats_url, prefix, tmp_path) as system:
        for wire in (wire_registrar, wire_dispatcher):
            await system.start(wire)
        for model, content in system_files.items():
            (tmp_path / f"{model}.onnx").write_bytes(content)
            about = {"model": model, "app": "pair", "validation": validation}
            assert (await system.register(tmp_path / f"{model}.onnx", **about)).state == "done"
        catalog = await system.catalog()
        [made] = [one for one in catalog.variants_of("pair") if one.cascade is not None]
        assert made.cascade is not None
        assert made.cascade.versions == [("small", "1"), ("large", "1")]
        assert 0.0 < made.cascade.share < 0.5
        assert made not in catalog.variants_at("large", "1")
        [best] = [one for one in catalog.variants_at("large", "1") if one.variant == made.cascade.parts[1]]
        assert made.accuracy is not None and best.accuracy is not None
        assert made.accuracy >= best.accuracy - 0.01
        assert made.profile.saturation_qps >= 1.25 * best.profile.saturation_qps
        assert made.profile.rows[0].p99_ms >= made.profile.rows[0].p50_ms
        client = await Client(system.bus, prefix=system.subjects.prefix).open()

        async def answers(variant: str) -> np.ndarray:
            found = await client.query("pair", x[:64], variant=variant, latency_ms=60_000)
            assert found.variant == variant
            return np.asarray(found.output)

        joined, one, other = [await answers(name) for name in (made.variant, *made.cascade.parts)]
        near = [np.isclose(joined, part, rtol=1e-3, atol=1e-2).all(axis=1) for part in (one, other)]
        assert (near[0] | near[1]).all()
        floor = await client.query("pair", x[:8], accuracy=made.accuracy, latency_ms=60_000)
        assert floor.variant == made.variant, "it is the cheapest that meets the floor"
        code, out, errors = await command(system, "explain", "pair", "--accuracy", str(made.accuracy))
        assert code == 0, errors
        words = f"cascade: {made.variant}: {made.cascade.words}"
        assert words in out
        assert words in (await command(system, "variants", "--app", "pair"))[1]
        assert (await client.query("pair", x[:8], model="large", latency_ms=60_000)).variant != made.variant
        assert (await command(system, "admin", "unlink-model", "pair", "--model", "small"))[0] == 0
        assert made.variant not in {one.variant for one in (await system.catalog()).variants_of("pair")}
        code, _, errors = await command(system, "model", "delete-version", "--model", "small", "--version", "1")
        assert code == 0, errors
        assert (await system.catalog()).variant(made.variant) is None


async def test_operators_and_outsiders_over_the_bus(nats_url: str, prefix: str, tmp_path: Path) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        for _ in range(2):
            await system.start(wire_registrar)
        bus, subjects = system.bus, system.subjects
        for n in range(10):  # spread over both registrars
            reply = await bus.request(subjects.admin("add-app"), encode(AddApp(app=f"a{n}")), 60.0)
            assert decode(AdminDone, reply.data).done
        assert {app.app for app in (await system.catalog()).apps} == {f"a{n}" for n in range(10)}
        again = await bus.request(subjects.admin("add-app"), encode(AddApp(app="a0")), 60.0)
        assert "exists already" in decode(Refusal, again.data).error.message
        for body in (b"", b"\xc1", encode({"app": 7})):
            for subject in (subjects.register(), subjects.admin("add-app")):
                refused = await bus.request(subject, body, 60.0)
                assert decode(Refusal, refused.data).error.code == "bad_request"
        for wrong in (
            {},
            *({"slo_target": bad} for bad in (0, 1, 1.5, -1, float("nan"), float("inf"), "0.9", True)),
        ):
            refused = await bus.request(subjects.admin("set-target"), encode({"app": "a1", **wrong}), 60.0)
            error = decode(Refusal, refused.data).error
            assert (error.code, "slo_target" in error.message) == ("bad_request", True), (wrong, error)
        nobody = await bus.request(subjects.admin("set-target"), encode({"app": "b", "slo_target": 0.9}), 60.0)
        assert decode(Refusal, nobody.data).error.code == "unknown_app"
        target = await bus.request(subjects.admin("set-target"), encode({"app": "a1", "slo_target": 0.9}), 60.0)
        assert decode(AdminDone, target.data).done
        found = (await system.catalog()).app("a1")
        assert found is not None and found.slo_target == 0.9
        unknown = await bus.request(subjects.registration("nobody"), b"", 60.0)
        assert "nobody" in decode(Refusal, unknown.data).error.message
        kept = await bus.key_value(subjects.catalog_bucket)
        assert decode(AppRecord, (await kept.get("app.a3")).value or b"").links == {}
