"""Users' own Python processes as variants of a whole system: several frameworks, crashes, replicas, a bad class, two systems on one bus."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infaas
from infaas.demo import digits
from infaas.errors import InfaasError, Refused
from tests.support.servers.processes import alive, container, eventually, program
from tests.support.servers.processes import infaas as command
from tests.support.servers.system import MODELS, Whole, talk

APP = "contained"  # an app of these tests, with the system's own models beside what they register

CLASSES = """
import ctypes
import os
import time

import numpy as np

OUTPUT = {output!r}
INPUT = {input!r}


class Centroids:
    \"\"\"As scikit-learn has it: fit, then scores.\"\"\"

    def __init__(self):
        with np.load({validation!r}) as file:
            x, y = file["x"], file["y"]
        self.centres = np.stack([x[y == label].mean(axis=0) for label in range(10)])

    def decision_function(self, x):
        return -((x[:, None, :] - self.centres) ** 2).sum(axis=2)

    def predict_batch(self, inputs):
        x = inputs[INPUT]
        if (x[:, 0] == 666).any():
            ctypes.string_at(0)
        if (x[:, 0] == 667).any():
            raise ValueError("this is no digit")
        return {{OUTPUT: self.decision_function(x)}}


class Onnx:
    def __init__(self):
        import onnxruntime

        self.session = onnxruntime.InferenceSession({onnx!r}, providers=["CPUExecutionProvider"])

    def predict_batch(self, inputs):
        name = self.session.get_inputs()[0].name
        return {{OUTPUT: self.session.run(None, {{name: inputs[INPUT]}})[0]}}


def closure_over(weights):
    return lambda inputs: {{OUTPUT: inputs[INPUT] @ weights}}


linear = closure_over(Centroids().centres.T.astype(np.float32))


class Slow(Centroids):
    def predict_batch(self, inputs):
        time.sleep(0.05)
        return super().predict_batch(inputs)


class Paced(Centroids):
    \"\"\"A batch of b takes 180 + 12 b ms.\"\"\"

    def predict_batch(self, inputs):
        until = time.monotonic() + 0.180 + 0.012 * len(inputs[INPUT])
        outputs = super().predict_batch(inputs)
        time.sleep(max(0.0, until - time.monotonic()))
        return outputs


class Each(Centroids):
    \"\"\"An item takes 120 ms.\"\"\"

    def predict_batch(self, inputs):
        until = time.monotonic() + 0.120 * len(inputs[INPUT])
        outputs = super().predict_batch(inputs)
        time.sleep(max(0.0, until - time.monotonic()))
        return outputs


class Wrong(Centroids):
    def predict_batch(self, inputs):
        return {{OUTPUT: -super().predict_batch(inputs)[OUTPUT]}}


class Nan(Centroids):
    def predict_batch(self, inputs):
        return {{OUTPUT: super().predict_batch(inputs)[OUTPUT] * np.nan}}
"""


@pytest.fixture(scope="module")
def place(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a module of users' classes and a validation set."""
    made = tmp_path_factory.mktemp("containers")
    digits.save_validation(made / "validation.npz")
    for verb in (("add-app", APP), *(("link-model", APP, "--model", model) for model in MODELS)):
        system.done("admin", *verb)
    apps: list[dict[str, Any]] = []

    def there() -> bool:
        apps[:] = [item for item in system.told("apps", "--app", APP) if item["models"] == sorted(MODELS)]
        return bool(apps)

    assert eventually(there)
    (app,) = apps
    text = CLASSES.format(
        input=app["inputs"][0]["name"],
        output=app["outputs"][0]["name"],
        validation=str(made / "validation.npz"),
        onnx=str(digits.models()["mlp-s"]),
    )
    (made / "classes.py").write_text(text)
    return made


def started(place: Path, name: str, model: str, *more: str, **variables: str) -> Any:
    """This class as a container."""
    about = ("--app", APP, "--model", model, "--validation", "validation.npz")
    return container(place, f"classes:{name}", *about, *more, **variables)


@contextmanager
def containers(system: Whole, place: Path, *named: tuple[str, str]) -> Iterator[list["subprocess.Popen[str]"]]:
    """These classes, each as a container of this model, one after the other; ended at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(started(place, name, model, *system.where))[0] for name, model in named]


def with_first(x: np.ndarray, value: float) -> np.ndarray:
    changed = x[:1].copy()
    changed[0, 0] = value
    return changed


class Load:
    """Queries one after the other, in a thread, with these needs."""

    def __init__(self, system: Whole, **needs: Any) -> None:
        self._system = system
        self._needs = needs
        self._end = threading.Event()
        self.answered = 0
        self.errors: list[InfaasError] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))

    async def _ask(self) -> None:
        async with infaas.connect(data_dir=self._system.directory) as client:
            while not self._end.is_set():
                try:
                    await client.query(APP, self._system.x[:1], timeout=60.0, **self._needs)
                    self.answered += 1
                except InfaasError as error:
                    self.errors.append(error)
                    return

    def __enter__(self) -> "Load":
        self._thread.start()
        if not eventually(lambda: self.answered > 0 or bool(self.errors)) or self.errors:
            self.__exit__()
            raise AssertionError(f"no query is answered: {self.errors[:1]}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def goes_on(self, queries: int = 20) -> bool:
        """Whether so many more are answered."""
        more = self.answered + queries
        return eventually(lambda: self.answered >= more)


def ask(system: Whole, x: np.ndarray, **needs: Any) -> Any:
    return talk(system, lambda client: client.query(APP, x, timeout=60.0, **needs))


def test_a_closure_a_fitted_object_and_an_onnx_session_answer_the_same_queries(system: Whole, place: Path) -> None:
    kinds = {"linear": "closure", "Centroids": "fitted", "Onnx": "session"}
    with containers(system, place, *kinds.items()):
        items: dict[str, Any] = {}

        def active() -> bool:
            found = listed(system, *kinds.values())
            items.update({item["model"]: item for item in found if item["state"] == "Active"})
            return len(items) == len(kinds)

        assert eventually(active)
        for model, item in items.items():
            assert item["framework"] == "container"
            answer = ask(system, system.x[:200], model=model)
            (scores,) = answer.outputs.values()
            right = float((scores.argmax(axis=1) == system.y[:200]).mean())
            assert abs(right - item["accuracy"]) < 0.15, model
            assert answer.variant == item["variant"]
    session = ask(system, system.x[:50], model="mlp-s")
    assert session.hardware == "cpu", "the app's own models serve on"


def listed(system: Whole, *models: str) -> list[dict[str, Any]]:
    """The variants of these models."""
    return [item for item in system.told("variants", "--app", APP) if item["model"] in models]


def test_a_profile_has_the_time_of_each_batch_and_the_accuracy_of_all_samples(system: Whole, place: Path) -> None:
    with started(place, "Paced", "paced", "--max-batch", "8", *system.where) as (_, said):
        assert eventually(lambda: bool(listed(system, "paced")))
        (found,) = listed(system, "paced")
    assert found["variant"] == said["variant"]
    slept = {str(batch): 180.0 + 12.0 * batch for batch in (1, 2, 4, 8)}
    measured = found["batch_latency_ms"]
    assert measured.keys() == slept.keys()
    assert all(measured[batch] >= slept[batch] for batch in slept), "how much more is the machine's affair"
    with np.load(place / "validation.npz") as file:
        x, y = file["x"], file["y"]
    centres = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    right = ((x[:, None, :] - centres) ** 2).sum(axis=2).argmin(axis=1) == y
    assert found["accuracy"] == right.mean()
    assert 0.0 <= found["accuracy_low"] < found["accuracy"] < found["accuracy_high"] <= 1.0


def test_an_input_that_crashes_the_process_is_refused_and_everybody_else_is_served(system: Whole, place: Path) -> None:
    with containers(system, place, ("Centroids", "crashing")), Load(system, model="mlp-s") as others:
        with pytest.raises(Refused, match="SIGSEGV") as crashed:
            ask(system, with_first(system.x, 666), model="crashing")
        assert crashed.value.code == "model_error"

        def raised() -> bool:
            """What comes while the process is started again, which takes a busy machine longer than a query waits, says so."""
            with pytest.raises(Refused) as other:
                ask(system, with_first(system.x, 667), model="crashing")
            assert other.value.code == "model_error"
            assert "SIGSEGV" not in other.value.message
            return "ValueError: this is no digit" in other.value.message

        assert eventually(raised)
        assert ask(system, system.x[:3], model="crashing").model == "crashing"
        assert others.goes_on()
    assert others.errors == []


def test_one_more_process_is_a_replica_and_one_that_is_killed_is_not_missed(system: Whole, place: Path) -> None:
    with containers(system, place, ("Centroids", "twice"), ("Centroids", "twice")) as (first, _):
        about = ("--app", APP, "--model", "twice", "--validation", "validation.npz")
        done = system.command("container", "classes:Wrong", *about, cwd=place)
        assert done.returncode == 1
        assert "version 1 of model twice is another class" in done.stderr
        assert "another --version" in done.stderr
        done = system.command("container", "classes:Centroids", *about, "--latency-ms", "12345", cwd=place)
        assert done.returncode == 1
        assert "a replica changes nothing" in done.stderr
        children = children_of(first.pid)
        assert children, "the class runs in a process of its own"
        with Load(system, model="twice") as load:
            first.kill()
            first.wait()
            assert load.goes_on(50)
        assert load.errors == []
        assert eventually(lambda: not any(alive(pid) for pid in children))


def children_of(pid: int) -> list[int]:
    """Processes that run users' classes for this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[1]) == pid:
            found.append(int(process.name))
    return found


def test_a_class_is_measured_anew_on_labelled_queries_without_an_end(system: Whole, place: Path) -> None:
    app = "learned"
    about = ("--app", app, "--model", app, "--validation", "validation.npz")
    always = {"INFAAS_JOBS__UTILISATION_BELOW": "1", "INFAAS_JOBS__LATENCY_RATIO": "1e6"}  # also on a busy machine
    with container(place, "classes:Centroids", *about, *system.where, **always) as (process, joined):
        system.done("admin", "set-app", app, "--payloads", "1")
        x, count = system.x[:200], 200

        async def work(client: Any) -> list[dict[str, Any]]:
            told = []
            for n in range(0, count, 2):
                answer = await client.query(app, x[n : n + 2], timeout=60.0)
                scores = answer.output.argmax(axis=1)
                told += [
                    {"query": answer.query, "item": i, "label": int(scores[i]) if n % 4 else 9 - int(scores[i])}
                    for i in (0, 1)
                ]
            assert not await client.feedbacks(app, told)
            return told

        labels = talk(system, work)  # of every second query the others
        kept = place / "kept.npz"

        def labelled() -> bool:
            found = system.command("payloads", "export", app, str(kept), "--labelled", "--json")
            return found.returncode == 0 and f'"items": {count}' in found.stdout

        assert eventually(labelled), system.command("payloads", "export", app, str(kept), "--json")
        [before] = system.told("variants", app)
        document = system.told("remeasure", app)
        assert (document["labels"], [one["version"] for one in document["models"]]) == (count, [joined["version"]])
        right = 0.5  # 9 less a class is another one
        [after] = system.told("variants", app)
        assert abs(after["accuracy"] - right) < 1e-9 < before["registered"] - right
        assert after["accuracy_low"] < right < after["accuracy_high"]
        assert (after["variant"], after["accuracy_at"] > before["accuracy_at"]) == (joined["variant"], True)
        answer = talk(system, lambda client: client.query(app, x[:1], timeout=60.0))
        assert (answer.variant, answer.accuracy, answer.accuracy_source) == (joined["variant"], right, "registered")
        rows = "SELECT sum(items) FROM infaas.query_outcomes WHERE app = %s AND policy = 'offline' AND outcome = 'ok'"
        assert eventually(lambda: system.rows(rows, app) == [(len(labels),)]), system.rows(rows, app)
        assert process.poll() is None


def test_ctrl_c_answers_what_waits(system: Whole, place: Path) -> None:
    async def main(process: "subprocess.Popen[str]") -> list[str]:
        async with infaas.connect(data_dir=system.directory) as client:
            first = asyncio.ensure_future(client.query(APP, system.x[:1], model="slow", timeout=60.0))
            await first
            done: set[Any] = set()
            asked: list[Any] = []
            while len(done) == len(asked):  # this process may stand still until all are answered
                queries = [client.query(APP, system.x[:64], model="slow", timeout=60.0) for _ in range(20)]
                asked = [asyncio.ensure_future(query) for query in queries]
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            process.send_signal(signal.SIGINT)
            return [answer.model for answer in await asyncio.gather(*asked)]

    with containers(system, place, ("Slow", "slow")) as (process,):
        children = children_of(process.pid)
        assert children
        assert asyncio.run(main(process)) == ["slow"] * 20
        assert process.wait(180) == 0
        with pytest.raises(Refused, match=r"none can be started: container \S+ of slow@1 has gone at \d\d:\d\d UTC"):
            ask(system, system.x[:1], model="slow")
    assert eventually(lambda: not any(alive(pid) for pid in children))


def test_a_bad_class_and_a_bad_file_are_reported_before_anything_is_registered(system: Whole, place: Path) -> None:
    options = ("--app", APP, "--model", "tried", "--validation", "validation.npz")
    bad = command("container", "classes:Nan", *options, "--dry-run", cwd=place)
    assert bad.returncode == 1
    assert "NaN" in bad.stderr
    assert system.told("container", "classes:Centroids", *options, "--dry-run", cwd=place)["accuracy"] > 0.6
    (place / "broken.onnx").write_bytes(b"no model")
    broken = system.command("register", "broken.onnx", *options, "--dry-run", cwd=place)
    assert broken.returncode == 1
    assert broken.stderr.strip().splitlines()[-1].startswith("infaas: ")
    said = system.told("register", str(digits.models()["logreg"]), *options, "--dry-run", cwd=place)
    assert said["dry_run"] and said["accuracy"] > 0.8
    assert any("ort-fp32" in each["variant"] for each in said["variants"])
    assert "tried" not in system.done("models", "--json")


def test_two_systems_on_one_bus_do_not_see_each_other(system: Whole, place: Path) -> None:
    """The same names under another prefix are another app, another model, other workers."""
    other = {"INFAAS_PREFIX": "other", "INFAAS_NATS_URL": system.nats, "INFAAS_METRICS__ENABLED": "false"}
    with (
        program("infaas.cli", "run", "dispatcher", "registrar", cwd=place, **other),
        started(place, "Wrong", "mlp-s", **other) as (process, said),
    ):

        async def asked(**where: Any) -> tuple[Any, list[str], list[str]]:
            async with infaas.connect(**where) as client:
                answer = await client.query(APP, system.x[:1], model="mlp-s", timeout=60.0)
                workers = [item["worker"] for item in await client.workers()]
                return answer, workers, [item["variant"] for item in await client.variants(app=APP)]

        theirs, their_workers, their_variants = asyncio.run(asked(url=system.nats, prefix="other"))
        ours, our_workers, our_variants = asyncio.run(asked(data_dir=system.directory))
        assert (theirs.worker, their_workers, their_variants) == (said["worker"], [said["worker"]], [said["variant"]])
        assert not set(our_workers) & set(their_workers)
        assert not set(our_variants) & set(their_variants)
        assert ours.worker in our_workers
        os.kill(process.pid, signal.SIGKILL)
        assert asyncio.run(asked(data_dir=system.directory))[0].worker in our_workers


def shares_in_time(
    system: Whole, model: str, rates: dict[int, float], seconds: float, latency_ms: float
) -> dict[int, Any]:
    """Of evenly spaced queries, by priority: the share that was answered in time, and why others were refused."""

    async def asked() -> dict[int, list[Any]]:
        async with infaas.connect(data_dir=system.directory) as client:
            needs = {"model": model, "latency_ms": latency_ms, "raise_refused": False}
            due = sorted((n / rate, level) for level, rate in rates.items() for n in range(round(rate * seconds)))
            start, tasks = time.monotonic(), []
            for n, (at, level) in enumerate(due):
                await asyncio.sleep(max(0.0, start + at - time.monotonic()))
                query = client.query(APP, system.x[n % 64 : n % 64 + 1], priority=level, **needs)
                tasks.append((level, asyncio.create_task(query)))
            found: dict[int, list[Any]] = {level: [] for level in rates}
            for level, task in tasks:
                found[level].append(await task)
            return found

    return {
        level: (
            sum(isinstance(end, infaas.Answer) and not end.missed for end in ends) / len(ends),
            {end.code for end in ends if isinstance(end, Refused)},
        )
        for level, ends in asyncio.run(asked()).items()
    }


def test_at_twice_the_capacity_the_high_priority_is_in_time_and_the_low_one_gives_way(
    system: Whole, place: Path
) -> None:
    """A process that takes 276 ms for 8 is asked at twice what it can do: what of each level is in time."""
    rate = 2 * 8 / 0.276
    with started(place, "Paced", "ranked", "--max-batch", "8", *system.where):
        found = shares_in_time(system, "ranked", {1: 0.3 * rate, 9: 0.7 * rate}, 18.0, 4500)
    # in turn they would have equal shares; how large they are is the machine's affair
    assert found[1][0] >= 1.5 * found[9][0], found
    assert found[9][0] <= 0.6, found
    assert found[9][1] <= {"overloaded", "deadline"}


def test_batches_of_a_low_priority_leave_a_high_one_time(system: Whole, place: Path) -> None:
    """120 ms an item, so that a full batch would fill the objective. Without room half of the high ones have none."""
    with started(place, "Each", "each", *system.where):
        found = shares_in_time(system, "each", {1: 10.0 / 3, 9: 50.0 / 3}, 24.0, 1500)
    assert found[1][0] > found[9][0] + 0.2, found  # how many of them is the machine's affair
    assert found[9][0] > 0, found
