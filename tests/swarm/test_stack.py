"""The stack of ops/ on a swarm of real engines: it comes up by its documented commands, and whatever happens to it, each query ends.

The tests build on each other, in this order; the first that fails shows what is wrong.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from infaas.demo import digits
from tests.support.models import tiny_models
from tests.swarm import image
from tests.swarm.deployed import APPS, Deployed
from tests.swarm.node import SwarmError, eventually
from tests.swarm.nodes import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

Timings = list[tuple[str, float]]
POOL = {"infaas.pool": "cpu"}


@pytest.fixture(scope="module")
def system(images: Path, tmp_path_factory: pytest.TempPathFactory, timings: Timings) -> Iterator[Deployed]:
    """Three managers, each with a NATS server; w0 with database, gateway and a worker; w1 with a worker."""
    begun = time.monotonic()
    with Swarm(3, 2, images=images, heartbeat="5s") as swarm:  # as Docker has it: busy machines miss shorter ones
        for node in swarm.nodes.values():
            manages = node.name.startswith("m")
            swarm.label(node, {"infaas.nats": "true"} if manages else POOL | {"infaas.worker": "cpu"})
        swarm.label(swarm.nodes["w0"], {"infaas.db": "true", "infaas.gateway": "true"})
        timings.append(("a swarm of 5 nodes", time.monotonic() - begun))
        yield Deployed(swarm, tmp_path_factory.mktemp("system"), timings)


@pytest.fixture(autouse=True)
def diagnosed(system: Deployed, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a person would look at, where a test failed."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.report(), file=sys.stderr)


@pytest.fixture
def up(system: Deployed) -> Deployed:
    """The system as the first test has left it."""
    if not system.ready:
        pytest.skip("the stack did not come up")
    return system


def slow_width() -> int:
    """Channels of a network of which a core does about 40 items a second, whatever the CPU: so that a few hundred take more than two workers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(tiny_models.convnet(), options, providers=["CPUExecutionProvider"])
    x = np.zeros((8, 1, 28, 28), "f4")
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        session.run(None, {"x": x})
        taken.append(time.perf_counter() - begun)
    return max(64, round(64 * (0.2 / min(taken)) ** 0.5))


def test_the_documented_commands_bring_it_up(system: Deployed, tmp_path: Path) -> None:
    system.deploy(image.IMAGE, "--check")  # makes the secrets
    for app, client in APPS.items():
        user = [client, "--dir", str(system.secrets / "auth"), "--role", "client", "--app", app, "--may", "query"]
        subprocess.run([sys.executable, "-m", "infaas.cli", "auth", "add", *user], check=True, capture_output=True)
    with system.timed("deploy: from nothing until every service runs"):
        said = system.deploy(image.IMAGE)
    assert f"{system.stack} runs {image.IMAGE}" in said
    assert system.where("nats") == ["m0", "m1", "m2"]
    assert system.where("worker-cpu") == ["w0", "w1"]
    assert len(system.tasks("dispatcher")) == 2

    (tmp_path / "logreg.onnx").write_bytes(digits.models()["logreg"].read_bytes())
    digits.save_validation(tmp_path / "digits.npz")
    width = slow_width()
    (tmp_path / "convnet.onnx").write_bytes(tiny_models.convnet(width=width))
    x, y = tiny_models.images(32, width=width)
    np.savez(tmp_path / "pictures.npz", x=x, y=y)
    begun = time.monotonic()
    for app, model in (("digits", "logreg"), ("pictures", "convnet")):
        where = ("--app", app, "--model", model, "--validation", f"{app}.npz")
        system.infaas("register", f"{model}.onnx", *where, cwd=tmp_path)
        system.timings.append((f"from then on: {model} registered", time.monotonic() - begun))
    with system.load(10.0) as load:
        load.more(30)
    load.ended()
    assert not load.failed(), load.said
    system.ready = True


def test_http_clients_come_by_the_gateway(up: Deployed) -> None:
    token = (up.secrets / "gateway" / "tokens").read_text().strip()
    client = (
        "import sys, urllib.request as r\n"
        "asked = r.Request('http://127.0.0.1:8000/v2/health/ready', headers={'Authorization': 'Bearer ' + sys.argv[1]})\n"
        "print(r.urlopen(asked, timeout=10).status)"
    )
    assert up.swarm.nodes["w0"].exec([sys.executable, "-c", client, token]).stdout.strip() == "200"


def test_the_same_command_again_restarts_nothing(up: Deployed) -> None:
    before = {task["ID"] for task in up.swarm.tasks()}
    with up.timed("deploy again, nothing new"):
        up.deploy(image.IMAGE)
    assert {task["ID"] for task in up.swarm.tasks()} == before


def test_settings_that_make_no_sense_change_nothing(up: Deployed) -> None:
    before = {task["ID"] for task in up.swarm.tasks()}
    good = up.settings.read_text()
    up.settings.write_text(good.replace("cores = 2\n", ""))
    try:
        with (
            up.timed("wrong settings: until deploy.sh says so"),
            pytest.raises(SwarmError, match=r"machines\.kinds\.cpu\.cores"),
        ):
            up.deploy(image.IMAGE)
    finally:
        up.settings.write_text(good)
    assert {task["ID"] for task in up.swarm.tasks()} == before


def test_a_worker_node_dies(up: Deployed) -> None:
    victim = up.swarm.nodes["w1"]
    with up.load() as load:
        load.more(30)
        killed = up.lose(victim)
        eventually(lambda: up.swarm.status(victim) == "down", "the node is Down", 60)
        up.since(killed, "worker node lost: Down")
        eventually(lambda: up.whole(without="w1"), "all services whole without it", 180)
        up.since(killed, "worker node lost: all services whole")
        load.more(30)
    up.timings.append(("worker node lost: longest time without an answer", load.longest_gap(killed)))
    load.ended()
    assert not load.lost(), load.said
    up.swarm.forget(victim)
    begun = time.time()
    up.swarm.add("w2", engine_labels=POOL)  # the VM-autoscaler takes it: two workers are the least
    eventually(lambda: "w2" in up.where("worker-cpu"), "a worker on the machine that has joined", 120)
    up.since(begun, "a machine joins in its place: its worker runs")


def test_the_leading_manager_dies_with_its_nats_server(up: Deployed) -> None:
    victim = up.swarm.leader
    with up.load() as load:
        load.more(30)
        killed = up.lose(victim)
        eventually(lambda: up.swarm.leader is not victim, "another manager leads", 90)
        up.since(killed, "leading manager lost: another leads")
        eventually(lambda: up.whole(without=victim.name), "all services whole without it", 240)
        up.since(killed, "leading manager lost: all services whole")
        load.more(30)
    up.timings.append(("leading manager lost: longest time without an answer", load.longest_gap(killed)))
    load.ended()
    assert not load.lost(), load.said
    up.swarm.forget(victim)
    begun = time.time()
    # its NATS server has the same name, and nothing else
    up.swarm.add(victim.name, {"infaas.nats": "true"}, manager=True)
    eventually(lambda: up.whole() and victim.name in up.where("nats"), "a new machine in its place", 180)
    up.since(begun, "a manager joins in its place: all services whole")


def test_an_upgrade_fails_no_query(up: Deployed) -> None:
    with up.load() as load:
        load.more(20)
        with up.timed("upgrade, under load"):
            up.deploy(image.NEXT)
        load.more(20)
    load.ended()
    assert not load.failed(), load.said
    kept = {"nats", "timescaledb"}  # as before: an upgrade of ours is no reason to restart them
    assert {name: found for name, found in up.versions().items() if name not in kept and found != {"2"}} == {}
    assert up.versions()["nats"] == {"1"}


def test_an_image_that_does_not_work_is_taken_back(up: Deployed) -> None:
    def back() -> bool:
        found = up.versions()
        for name in ("dashboard", "engine-proxy"):  # which do not need what is broken in that image
            found.pop(name, None)
        return up.whole() and not any("3" in versions for versions in found.values())

    with up.load() as load:
        with up.timed("broken upgrade: until deploy.sh says so"), pytest.raises(SwarmError, match=r"exit 1"):
            up.deploy(image.BROKEN)
        with up.timed("broken upgrade: from then on until all is what it was"):
            eventually(back, "the old version everywhere", 240, 1.0)
    load.ended()
    assert not load.failed(), load.said
    up.deploy(image.NEXT)
    assert up.versions()["dashboard"] == up.versions()["engine-proxy"] == {"2"}


def test_load_brings_a_worker_and_low_load_gives_one_back(up: Deployed) -> None:
    def workers() -> set[str]:
        return {name for name, node in up.swarm.nodes.items() if up.swarm.labels(node).get("infaas.worker") == "cpu"}

    before = workers()
    assert len(before) == 2
    up.swarm.add("w3", engine_labels=POOL)
    begun = time.time()
    with up.load(5.0, "pictures") as heavy:
        heavy.rate(300.0)  # more than two workers take (`slow_width`): what is above is refused
        eventually(lambda: workers() == before | {"w3"}, "the label of a third worker", 120)
        ordered = time.time()
        up.since(begun, "load begins: the VM-autoscaler orders a worker")
        eventually(lambda: "w3" in up.where("worker-cpu"), "its task runs", 60)
        up.since(ordered, "worker ordered: its task runs")
        first = eventually(lambda: heavy.first_answer_of("w3"), "its first answer", 90)
        up.timings.append(("worker ordered: its first answer", first - ordered))
        up.timings.append(("load begins: the new worker's first answer", first - begun))
    with up.load(5.0) as light:
        begun = time.time()
        eventually(lambda: len(workers()) == 2, "a worker is given back", 180)
        up.since(begun, "load ends: a worker is drained and given back")
        gone = next(iter((before | {"w3"}) - workers()))
        eventually(lambda: not up.swarm.containers(gone, "worker"), f"no worker on {gone} any more", 60)
        light.more(10)
    for load in (light, heavy):
        load.ended()
        assert not load.lost(), f"{load.said} {recorded_of(up, load.lost())}"
    assert not light.failed(), light.said
    removed = "SELECT worker FROM infaas.scaling_events WHERE action = 'remove_worker'"
    eventually(lambda: [gone] in up.rows(removed), "its removal is recorded", 120, 1.0)


def recorded_of(up: Deployed, queries: list[dict[str, Any]]) -> str:
    """What the first few took, and all that the history says of them: as a text, since pytest cuts anything else."""
    some = queries[:12]
    names = ", ".join(f"'{query['id']}'" for query in some)
    said = f"SELECT to_jsonb(o) FROM infaas.query_outcomes o WHERE id IN ({names})"
    return json.dumps([some, *up.rows(said)])


def test_each_answer_is_recorded_once(up: Deployed) -> None:
    queries = {query["id"]: query for load in up.loads for query in load.answered()}
    answered = {name: query["at"] + query["took"] for name, query in queries.items()}

    def recorded() -> dict[str, int]:
        rows = up.rows("SELECT id, count(*) FROM infaas.query_outcomes WHERE outcome IN ('ok', 'late') GROUP BY id")
        return {name: count for name, count in rows if name in answered}

    def missing() -> list[str]:
        """Not those that a dispatcher took along which lost its machine within two seconds of the answer."""
        found = answered.keys() - recorded().keys()
        return [one for one in found if not any(-2 < at - answered[one] < 2 for at in up.lost_machines)]

    begun = time.monotonic()
    late, lost = missing(), missing()
    while lost and time.monotonic() < begun + 240:  # rows that wait for a busy recorder are late, and not lost
        time.sleep(1.0)
        lost = missing()
    up.timings.append((f"{len(late)} rows were late: until all are there", time.monotonic() - begun))
    # No row at all, or one that says otherwise than the client was told.
    told = "SELECT id, string_agg(concat_ws(' ', outcome, code), '; ') FROM infaas.query_outcomes GROUP BY id"
    said = dict(up.rows(told)) if lost else {}
    counts = Counter(said.get(one, "no row") for one in lost)
    assert not lost, f"{counts} {recorded_of(up, [queries[one] for one in lost])} {up.lost_machines}"
    assert {name: count for name, count in recorded().items() if count != 1} == {}
    print(f"{len(answered)} answers, each with its row; {len(answered.keys() - recorded().keys())} died with a machine")
