"""PyTriton: Triton's server, whose model is a Python function."""

import numpy as np
from model import BATCH, HOST, PORT, load
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

if __name__ == "__main__":
    run = load()

    @batch
    def infer(x):
        return [run(x)]

    config = TritonConfig(
        http_address=HOST,
        http_port=PORT,
        grpc_address=HOST,
        grpc_port=PORT + 1,
        metrics_port=PORT + 2,
        allow_metrics=False,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="scores", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=BATCH, batcher=DynamicBatcher()),
        )
        triton.serve()
