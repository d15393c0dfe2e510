"""Models that serve well until one input comes: then they end the process, compute for ever, or give NaN.

All take x FP32 [n, 16] and give scores FP32 [n, 4], those of `tests.support.models.tiny_models.mlp(seed)`; an item whose first feature is POISON
spoils the run. Each has variants of its own precision only, whose answers are equal.
"""

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from tests.support.models.tiny_models import exact, scoring, tensor, weights

POISON = 77
LEAST = -(2**63)


def _layers(seed: int) -> tuple[list, list]:
    """Two matrix products from x to `honest`; the first feature of each item as a whole number, `first` [n, 1]."""
    one, two = weights(seed)
    nodes = [
        h.make_node("MatMul", ["x", "w1"], ["a"]),
        h.make_node("Relu", ["a"], ["b"]),
        h.make_node("MatMul", ["b", "w2"], ["honest"]),
        h.make_node("Slice", ["x", "begin", "end", "axis"], ["head"]),
        h.make_node("Cast", ["head"], ["first"], to=T.INT64),
    ]
    numbers = {"begin": [0], "end": [1], "axis": [1]}
    constants = [nh.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    return nodes, [nh.from_array(one, "w1"), nh.from_array(two, "w2"), *constants]


def _poison() -> onnx.TensorProto:
    return nh.from_array(np.array([POISON], np.int64), "poison")


def _model(nodes: list, constants: list) -> bytes:
    return exact(scoring(nodes, constants))


def crashing(seed: int = 0, poison: int = POISON) -> bytes:
    """The least number divided by -1: the processor's division traps, and SIGFPE ends the process."""
    nodes, constants = _layers(seed)
    nodes += [
        h.make_node("Sub", ["first", "above"], ["divisor"]),  # -1 for poison
        h.make_node("Div", ["least", "divisor"], ["quotient"]),
        h.make_node("Cast", ["quotient"], ["number"], to=T.FLOAT),
        h.make_node("Mul", ["number", "nothing"], ["zero"]),
        h.make_node("Add", ["honest", "zero"], ["scores"]),
    ]
    constants += [
        nh.from_array(np.array([poison + 1], np.int64), "above"),
        nh.from_array(np.array([LEAST], np.int64), "least"),
        nh.from_array(np.float32(0), "nothing"),
    ]
    return _model(nodes, constants)


def hanging(seed: int = 0, rounds: int = 2**60) -> bytes:
    """A loop of so many rounds for POISON, of one round otherwise."""
    body = h.make_graph(
        [h.make_node("Identity", ["go_on"], ["still"]), h.make_node("Add", ["held", "nothing"], ["next"])],
        "body",
        [tensor("round", [], T.INT64), tensor("go_on", [], T.BOOL), tensor("held", None)],
        [tensor("still", [], T.BOOL), tensor("next", None)],
        [nh.from_array(np.float32(0), "nothing")],
    )
    nodes, constants = _layers(seed)
    nodes += [
        h.make_node("Equal", ["first", "poison"], ["bad"]),
        h.make_node("Cast", ["bad"], ["counted"], to=T.INT64),
        h.make_node("ReduceMax", ["counted"], ["any"], keepdims=0),
        h.make_node("Mul", ["any", "many"], ["more"]),
        h.make_node("Add", ["more", "once"], ["rounds"]),
        h.make_node("Loop", ["rounds", "true", "honest"], ["scores"], body=body),
    ]
    constants += [
        _poison(),
        nh.from_array(np.int64(rounds), "many"),
        nh.from_array(np.int64(1), "once"),
        nh.from_array(np.bool_(True), "true"),
    ]
    return _model(nodes, constants)


def not_a_number(seed: int = 0) -> bytes:
    """The logarithm of a negative number for POISON, of one otherwise."""
    nodes, constants = _layers(seed)
    nodes += [
        h.make_node("Equal", ["first", "poison"], ["bad"]),
        h.make_node("Where", ["bad", "minus", "one"], ["argument"]),
        h.make_node("Log", ["argument"], ["zero"]),
        h.make_node("Add", ["honest", "zero"], ["scores"]),
    ]
    constants += [_poison(), nh.from_array(np.float32(-1), "minus"), nh.from_array(np.float32(1), "one")]
    return _model(nodes, constants)
