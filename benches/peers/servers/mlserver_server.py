"""MLServer: the model in the server's own process."""

import asyncio
import os
from pathlib import Path

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from model import BATCH, HOST, PORT, WAIT_S, load


class Model(MLModel):
    """The Open Inference Protocol, JSON."""

    async def load(self):
        self.run = load()
        return True

    async def predict(self, payload):
        scores = self.run(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", scores)])


async def main() -> None:
    settings = Settings(
        debug=False,
        host=HOST,
        http_port=PORT,
        grpc_port=PORT + 1,
        metrics_endpoint=None,
        parallel_workers=0,
        metrics_dir=str(Path.cwd()),
    )
    served = ModelSettings(name="model", implementation=Model, max_batch_size=BATCH, max_batch_time=WAIT_S)
    await MLServer(settings).start([served])


if __name__ == "__main__":
    os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", str(Path.cwd()))
    asyncio.run(main())
