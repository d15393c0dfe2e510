"""Functions of a model's owner around the model: each item goes through them alone, and what they do wrong costs its own query."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from bus.functions import FunctionFailed, applied, made
from bus.messages.catalog import Functions, Signature, TensorSpec
from services.executor.backends.base import BackendError, Cancelled, ItemRefused, RunFailed
from services.executor.backends.functions import WithFunctions, with_functions
from tests.support.servers.processes import eventually

SOURCE = """
import os, socket, time
def numbers(text):
    if text == "wrong":
        raise ValueError("not this one")
    if text == "break":
        raise KeyError("broken")
    if text == "die":
        os._exit(9)
    if text == "hang":
        time.sleep(1000)
    if text == "call":
        socket.create_connection(("127.0.0.1", 1), 1)
    return [float(len(word)) for word in text.split()]
def words(total):
    return {"total": f"{total:g} letters", "twice": 2 * total}
"""
TEXTS = TensorSpec(name="x", datatype="BYTES", shape=[])
INSIDE = Signature(
    inputs=[TensorSpec(name="lengths", datatype="FP32", shape=[-1])],
    outputs=[TensorSpec(name="sum", datatype="FP32", shape=[])],
)
WHOLE = Signature(
    inputs=[TEXTS],
    outputs=[
        TensorSpec(name="total", datatype="BYTES", shape=[]),
        TensorSpec(name="twice", datatype="FP32", shape=[]),
    ],
)
FUNCTIONS = Functions(before="own.py:numbers", after="own.py:words", sources={"own.py": SOURCE}, model=INSIDE)


class Sums:
    """A model of one input of any length."""

    one_at_a_time, proof, memory_mb, inputs, outputs = "", "here", 0.0, ("lengths",), ("sum",)

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []

    def run(self, inputs: dict) -> dict:
        self.batches.append(inputs["lengths"].shape)
        return {"sum": inputs["lengths"].sum(axis=1)}

    def cancel(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def handle() -> Iterator[WithFunctions]:
    made = with_functions(Sums(), FUNCTIONS, WHOLE)
    yield made
    made.close()


def ask(handle: WithFunctions, *texts: str) -> dict:
    return handle.run({"x": np.array(texts, object)})


def test_items_of_different_lengths_are_computed_by_their_shapes_and_come_back_in_order(handle) -> None:
    found = ask(handle, "a bb", "ccc", "dd e", "f")
    assert found["total"].tolist() == ["3 letters", "3 letters", "3 letters", "1 letters"]
    assert (found["twice"].dtype, found["twice"].tolist()) == (np.float32, [6.0, 6.0, 6.0, 2.0])
    assert sorted(handle._model.batches[-2:]) == [(2, 1), (2, 2)]
    before_s, after_s = handle.took()
    assert before_s > 0.0
    assert after_s > 0.0
    assert handle.took() == (0.0, 0.0)
    assert handle.beside_mb > 5.0


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("wrong", ItemRefused, "own.py:numbers: ValueError: not this one"),
        ("break", RunFailed, "own.py:numbers: KeyError: 'broken'"),
        ("die", RunFailed, "the process ended with code 9 in own.py:numbers and own.py:words"),
        ("call", RunFailed, "own.py:numbers: "),  # there is no network
    ],
)
def test_what_a_function_does_wrong_ends_the_call_and_the_next_one_is_right(handle, text, kind, why) -> None:
    with pytest.raises(kind, match=why.split(": ")[0]) as refused:
        ask(handle, "a", text)
    assert str(refused.value).startswith(why)
    assert ask(handle, "a")["total"].tolist() == ["1 letters"]


def test_a_function_that_hangs_is_ended_with_its_process(handle) -> None:
    found: list[BackendError] = []

    def hang() -> None:
        try:
            ask(handle, "hang")
        except BackendError as error:
            found.append(error)

    asking = threading.Thread(target=hang)
    asking.start()
    assert eventually(lambda: handle._process.busy)
    handle.cancel()
    asking.join()
    assert [type(one) for one in found] == [Cancelled]
    assert ask(handle, "a")["total"].tolist() == ["1 letters"]


def test_what_a_function_gives_is_named_and_must_be_numbers_or_texts() -> None:
    (part,) = applied(made("name", "def name(x): return 'it'", "o.py:name"), "o.py:name", {"x": [1, 2]})
    assert part.arrays["name"].tolist() == ["it", "it"]
    for source, why in (
        ("None", "gives NoneType"),
        ("b'x'", "gives bytes"),
        ("{}", "gives nothing"),
        ("[[1], 2]", "gives what is no array"),
    ):
        with pytest.raises(FunctionFailed, match=why):
            applied(made("f", f"def f(x): return {source}", "o.py:f"), "o.py:f", {"x": [1]})
