"""Models that serve well until one input comes: then they end the process, compute for ever, or give NaN.

All take x FP32 [n, 16] and give scores FP32 [n, 4], those of `tests.support.models.tiny_models.mlp(seed)`; an item whose first feature is POISON
spoils the run. Each has variants of its own precision only, whose answers are equal.
"""

from typing import Any

import numpy as np

from tests.support.models.tiny_models import exact, scoring, weights

POISON = 77
LEAST = -(2**63)
_POISON = f", int64[1] poison = {{{POISON}}}"


def _model(nodes: str, seed: int, constants: str = "", **arrays: Any) -> bytes:
    """nodes: to scores, from `honest`, two matrix products of x, and the first feature of each item as a whole number, `first` [n, 1]."""
    honest = """
        a = MatMul(x, w1)  b = Relu(a)  honest = MatMul(b, w2)
        head = Slice(x, begin, end, axis)  first = Cast<to=7>(head)
    """
    one, two = weights(seed)
    numbers = "int64[1] begin = {0}, int64[1] end = {1}, int64[1] axis = {1}"
    return exact(scoring(honest + nodes, constants=numbers + constants, w1=one, w2=two, **arrays))


def crashing(seed: int = 0, poison: int = POISON) -> bytes:
    """The least number divided by -1: the processor's division traps, and SIGFPE ends the process."""
    nodes = """
        divisor = Sub(first, above)  quotient = Div(least, divisor)
        number = Cast<to=1>(quotient)  zero = Mul(number, nothing)  scores = Add(honest, zero)
    """  # divisor: -1 for poison
    above, least = np.array([poison + 1], np.int64), np.array([LEAST], np.int64)
    return _model(nodes, seed, ", float nothing = {0}", above=above, least=least)


def hanging(seed: int = 0, rounds: int = 2**60) -> bytes:
    """A loop of so many rounds for POISON, of one round otherwise."""
    body = "(int64 round, bool go_on, float[] held) => (bool still, float[] next) <float nothing = {0}> {still = Identity(go_on)  next = Add(held, nothing)}"
    nodes = f"""
        bad = Equal(first, poison)  counted = Cast<to=7>(bad)  any = ReduceMax<keepdims=0>(counted)
        more = Mul(any, many)  rounds = Add(more, once)  scores = Loop<body = body {body}>(rounds, true, honest)
    """
    return _model(nodes, seed, _POISON + ", int64 once = {1}", many=np.int64(rounds), true=np.bool_(True))


def not_a_number(seed: int = 0) -> bytes:
    """The logarithm of a negative number for POISON, of one otherwise."""
    nodes = """
        bad = Equal(first, poison)  argument = Where(bad, minus, one)  zero = Log(argument)  scores = Add(honest, zero)
    """
    return _model(nodes, seed, _POISON + ", float minus = {-1}, float one = {1}")
