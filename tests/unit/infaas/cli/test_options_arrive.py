"""Each option of the commands that ask for something arrives in its message, as the field that it is meant to be."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.codec import encode
from bus.messages.jobs import JobAccepted
from bus.messages.public import (
    Accepted,
    Error,
    Listing,
    Refusal,
    RegistrationAccepted,
    RegistrationCancelled,
    RegistrationStatus,
)
from bus.messages.work import ContainerPlace
from bus.natsbus import NatsBus
from bus.port import Delivery
from infaas.cli import main
from tests.support.clients.commands import ran
from tests.support.servers.processes import eventually

SUBMIT = "submit --app a --input nats://b/in.npy --output nats://b/out.npy"
REFUSAL = encode(Refusal(error=Error(code="bad_request", message="heard")))
ADMIN: dict[str, tuple[str, Any]] = {  # option: its verb with what that needs, and the field's value
    "--app a": ("delete-app", {"app": "a"}),
    "--model m": ("set-version a --version 1", {"app": "a", "model": "m", "version": "1"}),
    "--version 3": ("link-model a --model m", {"version": "3"}),
    "--variant v": ("release-variant", {"variant": "v"}),
    "--worker w": ("release-variant --variant v", {"worker": "w"}),
    "--latency-ms 7.5": ("set-app a", {"latency_ms": 7.5}),
    "--no-latency-ms": ("set-app a", {"latency_ms": None}),
    "--default-output [1]": ("set-app a", {"default_output": [1]}),
    "--no-default-output": ("set-app a", {"default_output": None}),
    "--min-instances 3": ("set-app a", {"min_instances": 3}),
    "--count 4": ("set-replicas a", {"count": 4}),
    "--input-type floats": ("add-app a", {"input_type": "floats"}),
    "--slo-target 0.9": ("set-target a", {"slo_target": 0.9}),
    "--no-slo-target": ("set-target a", {"slo_target": None}),
    "--accuracy any": ("set-app a", {"accuracy": "any"}),
    "--policy exp4": ("set-selection a", {"policy": "exp4"}),
    "--members x y": ("set-selection a --policy exp4", {"members": ["x", "y"]}),
    "--eta 0.3": ("set-selection a --policy exp4", {"eta": 0.3}),
    "--contextual": ("set-selection a --policy exp4", {"contextual": True}),
    "--confidence 0.6": ("set-selection a --policy exp4", {"confidence": 0.6}),
    "--wait-share 0.7": ("set-selection a --policy exp4", {"wait_share": 0.7}),
    "--cache-mb 8": ("set-selection a", {"cache_mb": 8.0}),
    "--context me": ("reset-selection a", {"context": "me"}),
    "--batch 5": ("set-batching a --policy fixed", {"batch": 5}),
    "--slo-ms 9": ("set-batching a --policy aimd", {"slo_ms": 9.0}),
    "--wait-ms 2": ("set-batching a --policy delayed", {"wait_ms": 2.0}),
    "--quantum-ms 6": ("set-batching a --policy threshold", {"quantum_ms": 6.0}),
    "--contexts 2": ("set-batching a --policy edf", {"contexts": 2}),
}
NEEDS: dict[str, Any] = {
    "--latency-ms 7.5": {"latency_ms": 7.5},
    "--accuracy 0.9": {"accuracy": 0.9},
    "--metric r2": {"metric": "r2"},
    "--mae 3": {"accuracy": 0.25, "metric": "mae"},
    "--rmse 4": {"accuracy": 0.2, "metric": "rmse"},
    "--log-loss 1": {"accuracy": 0.5, "metric": "log_loss"},
    "--r2 0": {"accuracy": 0.5, "metric": "r2"},
    "--f1-macro 0.5": {"accuracy": 0.5, "metric": "f1_macro"},
    "--roc-auc 0.5": {"accuracy": 0.5, "metric": "roc_auc"},
    "--average-precision 0.5": {"accuracy": 0.5, "metric": "average_precision"},
    "--ndcg 0.5": {"accuracy": 0.5, "metric": "ndcg"},
    "--agreement 0.5": {"accuracy": 0.5, "metric": "agreement"},
    "--cost 0.5": {"cost": 0.5},
    "--model m": {"model": "m"},
    "--version 2": {"model": "m", "version": "2"},
    "--variant v": {"variant": "v"},
    "--context me": {"context": "me"},
    "--confidence 0.6": {"confidence": 0.6},
    "--priority 2": {"priority": 2},
}
OWN = "def same(item):\n    return item\n"
OF_A_MODEL: dict[str, Any] = {  # of `register` and `container`
    "--app b": {"app": "b"},
    "--model m": {"model": "m"},
    "--inputs-key other": {"inputs_key": "other"},
    "--labels-key more": {"labels_key": "more"},
    "--version 7": {"version": "7"},
    "--task reading": {"task": "reading"},
    "--metric top5": {"metric": "top5"},
    "--latency-ms 7.5": {"latency_ms": 7.5},
    "--slo-target 0.9": {"slo_target": 0.9},
    "--accuracy any": {"accuracy": "any"},
    "--default-output [1]": {"default_output": [1]},
}
REGISTER: dict[str, Any] = {
    **OF_A_MODEL,
    "--labels a,b,c": {"labels": ["a", "b", "c"]},
    "--format pt2": {"format": "pt2"},
    "--dry-run": {"dry_run": True},
    "--contended": {"contended": True},
    "--contexts 2": {"contexts": 2},
    "--allow-nan": {"allow_nan": True},
    "--target price": {"target": "price"},
    "--unit EUR": {"unit": "EUR"},
    "--before own.py:same": {"functions": {"before": "own.py:same", "sources": {"own.py": OWN}}},
    "--after own:same": {"functions": {"after": "own.py:same", "sources": {"own.py": OWN}}},
}


@contextmanager
def refusing(
    url: str, prefix: str, replies: Mapping[str, bytes | None] | None = None
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A peer in a thread that refuses all requests, and keeps their subjects and bodies.

    replies: what it says instead where the subject goes on with the key, after the prefix. None: nothing.
    """
    heard: list[tuple[str, dict[str, Any]]] = []
    ready, done = threading.Event(), threading.Event()

    async def peer() -> None:
        bus = await NatsBus.connect(url, name="peer")

        def refuse(delivery: Delivery) -> None:
            if delivery.reply:
                heard.append((delivery.subject, msgspec.msgpack.decode(delivery.data) if delivery.data else {}))
                found = (reply for key, reply in (replies or {}).items() if f"{prefix}.{key}" in delivery.subject)
                if (reply := next(found, REFUSAL)) is not None:
                    bus.publish(delivery.reply, reply)
                if replies and delivery.subject == f"{prefix}.register":  # and at once, what became of it
                    bus.publish(f"{prefix}.registration.{heard[-1][1]['registration']}", encode(DONE))

        try:
            await bus.subscribe(f"{prefix}.>", refuse)
            await bus.flush()
            ready.set()
            await asyncio.to_thread(done.wait)
            await bus.flush()  # what was said just before the end is heard, too
        finally:
            await bus.close()

    thread = threading.Thread(target=asyncio.run, args=(peer(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield heard
    finally:
        done.set()
        thread.join()


@pytest.fixture
def place(nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """Where the commands look for their system."""
    monkeypatch.setenv("INFAAS_NATS_URL", nats_url)
    monkeypatch.setenv("INFAAS_PREFIX", prefix)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return nats_url, prefix


@pytest.fixture
def heard(place: tuple[str, str]) -> Iterator[Any]:
    with refusing(*place) as found:
        yield found


def a_model_and_its_validation_set() -> None:
    arrays = {name: np.zeros((4, 2), np.float32) for name in ("x", "other")}
    np.savez("v.npz", **arrays, **{name: np.arange(4) % 3 for name in ("y", "more")})
    Path("m.onnx").write_bytes(b"model")
    Path("own.py").write_text(OWN)


def said(heard: list[tuple[str, dict[str, Any]]], words: str, subject: str) -> dict[str, Any]:
    """What the command sends there."""
    heard.clear()
    main(words.split())
    return next(body for where, body in heard if f".{subject}" in where)


def test_options_of_admin_and_register_are_fields(heard: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option, (rest, fields) in ADMIN.items():
        verb = rest.split()[0]
        body = said(heard, f"admin {rest} {option}", f"admin.{verb}")
        assert {name: body[name] for name in fields} == fields, option
        assert capsys.readouterr().err == "infaas: bad_request: heard\n"
    a_model_and_its_validation_set()
    for option, fields in REGISTER.items():
        app = "" if option.startswith("--app") else "--app a"
        body = said(heard, f"register m.onnx {app} --validation v.npz {option}", "register")
        assert {name: body[name] for name in fields} == fields, option
    for wrong in ("--metric acc", "--before own.py:other"):
        assert main(f"register m.onnx --app a --validation v.npz {wrong}".split()) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"infaas: {wrong.split()[0]}: ")


@pytest.mark.parametrize(
    "command",
    [
        "query --app a --json-input [[1.0]]",
        "explain --app a",
        "bench --app a --input x.npy --closed 1 --warmup 0 --seconds 0.01",
    ],
)
def test_each_need_is_a_field(heard: Any, command: str) -> None:
    np.save("x.npy", np.zeros((1, 2), np.float32))
    for option, fields in NEEDS.items():
        more = "--model m" if option.startswith("--version") else ""
        asked = command.partition(" ")[0].replace("bench", "query")
        body = said(heard, f"{command} {more} {option}", asked)
        assert {name: pytest.approx(body[name]) if name == "accuracy" else body[name] for name in fields} == fields, (
            option
        )


def test_options_of_submit_and_filters_of_lists_are_fields(heard: Any) -> None:
    filters = {"apps": ["app"], "models": ["app", "model"], "variants": ["app", "model"], "jobs": ["app"]}
    for what, options in filters.items():
        for option in options:
            assert said(heard, f"{what} --{option} a", f"list.{what}") == {option: "a"}
    assert said(heard, "selection --app a --context me", "list.selection") == {"app": "a", "context": "me"}
    options = {
        "--accuracy 0.9": {"accuracy": 0.9},
        "--metric mae": {"metric": "mae"},
        "--model m": {"model": "m"},
        "--variant v": {"variant": "v"},
    }
    for option, fields in options.items():
        body = said(heard, f"{SUBMIT} {option}", "job.a")
        assert {"input": "nats://b/in.npy", "output": "nats://b/out.npy", **fields}.items() <= body.items(), option


def test_registrations_of_one_app(place: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    async def begun() -> None:
        bus = await NatsBus.connect(place[0], name="registrar")
        statuses = await bus.key_value(f"{place[1]}-status")
        for app in ("a", "b"):
            status = RegistrationStatus(registration=f"r-{app}", state="building", app=app, model="m")
            await statuses.put(f"registration.r-{app}", encode(status))
        await bus.close()

    asyncio.run(begun())
    for option, wanted in ((["--app", "b"], ["b"]), ([], ["a", "b"])):
        assert main(["registrations", "--json", *option]) == 0
        assert [one["app"] for one in json.loads(capsys.readouterr().out)["items"]] == wanted


@pytest.mark.filterwarnings("ignore")
def test_the_options_of_container_are_fields(
    place: tuple[str, str], nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one command: its process is started, inspected and measured first."""
    monkeypatch.setattr("infaas.cli.container.APPEARS_S", 0.0)  # nobody else registers the version

    async def made() -> None:
        bus = await NatsBus.connect(nats_url, name="registrar")
        await bus.key_value(f"{prefix}-catalog")
        await bus.object_store(f"{prefix}-artifacts")
        await bus.close()

    asyncio.run(made())
    Path("own_class.py").write_text(
        "class Own:\n    def predict_batch(self, inputs):\n        return {'scores': inputs['other']}\n"
    )
    np.savez("v.npz", other=np.eye(6, dtype=np.float32)[np.arange(24) % 6], more=np.arange(24) % 6)
    Path("names.txt").write_text("\n".join("abcdef"))
    Path("own.toml").write_text(f'prefix = "{prefix}"\n[bus]\nurl = "{nats_url}"\n')
    options = {**OF_A_MODEL, "--labels names.txt": {"labels": [*"abcdef"]}}
    given, fields = " ".join(options), {name: value for one in options.values() for name, value in one.items()}
    new = ContainerPlace(version="7", signature=None, agreement=0.9)
    with refusing(*place, {"registrar.container": encode(new)}) as heard:
        words = f"container own_class:Own --validation v.npz --max-batch 2 --config own.toml {given}"
        body = said(heard, words, "register")
    assert {name: body[name] for name in fields} == fields
    assert body["container"]["max_batch"] == 2


def test_the_id_and_the_array_of_a_query_are_sent(heard: Any) -> None:
    assert said(heard, "query --app a --json-input [[1.0]] --id mine", "query.a")["id"] == "mine"
    np.savez("two.npz", x=np.zeros((1, 2), np.float32), other=np.ones((1, 2), np.float32))
    sent = said(heard, "query --app a --input two.npz --input-key other", "query.a")["inputs"]
    assert np.ones((1, 2), np.float32).tobytes() in msgspec.msgpack.encode(sent)


def listing(**item: Any) -> bytes:
    return encode(Listing(items=[item]))


JOB = {"job": "j1", "app": "a", "state": "done", "done": 1, "total": 1, "failed": 0, "cost": 0.1, "output": "nats://b/out.npy", "reason": "words " * 20}  # fmt: skip
DONE = RegistrationStatus(registration="r1", state="done", app="a", model="m", version="1", variants=["m-v1"])
FIGURES = {
    "app": "a",
    "variant": "m-v1",
    "model": "m",
    "version": "1",
    "hardware": "cpu",
    "price_per_hour": 12.5,
    "accuracy": 0.5,
}
REPLIES = {
    "list.jobs": listing(**JOB),
    "list.selection": listing(member="m" * 90, weight=1.0, probability=1.0, n=0),
    "list.variants": listing(**FIGURES),
    "register": encode(RegistrationAccepted(registration="r1")),
    "registration.": encode(DONE),
    "registration-cancel.": encode(RegistrationCancelled()),
    "query.": None,
    "feedback.": encode(Accepted()),
}


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        ("jobs", "nats://b/out.npy"),
        ("selection --app a", "m" * 90 + "  "),  # else in lines of its own
        ("register m.onnx --app a --validation v.npz", "12.5"),
    ],
)
def test_wide_shows_what_the_terminal_has_no_room_for(
    place: tuple[str, str], command: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_model_and_its_validation_set()
    with refusing(*place, REPLIES):
        assert hidden not in ran(capsys, command.split()).out
        assert hidden in ran(capsys, [*command.split(), "--wide"]).out


def test_json_is_one_document(place: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    a_model_and_its_validation_set()
    with refusing(*place, REPLIES):
        assert main(["cancel", "r1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"registration": "r1", "cancelled": True}
        assert main(["register", "m.onnx", "--app", "a", "--validation", "v.npz", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        Path("labels.csv").write_text("id,label\nq1,1\n")
        assert main(["feedback", "a", "labels.csv", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"labels": 1, "accepted": 1, "refused": []}
    assert (document["state"], document["variants"]) == ("done", [FIGURES])


def test_a_query_waits_as_long_as_its_timeout_says(place: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody answers; without the option it would wait for 30 s."""
    with refusing(*place, REPLIES) as heard:
        assert main(["query", "--app", "a", "--json-input", "[[1.0]]", "--timeout", "0.2"]) == 1
        assert eventually(lambda: len(heard) > 1)
    assert "no reply on" in capsys.readouterr().err
    # what gets no reply is sent again after a second or more
    assert [subject.split(".")[1] for subject, _ in heard] == ["query", "cancel"]


@pytest.mark.parametrize("command", [SUBMIT, "jobs", "jobs j1"])
def test_a_job_is_waited_for_as_long_as_the_timeout_says(
    place: tuple[str, str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody tells how far the job is; without the option the command would wait for two minutes."""
    begun = {**JOB, "state": "running"}
    replies = {"job.": encode(JobAccepted(job="j1")), "list.jobs": listing(**begun), "job-status.": None}
    with refusing(*place, replies):
        assert main([*command.split(), "--wait", "--timeout", "0.2"]) == 1
    assert "job j1 has not ended after 0.2 s" in capsys.readouterr().err


def test_what_a_bench_sends(place: tuple[str, str]) -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2]}]
    np.savez("two.npz", x=np.zeros((4, 2), np.float32), other=np.ones((4, 2), np.float32))

    def sent(words: str) -> Any:
        return said(heard, f"bench --app a --closed 1 --seconds 0.01 --warmup 0 {words}", "query.a")["inputs"]

    with refusing(*place, {"list.apps": listing(app="a", inputs=inputs)}) as heard:
        assert np.ones((3, 2), np.float32).tobytes() in msgspec.msgpack.encode(
            sent("--input two.npz --input-key other --items 3")
        )
        first, again, other = (sent(f"--seed {seed}") for seed in (1, 1, 2))
        assert first == again != other


@pytest.mark.parametrize(
    "words",
    [
        "jobs --timeout 5",
        f"{SUBMIT} --timeout 5",
        "jobs j1 --app a",
        "query --app a --json-input [1] --input-key x",
        "bench --app a --input-key x",
    ],
)
def test_an_option_without_what_it_is_for_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    option = [word for word in words.split() if word.startswith("--")][-1]
    assert capsys.readouterr().err.startswith(f"infaas: {option}: ")
