"""INFaaS: `infaas up` in the directory in which the models were registered."""

import os
import sys

if __name__ == "__main__":
    base = str(int(os.environ["PEER_PORT"]) - 3)  # the gateway's port is the base's fourth
    directory = os.environ["PEER_DATA_DIR"]
    words = ["up", "--data-dir", directory, "--port-base", base, "--config", f"{directory}/settings.toml"]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infaas.cli", *words])
