"""INFaaS: `infaas up` in the directory in which the models were registered, or `infaas.serve`."""

import os
import sys
import threading

if __name__ == "__main__":
    port = int(os.environ["PEER_PORT"])
    if os.environ["PEER_NAME"] == "infaas-serve":
        import numpy as np

        import infaas

        with np.load(os.environ["PEER_VALIDATION"]) as stored:
            infaas.serve(os.environ["PEER_MODEL"], stored["x"], stored["y"], app="model", port=port)
        threading.Event().wait()
    base, directory = str(port - 3), os.environ["PEER_DATA_DIR"]  # the gateway's port is the base's fourth
    words = ["up", "--data-dir", directory, "--port-base", base, "--config", f"{directory}/settings.toml"]
    fused = ["--fused"] * (os.environ["PEER_NAME"] == "infaas-fused")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infaas.cli", *words, *fused])
