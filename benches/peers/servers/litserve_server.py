"""LitServe: one API process, one model worker."""

import litserve
import numpy as np
from model import BATCH, HOST, PORT, WAIT_S, load


class Model(litserve.LitAPI):
    """JSON in and out."""

    def setup(self, device):
        del device
        self.run = load()

    def decode_request(self, request):
        return np.array(request["x"], np.float32)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.run(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"scores": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Model(max_batch_size=BATCH, batch_timeout=WAIT_S), accelerator="cpu", workers_per_device=1
    )
    server.run(host=HOST, port=PORT, generate_client_file=False, log_level="warning")
