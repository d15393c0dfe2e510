"""BentoML: one worker, adaptive batches."""

import os
import sys
from pathlib import Path

import bentoml
import numpy as np
from model import BATCH, HOST, PORT, load


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 1024})
class Model:
    """JSON in and out."""

    def __init__(self) -> None:
        self.run = load()

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def infer(self, x: np.ndarray) -> np.ndarray:
        return self.run(x.astype(np.float32, copy=False))


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    words = ["serve", "bentoml_server:Model", "--host", HOST, "--port", str(PORT)]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *words])
