"""A system whose apps are stages of pipelines: tiny models that say something else than the others, and pipelines of them."""

import asyncio
from collections import deque
from typing import Any, NamedTuple

import msgpack
import nats
import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import infaas
from tests.support.clients.responders import until
from tests.support.clients.stock import tensor
from tests.support.models import poison_models, tiny_models
from tests.support.models.tiny_models import CLASSES, FEATURES, made, weights
from tests.support.models.tiny_models import tensor as spec
from tests.support.servers.nats import run
from tests.support.servers.system import Whole

WIDE = 400_000  # numbers an item: 1.6 MB, more than a message holds
HEAVY = 600  # rows and columns of the products that make `dear` slow
X, Y = "x", "y"


def _x(batch: str = "n") -> list[Any]:
    return [spec(X, [batch, FEATURES])]


def _y(width: int = FEATURES) -> Any:
    return spec(Y, ["n", width])


def _number(name: str, value: Any, dtype: Any = np.float32) -> Any:
    return nh.from_array(np.array(value, dtype), name)


def gate() -> bytes:
    """Sure [n, 1] and label [n, 1]: the first feature, as it is and as a whole number."""
    nodes = [
        h.make_node("Slice", [X, "begin", "end", "axis"], ["sure"]),
        h.make_node("Cast", ["sure"], ["label"], to=T.INT64),
    ]
    constants = [_number(name, [value], np.int64) for name, value in (("begin", 0), ("end", 1), ("axis", 1))]
    return made(nodes, _x(), [spec("sure", ["n", 1]), spec("label", ["n", 1], T.INT64)], constants)


def twice() -> bytes:
    return made([h.make_node("Mul", [X, "two"], [Y])], _x(), [_y()], [_number("two", 2.0)])


def more() -> bytes:
    return made([h.make_node("Add", [X, "three"], [Y])], _x(), [_y()], [_number("three", 3.0)])


def both() -> bytes:
    """A + b"""
    inputs = [spec("a", ["n", FEATURES]), spec("b", ["n", FEATURES])]
    return made([h.make_node("Add", ["a", "b"], [Y])], inputs, [_y()])


def boxes(width: int = FEATURES) -> bytes:
    """Boxes [k, width], which count no items: as many as the first feature says, the i-th has the features and i added."""
    repeat = width // FEATURES
    nodes = [
        h.make_node("Slice", [X, "begin", "end", "axis"], ["first"]),
        h.make_node("Squeeze", ["first", "both"], ["count"]),
        h.make_node("Range", ["zero", "count", "one"], ["numbers"]),
        h.make_node("Unsqueeze", ["numbers", "axis"], ["column"]),
        h.make_node("Add", ["column", X], ["box"]),
        h.make_node("Tile", ["box", "often"], ["boxes"]),
    ]
    constants = [_number(name, [value], np.int64) for name, value in (("begin", 0), ("end", 1), ("axis", 1))]
    constants += [_number("both", [0, 1], np.int64), _number("often", [1, repeat], np.int64)]
    constants += [_number("zero", 0.0), _number("one", 1.0)]
    return made(nodes, _x(), [spec("boxes", ["k", width])], constants)


def wide() -> bytes:
    """Y [n, WIDE]: the features again and again; label [n, 1]: the first one."""
    repeat = WIDE // FEATURES
    nodes = [
        h.make_node("Tile", [X, "often"], [Y]),
        h.make_node("Slice", [X, "begin", "end", "axis"], ["label"]),
    ]
    constants = [_number("often", [1, repeat], np.int64)]
    constants += [_number(name, [value], np.int64) for name, value in (("begin", 0), ("end", 1), ("axis", 1))]
    return made(nodes, _x(), [spec("label", ["n", 1]), _y(WIDE)], constants)


def last() -> bytes:
    """From x [n, WIDE] its last FEATURES numbers."""
    nodes = [h.make_node("Slice", [X, "begin", "end", "axis"], [Y])]
    ends = (("begin", WIDE - FEATURES), ("end", WIDE), ("axis", 1))
    constants = [_number(name, [value], np.int64) for name, value in ends]
    return made(nodes, [spec(X, ["n", WIDE])], [_y()], constants)


def right(*, noise: float = 0.0, slow: bool = False) -> bytes:
    """As `tiny_models.mlp`, but with wrong weights, or slowly."""
    first, second = weights()
    rng = np.random.default_rng(5)
    second = second + noise * rng.normal(size=second.shape).astype("f4")
    nodes = [
        h.make_node("MatMul", [X, "w1"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "w2"], ["c"]),
    ]
    constants = [nh.from_array(first, "w1"), nh.from_array(second, "w2")]
    if not slow:
        nodes[-1].output[0] = "scores"
        return made(nodes, _x(), [spec("scores", ["n", CLASSES])], constants)
    square = rng.normal(size=(HEAVY, HEAVY)).astype("f4") / HEAVY**0.5
    constants += [nh.from_array(rng.normal(size=(FEATURES, HEAVY)).astype("f4"), "up"), nh.from_array(square, "square")]
    nodes.append(h.make_node("MatMul", [X, "up"], ["h0"]))
    nodes += [h.make_node("MatMul", [f"h{i}", "square"], [f"h{i + 1}"]) for i in range(24)]
    nodes += [
        h.make_node("ReduceMean", ["h24"], ["mean"], axes=[1], keepdims=1),
        h.make_node("Tanh", ["mean"], ["small"]),
        h.make_node("Mul", ["small", "nothing"], ["zero"]),
        h.make_node("Add", ["c", "zero"], ["scores"]),
    ]
    constants.append(_number("nothing", 1e-6))
    return made(nodes, _x(), [spec("scores", ["n", CLASSES])], constants)


class StageModel(NamedTuple):
    app: str
    model: str
    file: bytes


MODELS = (
    StageModel("gate", "gate", gate()),
    StageModel("twice", "twice", twice()),
    StageModel("more", "more", more()),
    StageModel("both", "both", both()),
    StageModel("wide", "wide", wide()),
    StageModel("last", "last", last()),
    StageModel("boxes", "boxes", boxes()),
    StageModel("crops", "crops", boxes(WIDE)),
    StageModel("classes", "good", right(slow=True)),
    StageModel("classes", "poor", right(noise=1.5)),
    StageModel("crash", "crash", poison_models.crashing()),
    StageModel("hang", "hang", poison_models.hanging()),
)


def validation(model: str) -> dict[str, np.ndarray]:
    x, y = tiny_models.digits(64)
    if model == "both":
        return {"a": x, "b": x, "y": (2 * x).argmax(axis=1)}
    if model == "last":
        return {"x": np.tile(x[:20], (1, WIDE // FEATURES)), "y": x[:20].argmax(axis=1)}
    if model in ("boxes", "crops"):
        x = np.ones((24, FEATURES), np.float32)
        x[:, 0] = np.arange(24) % 4
        return {"x": x}
    if model in ("gate", "wide"):
        return {"x": x, "y": np.zeros(len(x), np.int64)}
    return {"x": x, "y": x.argmax(axis=1) if model in ("twice", "more") else y}


# -- pipelines of them


def vertex(name: str, app: str, inputs: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "app": app, "inputs": inputs or {X: "$.x"}, **more}


def edge(source: str, target: str, **more: Any) -> dict[str, Any]:
    return {"from": source, "to": target, **more}


def when(output: str, op: str, value: Any, reduce: str = "first") -> dict[str, Any]:
    return {"when": {"output": output, "op": op, "value": value, "reduce": reduce}}


class StagedSystem(Whole):
    """A system with two dispatchers and two workers, and the models of MODELS."""

    async def prepare(self) -> None:
        async with infaas.connect(self.nats) as client:
            for one in MODELS:
                path = self.directory.parent / f"{one.model}.onnx"
                path.write_bytes(one.file)
                data = self.directory.parent / f"{one.model}.npz"
                data.write_bytes(tiny_models.npz(**validation(one.model)))
                key = "a" if one.model == "both" else X
                metric = "agreement" if one.model in ("boxes", "crops") else None
                await client.register(
                    path, app=one.app, model=one.model, validation=data, inputs_key=key, metric=metric
                )

    async def add(
        self,
        client: Any,
        name: str,
        vertices: list[dict[str, Any]],
        edges: list[dict[str, Any]],
        output: dict[str, str],
        *,
        latency_ms: float = 100_000.0,
        sample: np.ndarray | None = None,
    ) -> int:
        """A pipeline; returns once both dispatchers answer this sample, of which 20 answers in a row say so. The number of all answers."""
        head = {"name": name, "latency_ms": latency_ms}
        await client.admin("set-pipeline", pipeline=head, vertex=vertices, edge=edges, output=output)
        row: deque[bool] = deque(maxlen=20)
        x = ones(0.0) if sample is None else sample
        answers = 0

        async def settled() -> bool:
            nonlocal answers
            answer = await client.query(name, x, timeout=60.0, raise_refused=False)
            row.append(isinstance(answer, infaas.Answer))
            answers += row[-1]
            return len(row) == 20 and all(row)

        await until(settled)
        return answers


def ones(first: float) -> np.ndarray:
    """FP32 [1, 16]: ones after the first feature."""
    x = np.ones((1, FEATURES), np.float32)
    x[0, 0] = first
    return x


@pytest.fixture(scope="session")
def pipelines(doubled: Whole) -> StagedSystem:
    found = StagedSystem(*doubled)
    run(found.prepare())
    return found


async def one_message_each(url: str, app: str, x: np.ndarray, **needs: Any) -> dict[str, Any]:
    """The answer to one query of a stock client, which sees that one message goes and one comes on its connection."""
    nc = await nats.connect(url)
    try:
        inbox = nc.new_inbox()
        heard = await nc.subscribe(f"{inbox}.>")
        await nc.flush()
        before = dict(nc.stats)
        await nc.publish(f"infaas.query.{app}", msgpack.packb({"inputs": tensor(x), **needs}), reply=f"{inbox}.one")
        message = await heard.next_msg(timeout=60.0)
        await asyncio.sleep(0.5)
        counts = {name: nc.stats[name] - before[name] for name in ("in_msgs", "out_msgs")}
        assert counts == {"in_msgs": 1, "out_msgs": 1}, counts
        reply: dict[str, Any] = msgpack.unpackb(message.data)
        return reply
    finally:
        await nc.close()
