"""A user's class in a process of its own: what it returns, what it does wrong, and that its end costs one batch."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends.base import Cancelled, LoadFailed, RunFailed
from services.executor.backends.container import UserProcess
from tests.support.servers.processes import alive, eventually

CLASSES = """
import ctypes, os, sys, time
import numpy as np

def crash(_): ctypes.string_at(0)
def leave(_): os._exit(7)
def shut(_):
    os.closerange(3, 256)
    time.sleep(1000)
def hang(_): time.sleep(1000)
def leave_a_child(_):
    if not os.fork():
        os.setsid()
        print(os.getpid(), file=open("child", "w"), flush=True)
        time.sleep(1000)
    while not os.path.exists("child"):
        time.sleep(0.01)
    os._exit(7)
def fail(_): raise ValueError("not today")
def many(x): return {"y": np.concatenate([x, x])}
def few(x): return {"y": x[:, :1]}
def other(x): return {"z": x}
def text(x): return {"y": np.array(["a"] * len(x))}
def nothing(x): return None
def number(x): return {"y": 1.0}
def thing(x): return {"y": object()}
def double(x): return {"y": x.astype(np.float64) * 2}
def write(x):
    x += 1
    print("to standard output")
    return {"y": x}

class Model:
    def __init__(self):
        self.made = True

    def predict_batch(self, inputs):
        acts = [write, crash, leave, hang, fail, many, few, other, text, nothing, number, thing, double, shut, leave_a_child]
        x = inputs["x"]
        return acts[int(x[0, 0])](x)

class Fails:
    def __init__(self):
        raise RuntimeError("no weights")

class Crashes:
    def __init__(self):
        ctypes.string_at(0)

class Deaf:
    pass

class Pid:
    def predict_batch(self, inputs):
        return {"pid": np.array([os.getpid()])}

THERE = Model()

def scaled(factor):
    return lambda inputs: {"y": inputs["x"] * factor}

closure = scaled(3)
"""
WRITE, CRASH, LEAVE, HANG, FAIL, MANY, FEW, OTHER, TEXT, NOTHING, NUMBER, THING, DOUBLE, SHUT, CHILD = range(15)
SPEC = TensorSpec(name="x", datatype="FP32", shape=[2])
SIGNATURE = Signature(inputs=[SPEC], outputs=[TensorSpec(name="y", datatype="FP32", shape=[2])])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("classes")
    (made / "classes.py").write_text(CLASSES)
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[UserProcess]:
    process = UserProcess("classes:Model", directory)
    process.open()
    process.signature = SIGNATURE
    yield process
    process.close()


def asking(what: int, rows: int = 2) -> np.ndarray:
    return np.full((rows, 2), what, np.float32)


def answers(process: UserProcess) -> bool:
    (y,) = process.run_single(asking(WRITE))
    return bool((y == WRITE + 1).all())


def test_it_answers_in_the_datatypes_of_the_signature(model: UserProcess, capfd: pytest.CaptureFixture[str]) -> None:
    assert answers(model)
    assert capfd.readouterr().out == "", "what it prints is no result of ours"
    assert model.measure_memory() > 1.0
    y = model.run({"x": asking(DOUBLE)})["y"]
    assert y.dtype == np.float32
    assert (y == 2 * DOUBLE).all()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (FAIL, "predict_batch raised ValueError: not today"),
        (MANY, "returned 4 rows of output 'y' for 2 items"),
        (FEW, "returned output 'y' as FP32[2, 1], not as FP32[n, 2]"),
        (OTHER, "returned z; the outputs are y"),
        (TEXT, "as BYTES[2], not as FP32[n, 2]"),
        (NOTHING, "must return a dictionary of arrays by name, not NoneType"),
        (NUMBER, "axes"),
        (THING, "something that is no array"),
        (CRASH, "the process was ended by SIGSEGV in predict_batch"),
        (LEAVE, "the process ended with code 7 in predict_batch"),
        (SHUT, "the process closed its channel in predict_batch"),
    ],
)
def test_what_it_does_wrong_is_said_and_costs_one_batch(model: UserProcess, what: int, words: str) -> None:
    with pytest.raises(RunFailed) as error:
        model.run({"x": asking(what)})
    assert words in str(error.value)
    assert answers(model), "a process that ended has been started again"


@pytest.mark.parametrize("what", [HANG, CHILD])
def test_a_process_that_hangs_is_ended_and_so_is_one_whose_child_holds_its_channel(
    model: UserProcess, what: int
) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            model.run({"x": asking(what)})
        except Cancelled as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    child = model._directory / "child"
    assert what == HANG or eventually(lambda: child.exists() and child.read_text().endswith("\n"))
    model.cancel()  # whether the batch has begun or not: it ends
    thread.join(30.0)
    if what == CHILD:
        os.kill(int(child.read_text()), signal.SIGKILL)
    assert "took too long" in str(errors[0])
    assert answers(model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Fails", "RuntimeError: no weights"),
        ("Crashes", "was ended by SIGSEGV before classes:Crashes was made"),
        ("Missing", "classes has no Missing; it has "),
        ("Fals", "classes has no Fals; did you mean Fails?"),
        ("Deaf", "has no method predict_batch"),
        ("absent", "there is no module absent; put the folder of absent.py on PYTHONPATH"),
    ],
)
def test_a_class_that_cannot_be_made(directory: Path, name: str, words: str) -> None:
    process = UserProcess(f"{'classes' if name[0].isupper() else name}:{name}", directory)
    with pytest.raises(LoadFailed) as error:
        process.open()
    assert words in str(error.value)
    process.close()


@pytest.mark.parametrize(("name", "factor"), [("closure", 3), ("THERE", None)])
def test_a_function_and_an_object_will_do(directory: Path, name: str, factor: int | None) -> None:
    process = UserProcess(f"classes:{name}", directory)
    process.open()
    y = process.run({"x": asking(WRITE)})["y"]
    assert (y == (WRITE + 1 if factor is None else WRITE * factor)).all()
    process.close()


def test_nothing_is_left_of_one_that_was_being_started_again(directory: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    for _ in range(10):
        process = UserProcess("classes:Model", directory)
        process.open()
        with pytest.raises(RunFailed, match="ended with code 7"):
            process.run({"x": asking(LEAVE, 1)})
        process.close()
        assert {child.pid for child in psutil.Process().children()} == before, "dead ones that nobody reaps too"


def test_one_that_was_killed_is_started_again_and_nothing_is_left_of_one_that_was_closed(directory: Path) -> None:
    process = UserProcess("classes:Pid", directory)
    process.open()
    first = int(process.run({"x": asking(0, 1)})["pid"][0])
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    assert eventually(lambda: os.listdir(f"/proc/{first}/task") == [str(first)])  # its other threads end a little later
    second = int(process.run({"x": asking(0, 1)})["pid"][0])  # the next call does not pay for it
    assert second != first
    assert alive(second)
    process.close()
    assert eventually(lambda: not alive(second))
