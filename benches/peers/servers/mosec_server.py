"""mosec: a front in Rust, one worker process."""

import sys

import numpy as np
from model import BATCH, HOST, PORT, WAIT_S, load
from mosec import Server, Worker


class Model(Worker):
    """Raw numbers in and out."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.run = load()

    def deserialize(self, data):
        return np.frombuffer(data, np.float32)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        return list(self.run(np.stack(data)))


if __name__ == "__main__":
    sys.argv[1:] = ["--address", HOST, "--port", str(PORT)]
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=BATCH, max_wait_time=max(1, round(1000 * WAIT_S)))
    server.run()
