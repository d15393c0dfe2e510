"""Tiny models made on the fly: honest ones and hostile ones."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

FEATURES, CLASSES = 16, 4
TWO = f"(float[n, {FEATURES}] a, float[n, {FEATURES}] b) => (float[n, {FEATURES}] scores)"
GEMM = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}  # as torch's exporter writes a layer


def npz(**arrays: Any) -> bytes:
    """A validation set as a file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def made(text: str, domains: tuple[str, ...] = (), **arrays: Any) -> bytes:
    """A model of a graph in ONNX's own text: (inputs) => (outputs) <constants> {nodes}. arrays: further constants."""
    versions = ", ".join(['"": 17', *(f'"{domain}": 1' for domain in domains)])
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{versions}]> tiny {text}")
    model.graph.initializer.extend(nh.from_array(np.asarray(array), name) for name, array in arrays.items())
    return model.SerializeToString()


def scoring(nodes: str, width: int = CLASSES, batch: str | int = "n", constants: str = "", **arrays: Any) -> bytes:
    """A model from x [n, 16] to scores [n, width]."""
    signature = f"(float[{batch}, {FEATURES}] x) => (float[{batch}, {width}] scores)"
    return made(f"{signature} <{constants}> {{{nodes}}}", **arrays)


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(FEATURES, 32)).astype("f4"), rng.normal(size=(32, CLASSES)).astype("f4")


def mlp(batch: str | int = "n", seed: int = 0) -> bytes:
    """From x [n, 16] to scores [n, 4]: two matrix products."""
    return two_layers(*weights(seed), batch)


def two_layers(first: np.ndarray, second: np.ndarray, batch: str | int = "n") -> bytes:
    return scoring("a = MatMul(x, w1)  b = Relu(a)  scores = MatMul(b, w2)", batch=batch, w1=first, w2=second)


def pair(seed: int = 0) -> tuple[bytes, bytes]:
    """A small model that is wrong where it is unsure, and one a thousand times as large that gives the classes of `digits`, which nothing quantises."""
    first, second = weights(seed)
    blurred = second + 0.03 * np.random.default_rng(seed + 5).normal(size=second.shape).astype("f4")
    many = 1024
    large = two_layers(np.tile(first, (1, many)), np.tile(second / many, (many, 1)))
    return exact(two_layers(first, blurred)), exact(large)


def exact(model: bytes) -> bytes:
    """The same function of operators that nothing quantises, so that every variant gives the model's own answers: products as Einsum."""
    found = onnx.load_model_from_string(model)
    nodes = []
    for node in found.graph.node:
        equation = "ni,ij->nj"
        if node.op_type == "Gemm":
            assert {one.name: h.get_attribute_value(one) for one in node.attribute} == GEMM
            equation = "ni,ji->nj"
            nodes.append(h.make_node("Einsum", node.input[:2], [f"{node.output[0]}.product"], equation=equation))
            nodes.append(h.make_node("Add", [f"{node.output[0]}.product", node.input[2]], node.output))
        elif node.op_type == "MatMul":
            nodes.append(h.make_node("Einsum", node.input, node.output, equation=equation))
        else:
            nodes.append(node)
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found.SerializeToString()


def digits(n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and the classes that `mlp(seed)` gives them."""
    first, second = weights(seed)
    x = np.random.default_rng(seed + 1).normal(size=(n, FEATURES)).astype("f4")
    return x, (np.maximum(x @ first, 0) @ second).argmax(axis=1)


def conv(batch: str | int = "n") -> bytes:
    """From x [n, 1, 8, 8] to scores [n, 4]: a convolution and a mean."""
    kernel = np.random.default_rng(2).normal(size=(CLASSES, 1, 3, 3)).astype("f4")
    nodes = "a = Conv<kernel_shape=[3, 3]>(x, k)  b = Relu(a)  scores = ReduceMean<axes=[2, 3], keepdims=0>(b)"
    return made(f"(float[{batch}, 1, 8, 8] x) => (float[{batch}, {CLASSES}] scores) {{{nodes}}}", k=kernel)


def reshaping(batch: int, width: int = 4) -> bytes:
    """A fixed batch that sits in a Reshape too: x [batch, 16] to [batch, 4, 4], its mean [batch, 4]."""
    nodes = "a = Reshape(x, to)  scores = ReduceMean<axes=[2], keepdims=0>(a)"
    return scoring(nodes, width, batch, to=np.array([batch, width, FEATURES // width], np.int64))


def mixing(batch: str | int = "n") -> bytes:
    """A first axis that counts no items: every answer depends on all of them."""
    return scoring("m = ReduceMean<axes=[0], keepdims=1>(x)  scores = Sub(x, m)", FEATURES, batch)


def detecting() -> bytes:
    """From x [n, 16] to as many boxes [k, 2] as there are positive numbers, as operators for non-maximum suppression give them."""
    nodes = (
        "positive = Greater(x, zero)  places = NonZero(positive)  rows = Transpose(places)  boxes = Cast<to=1>(rows)"
    )
    return made(f"(float[n, {FEATURES}] x) => (float[k, 2] boxes) <float[1] zero = {{0}}> {{{nodes}}}")


def limiting() -> bytes:
    """Scores of the items, scaled down where the largest number of the whole batch is above 100: only an extreme item changes others."""
    nodes = (
        "size = Abs(x)  largest = ReduceMax<keepdims=0>(size)  limit = Max(largest, hundred)  scores = Div(x, limit)"
    )
    return scoring(nodes, FEATURES, constants="float hundred = {100}")


def along_the_batch(operator: str) -> bytes:
    """Softmax, or a running sum, along the axis of items."""
    if operator == "Softmax":
        return scoring("scores = Softmax<axis=0>(x)", FEATURES)
    return scoring(f"scores = {operator}(x, axis)", FEATURES, constants="int64 axis = {0}")


def spreading_nan() -> bytes:
    """An item's own numbers, plus nothing times the largest one of the batch: NaN, if an item holds it."""
    nodes = "largest = ReduceMax<axes=[0], keepdims=1>(x)  zero = Mul(largest, nothing)  scores = Add(x, zero)"
    return scoring(nodes, FEATURES, constants="float nothing = {0}")


def two_mixed() -> bytes:
    """From a [n, 16] and b [n, 16] to scores [n, 16]: b, plus a's softmax along the axis of items."""
    return made(f"{TWO} {{shares = Softmax<axis=0>(a)  scores = Add(shares, b)}}")


def two_inputs() -> bytes:
    """From a [n, 16] and b [n, 16] to scores [n, 16]."""
    return made(f"{TWO} {{scores = Add(a, b)}}")


def sequence() -> bytes:
    """From tokens [n, length] to scores [n, 4]: the length is open."""
    vectors = np.random.default_rng(3).normal(size=(50, CLASSES)).astype("f4")
    nodes = "a = Gather(table, tokens)  scores = ReduceMean<axes=[1], keepdims=0>(a)"
    return made(f"(int64[n, length] tokens) => (float[n, {CLASSES}] scores) {{{nodes}}}", table=vectors)


def not_a_number() -> bytes:
    """Square roots of negative numbers."""
    return scoring("e = Exp(x)  f = Neg(e)  scores = Sqrt(f)", FEATURES)


def endless() -> bytes:
    """A loop of 2**60 rounds."""
    body = "(int64 round, bool go_on, float[] held) => (bool still, float[] next) <float one = {1}> {still = Identity(go_on)  next = Add(held, one)}"
    nodes = f"scores = Loop<body = body {body}>(rounds, true, x)"
    return scoring(nodes, FEATURES, rounds=np.int64(2**60), true=np.bool_(True))


def greedy(elements: int = 2**33) -> bytes:
    """Asks for 32 GB for one intermediate tensor."""
    nodes = "a = ConstantOfShape<value = float[1] {1}>(huge)  b = ReduceSum<keepdims=0>(a)  scores = Add(x, b)"
    return scoring(nodes, FEATURES, huge=np.array([elements], np.int64))


def slow_to_load(products: int = 16, side: int = 2048, seed: int = 0) -> bytes:
    """`mlp`, with so many products of large constant matrices, which onnxruntime computes when it loads the model: a second for four or so."""
    first, second = weights(seed)
    nodes = f"c0 = ConstantOfShape<value = float[1] {{{1.0 / side}}}>(shape)"
    nodes += "".join(f"  c{n + 1} = MatMul(c{n}, c0)" for n in range(products))
    nodes += f"  sum = ReduceSum<keepdims=0>(c{products})  one = Div(sum, side)  x1 = Mul(x, one)"  # one: 1 a row
    nodes += "  a = MatMul(x1, w1)  b = Relu(a)  scores = MatMul(b, w2)"
    return scoring(nodes, shape=np.array([side, side], np.int64), side=np.float32(side), w1=first, w2=second)


def custom_operator() -> bytes:
    return scoring("scores = evil.example.RunShell(x)", FEATURES, domains=("evil.example",))


def external_data(location: str) -> bytes:
    """A weight that is to be read from another file."""
    model = onnx.load_model_from_string(mlp())
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = T.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", location
    return model.SerializeToString()


def external_data_in_a_subgraph(location: str) -> bytes:
    """The same, hidden in the body of a loop."""
    model = onnx.load_model_from_string(endless())
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    body.initializer[0].data_location = T.EXTERNAL
    entry = body.initializer[0].external_data.add()
    entry.key, entry.value = "location", location
    return model.SerializeToString()


def exported(path: Path, torch: Any, *, batch: int | None = None) -> bytes:
    """The same two layers as a torch.export archive."""
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES, bias=False)
    )
    first, second = weights()
    with torch.no_grad():
        net[0].weight.copy_(torch.from_numpy(first.T.copy()))
        net[2].weight.copy_(torch.from_numpy(second.T.copy()))
    shapes = None if batch else ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(net.eval(), (torch.zeros(batch or 2, FEATURES),), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path.read_bytes()


def convnet(layers: int = 5, width: int = 64) -> bytes:
    """From x [n, 1, 28, 28] to scores [n, 4]: in 5 layers of 64 channels 116 million multiplications an item, some milliseconds on a CPU."""
    rng = np.random.default_rng(0)
    channels = (1, *[width] * (layers - 1))
    kernels = [rng.normal(size=(width, before, 3, 3)).astype("f4") / (3 * before**0.5) for before in channels]
    nodes = "".join(f"c{n} = Conv<pads=[1, 1, 1, 1]>(h{n}, k{n})  h{n + 1} = Relu(c{n})  " for n in range(layers))
    nodes += f"pooled = GlobalAveragePool(h{layers})  flat = Flatten(pooled)  scores = MatMul(flat, last)"
    last = rng.normal(size=(width, CLASSES)).astype("f4")
    text = f"(float[n, 1, 28, 28] x) => (float[n, {CLASSES}] scores) {{{nodes.replace('(h0,', '(x,')}}}"
    return made(text, **{f"k{n}": kernel for n, kernel in enumerate(kernels)}, last=last)


def images(count: int, layers: int = 5, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of `convnet`, FP32 [count, 1, 28, 28], and the classes that it says, int64 [count]."""
    import onnxruntime

    x = np.random.default_rng(0).normal(size=(count, 1, 28, 28)).astype("f4")
    session = onnxruntime.InferenceSession(convnet(layers, width), providers=["CPUExecutionProvider"])
    return x, session.run(None, {"x": x})[0].argmax(axis=1)
