"""A system whose apps are stages of pipelines: tiny models that say something else than the others, and pipelines of them."""

import asyncio
from collections import deque
from typing import Any, NamedTuple

import msgpack
import nats
import numpy as np
import pytest

import infaas
from tests.support.clients.responders import until
from tests.support.clients.stock import tensor
from tests.support.models import poison_models, tiny_models
from tests.support.models.tiny_models import FEATURES, made, scoring, two_layers, weights
from tests.support.servers.nats import run
from tests.support.servers.system import Whole

WIDE = 400_000  # numbers an item: 1.6 MB, more than a message holds
Y = f"float[n, {FEATURES}] y"
HEAVY = 600  # rows and columns of the products that make `dear` slow


FIRST = "int64[1] begin = {0}, int64[1] end = {1}, int64[1] axis = {1}"


def staged(outputs: str, nodes: str, constants: str = "", **arrays: Any) -> bytes:
    """A model of x [n, FEATURES]."""
    return made(f"(float[n, {FEATURES}] x) => ({outputs}) <{constants}> {{{nodes}}}", **arrays)


def gate() -> bytes:
    """Sure [n, 1] and label [n, 1]: the first feature, as it is and as a whole number."""
    nodes = "sure = Slice(x, begin, end, axis)  label = Cast<to=7>(sure)"
    return staged("float[n, 1] sure, int64[n, 1] label", nodes, FIRST)


def twice() -> bytes:
    return staged(Y, "y = Mul(x, two)", "float two = {2}")


def more() -> bytes:
    return staged(Y, "y = Add(x, three)", "float three = {3}")


def both() -> bytes:
    """A + b"""
    return made(f"(float[n, {FEATURES}] a, float[n, {FEATURES}] b) => ({Y}) {{y = Add(a, b)}}")


def boxes(width: int = FEATURES) -> bytes:
    """Boxes [k, width], which count no items: as many as the first feature says, the i-th has the features and i added."""
    nodes = """
        first = Slice(x, begin, end, axis)  count = Squeeze(first, both)  numbers = Range(zero, count, one)
        column = Unsqueeze(numbers, axis)  box = Add(column, x)  boxes = Tile(box, often)
    """
    constants = f"{FIRST}, int64[2] both = {{0, 1}}, int64[2] often = {{1, {width // FEATURES}}}"
    return staged(f"float[k, {width}] boxes", nodes, f"{constants}, float zero = {{0}}, float one = {{1}}")


def wide() -> bytes:
    """Y [n, WIDE]: the features again and again; label [n, 1]: the first one."""
    nodes = "y = Tile(x, often)  label = Slice(x, begin, end, axis)"
    constants = f"{FIRST}, int64[2] often = {{1, {WIDE // FEATURES}}}"
    return staged(f"float[n, 1] label, float[n, {WIDE}] y", nodes, constants)


def last() -> bytes:
    """From x [n, WIDE] its last FEATURES numbers."""
    ends = f"int64[1] begin = {{{WIDE - FEATURES}}}, int64[1] end = {{{WIDE}}}, int64[1] axis = {{1}}"
    return made(f"(float[n, {WIDE}] x) => ({Y}) <{ends}> {{y = Slice(x, begin, end, axis)}}")


def right(*, noise: float = 0.0, slow: bool = False) -> bytes:
    """As `tiny_models.mlp`, but with wrong weights, or slowly."""
    first, second = weights()
    rng = np.random.default_rng(5)
    second = second + noise * rng.normal(size=second.shape).astype("f4")
    if not slow:
        return two_layers(first, second)
    square = rng.normal(size=(HEAVY, HEAVY)).astype("f4") / HEAVY**0.5
    nodes = "a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  h0 = MatMul(x, up)"
    nodes += "".join(f"  h{i + 1} = MatMul(h{i}, square)" for i in range(24))
    nodes += "  mean = ReduceMean<axes=[1], keepdims=1>(h24)  small = Tanh(mean)  zero = Mul(small, nothing)"
    up, nothing = rng.normal(size=(FEATURES, HEAVY)).astype("f4"), np.float32(1e-6)
    arrays = {"w1": first, "w2": second, "up": up, "square": square, "nothing": nothing}
    return scoring(f"{nodes}  scores = Add(c, zero)", **arrays)


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
    return {"name": name, "app": app, "inputs": inputs or {"x": "$.x"}, **more}


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
                key = "a" if one.model == "both" else "x"
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
