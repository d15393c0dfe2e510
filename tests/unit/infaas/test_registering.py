"""The client's side of a registration, against a registrar that is played here, on the bus within one process."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.memory import Broker
from bus.messages.catalog import Functions, ModelRecord, Signature
from bus.messages.public import Error, Refusal, Register, RegistrationAccepted, RegistrationStatus
from bus.port import Bus, Delivery
from bus.subjects import Subjects
from infaas.cli.apply import _file_of
from infaas.errors import BadInput, NotConnected, Refused, Timeout
from infaas.following import Follower
from infaas.registering import OVER, last_status, register
from infaas.samples import functions_of, raw_samples

SUBJECTS = Subjects("t")


class Registrar:
    """Replies to registrations with `reply` and then publishes `statuses`; remembers what it was asked."""

    def __init__(self, bus: Bus, reply: Any = None, states: tuple[str, ...] = ("inspecting", "done")) -> None:
        self.bus = bus
        self.reply = reply
        self.states = states
        self.asked: list[Register] = []
        self.answers_status = True
        self.heard = asyncio.Event()

    async def open(self) -> "Registrar":
        await self.bus.subscribe(SUBJECTS.register(), self._on_register)
        await self.bus.subscribe(SUBJECTS.registration(), self._on_status)
        return self

    def status(self, state: str) -> RegistrationStatus:
        asked = self.asked[-1]
        return RegistrationStatus(
            registration=asked.registration or "",
            state=state,
            app=asked.app,
            model=asked.model,  # type: ignore[arg-type]
        )

    def _on_register(self, delivery: Delivery) -> None:
        self.asked.append(decode(Register, delivery.data))
        self.heard.set()
        registration = self.asked[-1].registration or ""
        reply = self.reply or RegistrationAccepted(registration=registration)
        self.bus.publish(delivery.reply, encode(reply))
        if self.reply is None:
            for state in self.states:
                self.bus.publish(SUBJECTS.registration(registration), encode(self.status(state)))

    def _on_status(self, delivery: Delivery) -> None:
        if delivery.reply and self.answers_status:
            known = self.asked and self.asked[-1].registration == delivery.subject.rpartition(".")[2]
            none = Refusal(error=Error(code="bad_request", message="none"))
            self.bus.publish(delivery.reply, encode(self.status("done") if known else none))


@asynccontextmanager
async def on_a_bus() -> AsyncIterator[tuple[Broker, Bus]]:
    broker = Broker()
    bus = broker.connect()
    try:
        async with asyncio.timeout(120):
            yield broker, bus
    finally:
        await bus.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"model")
    return path


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    path = tmp_path / "validation.npz"
    np.savez(path, x=np.zeros((3, 2), np.float32), y=np.arange(3))
    return path


async def test_functions_go_with_the_request_and_labels_stay_the_names_that_come_out(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def decode(item):\n    return [len(item)]\ndef name(scores):\n    return 'ab'[scores.argmax()]\n"
    )
    functions = {"before": f"{tmp_path}/own.py:decode", "after": f"{tmp_path}/own.py:name"}
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        pictures = raw_samples([b"\xff\xd8one", b"\xff\xd8"])["x"]
        await register(bus, SUBJECTS, model, app="a", validation=(pictures, np.array(["b", "a"])), **functions)
        (asked,) = registrar.asked
        assert (asked.metric, asked.labels) == ("top1", [])
        assert asked.functions == functions_of(**functions)
        assert (asked.functions.before, asked.functions.after, len(asked.functions.sources)) == (
            "own.py:decode",
            "own.py:name",
            1,
        )
        uploads = await bus.object_store(SUBJECTS.uploads_bucket)
        with np.load(io.BytesIO(await uploads.get(asked.validation))) as sent:
            assert (sent["x"].tolist(), sent["y"].tolist()) == ([b"\xff\xd8one", b"\xff\xd8"], ["b", "a"])


def test_functions_that_cannot_be_sent_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def decode(item): ...\n")
    (tmp_path / "long.py").write_text("def decode(item): ...\n" + "#" * 70_000)
    for before, says in (
        ("decode", "give FILE.py:FUNCTION or MODULE:FUNCTION"),
        (f"{tmp_path}/own.py:name", "has no function name, only decode"),
        (f"{tmp_path}/none.py:name", "cannot be read as Python"),
        ("no.such.module:name", "cannot be read as Python"),
        (f"{tmp_path}/long.py:decode", "more than 64 kB"),
    ):
        with pytest.raises(BadInput, match=says):
            functions_of(before)
    with pytest.raises(BadInput, match="ends in a zero byte"):
        raw_samples([b"a\0"])


async def test_files_are_uploaded_and_statuses_followed(model: Path, validation: Path) -> None:
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        told: list[str] = []
        status = await register(
            bus,
            SUBJECTS,
            model,
            app="a",
            model="m",
            validation=validation,
            metric="top5",
            latency_ms=3.0,
            on_progress=lambda s: told.append(s.state),
        )
        assert status == registrar.status("done")
        assert told == ["accepted", "accepted", "inspecting", "done"]
        asked = registrar.asked[0]
        assert (asked.app, asked.model, asked.format, asked.metric, asked.latency_ms) == ("a", "m", "onnx", "top5", 3.0)
        uploads = await bus.object_store(SUBJECTS.uploads_bucket)
        assert await uploads.get(asked.object) == b"model"
        assert await uploads.get(asked.validation) == (model.parent / "validation.npz").read_bytes()
        assert asked.object.startswith(f"{asked.registration}."), "the registrar removes only what bears its name"


async def test_a_model_has_its_apps_name_by_default(model: Path, validation: Path) -> None:
    """Two apps, and nothing of one gets into the versions of the other."""
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        for app in ("fraud", "health"):
            await register(bus, SUBJECTS, model, app=app, validation=validation)
        assert [asked.model for asked in registrar.asked] == ["fraud", "health"]
        with pytest.raises(BadInput, match="model: a model without an app needs a name"):
            await register(bus, SUBJECTS, model, app="_", validation=validation)


async def test_arrays_are_sent_as_a_file(model: Path) -> None:
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        arrays = (np.ones((2, 3), np.float32), np.array([0, 1]))
        await register(bus, SUBJECTS, model, app="a", model="m", validation=arrays, labels_key="label")
        uploads = await bus.object_store(SUBJECTS.uploads_bucket)
        target = model.parent / "sent.npz"
        await uploads.get_to(registrar.asked[0].validation, target)
        with np.load(target) as stored:
            assert np.array_equal(stored["x"], arrays[0])
            assert np.array_equal(stored["label"], arrays[1])


async def test_labels_may_be_texts_and_arrays_have_the_names_of_inputs(model: Path) -> None:
    """Texts become class numbers: by the names that were given, else in sorted order."""
    path = model.parent / "texts.npz"
    np.savez(
        path, left=np.ones((3, 2), np.float32), right=np.zeros((3, 1), np.float32), y=np.array(["oak", "ash", "oak"])
    )
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        uploads = await bus.object_store(SUBJECTS.uploads_bucket)
        for names, numbers, kept in (((), [1, 0, 1], ["ash", "oak"]), (("oak", "ash"), [0, 1, 0], ["oak", "ash"])):
            await register(bus, SUBJECTS, model, app="a", model="m", validation=path, labels=names)
            assert registrar.asked[-1].labels == kept
            await uploads.get_to(registrar.asked[-1].validation, model.parent / "sent.npz")
            with np.load(model.parent / "sent.npz") as stored:
                assert stored["y"].tolist() == numbers
                assert stored["left"].shape == (3, 2)
        with pytest.raises(BadInput, match="no class 'ash'"):
            await register(bus, SUBJECTS, model, app="a", model="m", validation=path, labels=["oak", "elm"])


async def test_a_pickle_is_refused_with_the_lines_that_register_it(tmp_path: Path, validation: Path) -> None:
    (tmp_path / "model.joblib").write_bytes(b"anything")
    async with on_a_bus() as (_broker, bus):
        with pytest.raises(BadInput, match=r"joblib\.load\('model\.joblib'\); infaas\.register\("):
            await register(bus, SUBJECTS, tmp_path / "model.joblib", app="a", model="m", validation=validation)


async def test_refusals_and_time_outs_say_what_becomes_of_the_registration(model: Path, validation: Path) -> None:
    async with on_a_bus() as (broker, bus):
        refusal = Refusal(error=Error(code="forbidden", message="not here"))
        await Registrar(broker.connect(), reply=refusal).open()
        with pytest.raises(Refused, match="not here") as raised:
            await register(bus, SUBJECTS, model, app="a", model="m", validation=validation)
        assert raised.value.code == "forbidden"
        assert await (await bus.object_store(SUBJECTS.uploads_bucket)).keys() == []
    async with on_a_bus() as (broker, bus):
        (await Registrar(broker.connect(), states=("building",)).open()).answers_status = False
        with pytest.raises(Timeout, match="it continues"):
            await register(bus, SUBJECTS, model, app="a", model="m", validation=validation, timeout=0.3)


async def test_an_end_that_was_missed_is_asked_for(model: Path, validation: Path) -> None:
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect(), states=()).open()
        waiting = asyncio.create_task(register(bus, SUBJECTS, model, app="a", model="m", validation=validation))
        await registrar.heard.wait()
        subject = SUBJECTS.registration(registrar.asked[0].registration or "")
        follower = Follower(bus, subject, RegistrationStatus, "registrar", lambda _status: None, quiet_s=0.01)
        await follower.open()
        assert (await follower.end(OVER, accepted=True)).state == "done"
        await follower.close()
        waiting.cancel()


async def test_nobody_and_unknown_registrations_have_no_status(model: Path) -> None:
    async with on_a_bus() as (_broker, bus):
        with pytest.raises(NotConnected, match="infaas doctor"):
            await last_status(bus, SUBJECTS, "r1")
    async with on_a_bus() as (broker, bus):
        await Registrar(broker.connect()).open()
        assert await last_status(bus, SUBJECTS, "r1") is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model_file": "missing.onnx"}, "model file"),
        ({"model_file": "net.bin"}, "format: "),
        ({"model_file": "empty.onnx"}, "empty"),
        ({"validation": "missing.npz"}, "validation set"),
        ({"validation": "net.onnx"}, "npz"),
        ({"labels_key": "label"}, "labels_key: .*only x, y"),
        ({"inputs_key": "images"}, "inputs_key: "),
        ({"labels_key": "x"}, "labels_key: 'x' holds the inputs"),
        ({"validation": (np.array([None]), np.array([1]))}, "objects"),
        ({"validation": (np.zeros((0, 2), "f4"), np.zeros(0, int))}, "array 'x' holds no items"),
        ({"validation": (np.zeros((20, 2), "f4"), np.int64(1))}, "array 'y' holds one value"),
        ({"validation": (np.zeros((20, 2), "f4"), np.arange(20)), "metric": "ndcg"}, "rankings: pass groups="),
        ({"validation": (np.zeros((20, 2), "f4"), np.arange(20)), "groups": [0] * 20}, "groups: top1 judges single"),
        (
            {"validation": (np.zeros((20, 2), "f4"), np.arange(20)), "metric": "mae", "labels": ["a"]},
            "labels: are names",
        ),
    ],
)
async def test_bad_files_are_not_sent(model: Path, validation: Path, options: dict[str, Any], word: str) -> None:
    (model.parent / "empty.onnx").touch()
    (model.parent / "net.bin").write_bytes(b"model")
    given = {"model_file": str(model), "validation": validation, **options}

    async with on_a_bus() as (_broker, bus):
        with chdir(model.parent), pytest.raises(BadInput, match=word):
            await register(bus, SUBJECTS, app="a", model="m", **given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1]), "changed while it was uploaded"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
)
async def test_a_file_that_changes_or_goes_meanwhile_is_not_registered(
    model: Path, validation: Path, change: Callable[[Path], None], told: str
) -> None:
    async with on_a_bus() as (broker, bus):
        registrar = await Registrar(broker.connect()).open()
        with pytest.raises(BadInput, match=f"{model.name} {told}"):
            await register(
                bus,
                SUBJECTS,
                model,
                app="a",
                validation=validation,
                on_progress=lambda said: meanwhile(said, model, change),
            )
        assert registrar.asked == []


def meanwhile(status: RegistrationStatus, path: Path, change: Callable[[Path], None]) -> None:
    if status.step.startswith(f"uploading {path.name}"):
        change(path)


def test_an_export_keeps_the_functions_files_of_two_versions_apart() -> None:
    functions, none = Functions(before="o.py:f", sources={"o.py": ""}), Signature(inputs=[], outputs=[])
    found = [
        _file_of(
            ModelRecord(
                model="m", version=version, task=None, metric="top1", format="onnx", source="s", validation="v",
                signature=none, created=1.0, registration="r", functions=functions,
            )
        )
        for version in ("1", "2")
    ]  # fmt: skip
    assert [one["before"] for one in found] == ["models/m-1/o.py:f", "models/m-2/o.py:f"]
    assert "after" not in found[0]
