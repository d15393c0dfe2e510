"""Ray Serve: its HTTP proxy, one replica."""

from pathlib import Path

import numpy as np
import ray
from model import BATCH, HOST, PORT, WAIT_S, load
from ray import serve
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 1})
class Model:
    """Raw numbers in and out."""

    def __init__(self) -> None:
        self.run = load()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def infer(self, bodies):
        scores = self.run(np.stack([np.frombuffer(body, np.float32) for body in bodies]))
        return [row.tobytes() for row in scores]

    async def __call__(self, request):
        return Response(await self.infer(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(
        include_dashboard=False,
        num_cpus=2,
        _node_ip_address=HOST,
        _temp_dir=str(Path.cwd() / "r"),  # a short name: sockets lie below it
        object_store_memory=100 * 2**20,
    )
    serve.start(http_options={"host": HOST, "port": PORT})
    serve.run(Model.bind(), blocking=True)
