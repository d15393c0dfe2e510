"""The whole stack on a single machine, as docs/swarm.md has it: one NATS server, one worker, a question through each door."""

import json
import sys
import time
from pathlib import Path

import pytest

from infaas.demo import digits
from tests.swarm import image
from tests.swarm.deployed import Deployed
from tests.swarm.nodes import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
LABELS = {"infaas.nats": "true", "infaas.db": "true", "infaas.gateway": "true", "infaas.pool": "cpu"}
ASK = """
import sys, urllib.request as r
asked = r.Request(sys.argv[1], sys.stdin.buffer.read(), {'Authorization': 'Bearer ' + sys.argv[2]})
print(r.urlopen(asked, timeout=30).read().decode())
"""


def test_one_machine_serves(images: Path, tmp_path: Path, timings: list[tuple[str, float]]) -> None:
    with Swarm(1, 0, images=images) as swarm:
        (node,) = swarm.nodes.values()
        swarm.label(node, LABELS)
        system = Deployed(swarm, tmp_path, timings)
        system.settings.write_text(
            system.settings.read_text().replace("minimum = 2\nmaximum = 3", "minimum = 1\nmaximum = 1")
        )
        begun = time.time()
        try:
            system.deploy(image.IMAGE)
            system.since(begun, "one machine: deployed from nothing")
            (tmp_path / "logreg.onnx").write_bytes(digits.models()["logreg"].read_bytes())
            digits.save_validation(tmp_path / "digits.npz")
            where = ("--app", "digits", "--model", "logreg", "--validation", "digits.npz")
            system.infaas("register", "logreg.onnx", *where, cwd=tmp_path)
            digit = digits.load(digits.UNSEEN).x[:1]
            tensor = {"name": "x", "shape": list(digit.shape), "datatype": "FP32", "data": digit.ravel().tolist()}
            token = (system.secrets / "gateway" / "tokens").read_text().strip()
            url = "http://127.0.0.1:8000/v2/models/digits/infer"
            said = node.exec([sys.executable, "-c", ASK, url, token], input=json.dumps({"inputs": [tensor]})).stdout
            system.since(begun, "one machine: first answer, from nothing")
            answer = json.loads(said)
            assert answer["outputs"][0]["shape"] == [1, 10]
            assert answer["parameters"]["variant"].startswith("logreg")
        except BaseException:
            print(system.report(), file=sys.stderr)
            raise
