"""What every server here gets: the model with one thread of onnxruntime, and its port, largest batch and wait from the environment."""

import os
from collections.abc import Callable
from typing import Any

import onnxruntime

PATH = os.environ["PEER_MODEL"]
PORT = int(os.environ["PEER_PORT"])
BATCH = int(os.environ["PEER_BATCH"])
WAIT_S = float(os.environ["PEER_WAIT_MS"]) / 1000
HOST = "127.0.0.1"


def load() -> Callable[[Any], Any]:
    """X FP32 [n, width] -> scores FP32 [n, 10]."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(PATH, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["scores"], {"x": x})[0]
