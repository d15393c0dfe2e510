"""Tiny models made on the fly: honest ones and hostile ones."""

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

FEATURES, CLASSES = 16, 4
GEMM = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}  # as torch's exporter writes a layer


def npz(**arrays: Any) -> bytes:
    """A validation set as a file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def made(nodes, inputs, outputs, initializers=(), *, domains=(), functions=()) -> bytes:
    graph = h.make_graph(nodes, "tiny", inputs, outputs, list(initializers))
    opsets = [h.make_opsetid("", 17), *(h.make_opsetid(domain, 1) for domain in domains)]
    model = h.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))
    return model.SerializeToString()


def scoring(nodes, constants=(), width: int = CLASSES, batch: str | int = "n", **more: Any) -> bytes:
    """A model from x [n, 16] to scores [n, width]."""
    return made(nodes, [tensor("x", [batch, FEATURES])], [tensor("scores", [batch, width])], constants, **more)


def tensor(name, shape, kind=T.FLOAT):
    return h.make_tensor_value_info(name, kind, shape)


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(FEATURES, 32)).astype("f4"), rng.normal(size=(32, CLASSES)).astype("f4")


def mlp(batch: str | int = "n", seed: int = 0) -> bytes:
    """From x [n, 16] to scores [n, 4]: two matrix products."""
    return two_layers(*weights(seed), batch)


def two_layers(first: np.ndarray, second: np.ndarray, batch: str | int = "n") -> bytes:
    nodes = [
        h.make_node("MatMul", ["x", "w1"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "w2"], ["scores"]),
    ]
    return scoring(nodes, [nh.from_array(first, "w1"), nh.from_array(second, "w2")], batch=batch)


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
    nodes = [
        h.make_node("Conv", ["x", "k"], ["a"], kernel_shape=[3, 3]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("ReduceMean", ["b"], ["scores"], axes=[2, 3], keepdims=0),
    ]
    return made(
        nodes, [tensor("x", [batch, 1, 8, 8])], [tensor("scores", [batch, CLASSES])], [nh.from_array(kernel, "k")]
    )


def reshaping(batch: int, width: int = 4) -> bytes:
    """A fixed batch that sits in a Reshape too: x [batch, 16] to [batch, 4, 4], its mean [batch, 4]."""
    nodes = [
        h.make_node("Reshape", ["x", "to"], ["a"]),
        h.make_node("ReduceMean", ["a"], ["scores"], axes=[2], keepdims=0),
    ]
    shape = nh.from_array(np.array([batch, width, FEATURES // width], np.int64), "to")
    return made(nodes, [tensor("x", [batch, FEATURES])], [tensor("scores", [batch, width])], [shape])


def mixing(batch: str | int = "n") -> bytes:
    """A first axis that counts no items: every answer depends on all of them."""
    nodes = [h.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1), h.make_node("Sub", ["x", "m"], ["scores"])]
    return scoring(nodes, width=FEATURES, batch=batch)


def detecting() -> bytes:
    """From x [n, 16] to as many boxes [k, 2] as there are positive numbers, as operators for non-maximum suppression give them."""
    nodes = [
        h.make_node("Greater", ["x", "zero"], ["positive"]),
        h.make_node("NonZero", ["positive"], ["places"]),
        h.make_node("Transpose", ["places"], ["rows"]),
        h.make_node("Cast", ["rows"], ["boxes"], to=T.FLOAT),
    ]
    zero = nh.from_array(np.zeros(1, "f4"), "zero")
    return made(nodes, [tensor("x", ["n", FEATURES])], [tensor("boxes", ["k", 2])], [zero])


def limiting() -> bytes:
    """Scores of the items, scaled down where the largest number of the whole batch is above 100: only an extreme item changes others."""
    nodes = [
        h.make_node("Abs", ["x"], ["size"]),
        h.make_node("ReduceMax", ["size"], ["largest"], keepdims=0),
        h.make_node("Max", ["largest", "hundred"], ["limit"]),
        h.make_node("Div", ["x", "limit"], ["scores"]),
    ]
    return scoring(nodes, [nh.from_array(np.array(100, "f4"), "hundred")], FEATURES)


def along_the_batch(operator: str) -> bytes:
    """Softmax, or a running sum, along the axis of items."""
    inputs = ["x"] if operator == "Softmax" else ["x", "axis"]
    more = {"axis": 0} if operator == "Softmax" else {}
    constants = [] if operator == "Softmax" else [nh.from_array(np.array(0, np.int64), "axis")]
    node = h.make_node(operator, inputs, ["scores"], **more)
    return scoring([node], constants, FEATURES)


def spreading_nan() -> bytes:
    """An item's own numbers, plus nothing times the largest one of the batch: NaN, if an item holds it."""
    nodes = [
        h.make_node("ReduceMax", ["x"], ["largest"], axes=[0], keepdims=1),
        h.make_node("Mul", ["largest", "nothing"], ["zero"]),
        h.make_node("Add", ["x", "zero"], ["scores"]),
    ]
    return scoring(nodes, [nh.from_array(np.float32(0), "nothing")], FEATURES)


def two_mixed() -> bytes:
    """From a [n, 16] and b [n, 16] to scores [n, 16]: b, plus a's softmax along the axis of items."""
    nodes = [h.make_node("Softmax", ["a"], ["shares"], axis=0), h.make_node("Add", ["shares", "b"], ["scores"])]
    return made(
        nodes, [tensor("a", ["n", FEATURES]), tensor("b", ["n", FEATURES])], [tensor("scores", ["n", FEATURES])]
    )


def two_inputs() -> bytes:
    """From a [n, 16] and b [n, 16] to scores [n, 16]."""
    node = h.make_node("Add", ["a", "b"], ["scores"])
    return made(
        [node], [tensor("a", ["n", FEATURES]), tensor("b", ["n", FEATURES])], [tensor("scores", ["n", FEATURES])]
    )


def sequence() -> bytes:
    """From tokens [n, length] to scores [n, 4]: the length is open."""
    vectors = np.random.default_rng(3).normal(size=(50, CLASSES)).astype("f4")
    nodes = [
        h.make_node("Gather", ["table", "tokens"], ["a"]),
        h.make_node("ReduceMean", ["a"], ["scores"], axes=[1], keepdims=0),
    ]
    return made(
        nodes,
        [tensor("tokens", ["n", "length"], T.INT64)],
        [tensor("scores", ["n", CLASSES])],
        [nh.from_array(vectors, "table")],
    )


def not_a_number() -> bytes:
    """Square roots of negative numbers."""
    nodes = [h.make_node("Neg", ["x"], ["a"]), h.make_node("Exp", ["x"], ["e"]), h.make_node("Neg", ["e"], ["f"])]
    nodes.append(h.make_node("Sqrt", ["f"], ["scores"]))
    return scoring(nodes, width=FEATURES)


def endless() -> bytes:
    """A loop of 2**60 rounds."""
    body = h.make_graph(
        [h.make_node("Identity", ["go_on"], ["still"]), h.make_node("Add", ["held", "one"], ["next"])],
        "body",
        [tensor("round", [], T.INT64), tensor("go_on", [], T.BOOL), tensor("held", None)],
        [tensor("still", [], T.BOOL), tensor("next", None)],
        [nh.from_array(np.float32(1), "one")],
    )
    loop = h.make_node("Loop", ["rounds", "true", "x"], ["scores"], body=body)
    return scoring([loop], [nh.from_array(np.int64(2**60), "rounds"), nh.from_array(np.bool_(True), "true")], FEATURES)


def greedy(elements: int = 2**33) -> bytes:
    """Asks for 32 GB for one intermediate tensor."""
    nodes = [
        h.make_node("ConstantOfShape", ["huge"], ["a"], value=h.make_tensor("one", T.FLOAT, [1], [1.0])),
        h.make_node("ReduceSum", ["a"], ["b"], keepdims=0),
        h.make_node("Add", ["x", "b"], ["scores"]),
    ]
    shape = nh.from_array(np.array([elements], np.int64), "huge")
    return scoring(nodes, [shape], FEATURES)


def slow_to_load(products: int = 16, side: int = 2048, seed: int = 0) -> bytes:
    """`mlp`, with so many products of large constant matrices, which onnxruntime computes when it loads the model: a second for four or so."""
    first, second = weights(seed)
    shape = nh.from_array(np.array([side, side], np.int64), "shape")
    filled = h.make_tensor("value", T.FLOAT, [1], [1.0 / side])
    nodes = [h.make_node("ConstantOfShape", ["shape"], ["c0"], value=filled)]
    nodes += [h.make_node("MatMul", [f"c{n}", "c0"], [f"c{n + 1}"]) for n in range(products)]
    nodes += [
        h.make_node("ReduceSum", [f"c{products}"], ["sum"], keepdims=0),  # 1 a row
        h.make_node("Div", ["sum", "side"], ["one"]),
        h.make_node("Mul", ["x", "one"], ["x1"]),
        h.make_node("MatMul", ["x1", "w1"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "w2"], ["scores"]),
    ]
    constants = [
        shape,
        nh.from_array(np.float32(side), "side"),
        nh.from_array(first, "w1"),
        nh.from_array(second, "w2"),
    ]
    return scoring(nodes, constants)


def custom_operator() -> bytes:
    node = h.make_node("RunShell", ["x"], ["scores"], domain="evil.example")
    return scoring([node], width=FEATURES, domains=["evil.example"])


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


def convnet(layers: int = 5) -> bytes:
    """From x [n, 1, 28, 28] to scores [n, 4]: in 5 layers 116 million multiplications an item, some milliseconds on a CPU."""
    rng = np.random.default_rng(0)
    channels = (1, *[64] * (layers - 1))
    kernels = [rng.normal(size=(64, before, 3, 3)).astype("f4") / (3 * before**0.5) for before in channels]
    names = ["x", *(f"h{i}" for i in range(len(kernels)))]
    nodes = []
    for i, (before, after) in enumerate(itertools.pairwise(names)):
        nodes.append(h.make_node("Conv", [before, f"k{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(h.make_node("Relu", [f"c{i}"], [after]))
    nodes.append(h.make_node("GlobalAveragePool", [names[-1]], ["pooled"]))
    nodes.append(h.make_node("Flatten", ["pooled"], ["flat"]))
    nodes.append(h.make_node("MatMul", ["flat", "last"], ["scores"]))
    last = rng.normal(size=(64, CLASSES)).astype("f4")
    constants = [*(nh.from_array(k, f"k{i}") for i, k in enumerate(kernels)), nh.from_array(last, "last")]
    return made(nodes, [tensor("x", ["n", 1, 28, 28])], [tensor("scores", ["n", CLASSES])], constants)


def images(count: int, layers: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of `convnet`, FP32 [count, 1, 28, 28], and the classes that it says, int64 [count]."""
    import onnxruntime

    x = np.random.default_rng(0).normal(size=(count, 1, 28, 28)).astype("f4")
    session = onnxruntime.InferenceSession(convnet(layers), providers=["CPUExecutionProvider"])
    return x, session.run(None, {"x": x})[0].argmax(axis=1)
