"""Whether a system grows while it lives: `python benches/soak.py [--minutes M] [--every S]` (`make soak`, HOURS=24).

Versions, apps, pipelines, jobs and workers come and go under a steady load. Memory (without files' pages), descriptors and log
of each process, subjects, messages and bytes of NATS, and rows of the database are read every few seconds. Each has its slope
an hour with a 95 % interval: of the means of eight equal parts of the time after the first quarter, in which caches fill;
that of answered queries is filled before. A slope whose interval does not hold 0 is marked. What is kept by design
grows, marked so: rows of history and its bytes, for a day the marks of deleted keys (15 with each registration here), for 90 days
rows of workers, for ever the numbers of deleted versions. What has a bound fills: the last 1,000 registrations and jobs that
ended (1.6 kB each), 65,536 queries that executors ended and 100,000 that were answered (filled before), 16,384 with parts, 20,000 feedbacks,
PostgreSQL's 32 MB of buffers, and NATS' memory: a stream's last block is in a buffer as large as it, up to 8 MB, and Go's heap is twice what lives.
Eight streams written to at once took it from 2 to 100 MB, where it stayed once each had 8 MB, but for 150 bytes a subject;
while 6,300 apps came and went in 21 minutes it had 65, and the registrar grew by 60 bytes an app, the monitor by 12. Objects that hold
each other wait for the collector, until 20,000 have come. Wanted: no other mark, no restart,
nothing refused but for what overload explains.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import psycopg
import rig
from scipy import stats

import infaas
from infaas.client import Client
from infaas.connecting import read_endpoints
from infaas.demo.program import command
from services.dispatcher.answered import KEPT, PIECES
from services.shell.host.process import dies_with_parent, end

PARTS = 8
STAY_S = 30.0
# Jobs wait for spare capacity, for ever on a machine that others use, too; here they must come and go.
BUSY = "[jobs]\nutilisation_below = 1.0\nlatency_ratio = 1000.0\n"
WARM = KEPT + 2 * KEPT // PIECES  # queries of each dispatcher: its tables of ended ones are as large as they become
# What grows by design: history in the database and in its stream, marks of deleted keys for a day, logs until they rotate or a week after their worker.
KEEPS = re.compile(r"rows of |PostgreSQL: MB on disk|NATS: MB on disk|INFAAS_EVENTS: messages|KV_|.*: log, kB")
ROWS = """SELECT relname, n_live_tup FROM pg_stat_user_tables WHERE schemaname IN ('infaas', 'infaas_internal')"""


def memory(pid: int) -> float:
    """MB of a process that are of no file, of what it shares its part: of files' pages others decide who shares them."""
    parts = re.findall(r"(?m)^Pss_(?:Anon|Shmem): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return sum(map(int, parts)) / 1024


async def look(client: Client, own: rig.DemoSystem, dsn: str) -> dict[str, float]:
    """Every figure now."""
    found: dict[str, float] = defaultdict(float)
    parts: dict[str, int] = json.loads((own.data_dir / "parts.json").read_text())
    named = {pid: name for name, pid in parts.items()}
    for each in rig.tree(own.pid):
        with suppress(psutil.Error, OSError):
            name = named.get(each.pid) or rig.kind(each)
            found[f"{name}: memory, MB"] += memory(each.pid)
            found[f"{name}: descriptors"] += each.num_fds()
    for log in (own.data_dir / "logs").glob("*.log*"):
        name = re.sub(r"-guest-\d+", "-guest", log.name.partition(".")[0])
        found[f"{name}: log, kB"] += log.stat().st_size / 1024
    reply = await client.bus.request("$JS.API.STREAM.LIST", b"", 10.0)
    for stream in json.loads(reply.data)["streams"]:
        name, state = stream["config"]["name"], stream["state"]
        for what, value in (("messages", state["messages"]), ("subjects", state.get("num_subjects", 0))):
            found[f"{name}: {what}"] = value
        found["NATS: streams"] += 1
        found["NATS: MB on disk"] += state["bytes"] / 2**20
        found["NATS: consumers"] += state["consumer_count"]
    with psycopg.connect(dsn) as connection:
        for table, rows in connection.execute(ROWS):
            found[f"rows of {table}"] = rows
        size = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        found["PostgreSQL: MB on disk"] = size[0] / 2**20 if size else 0.0
    return dict(found)


async def warm(client: Client, x: np.ndarray, queries: int) -> None:
    """As many queries as it takes for so many answers, as fast as they come."""
    answered = 0

    async def ask() -> None:
        nonlocal answered
        while answered < queries:
            answer = await client.query(rig.APP, x, latency_ms=1000, raise_refused=False)
            answered += not isinstance(answer, infaas.Refused)

    await asyncio.gather(*(ask() for _ in range(64)))


async def load(client: Client, x: np.ndarray, ended: Counter[str]) -> None:
    while True:
        answer = await client.query(rig.APP, x, latency_ms=1000, raise_refused=False)
        ended[answer.code if isinstance(answer, infaas.Refused) else "answered"] += 1
        await asyncio.sleep(0.05)


async def come_and_go(client: Client, own: rig.DemoSystem, x: np.ndarray, done: Counter[str]) -> None:
    """An app with a model, a pipeline over it, a job, and away with all of them, again and again."""
    for number in count():
        app = f"guest-{number}"
        await client.register(rig.MODEL, app=app, model=app, validation=str(rig.VALIDATION))
        done["registrations"] += 1
        graph = {"vertex": [{"name": "one", "app": app, "inputs": {"x": "$.x"}}], "output": {"scores": "one.scores"}}
        await client.admin("set-pipeline", pipeline={"name": f"line-{number}", "latency_ms": 2000}, **graph)
        await client.query(f"line-{number}", x, raise_refused=False)
        await client.admin("delete-app", app=f"line-{number}")
        done["pipelines"] += 1
        inputs = own.data_dir / "jobs" / f"in-{number}.npy"
        inputs.parent.mkdir(exist_ok=True)
        np.save(inputs, np.repeat(x, 500, axis=0))
        job = await client.submit(app, inputs.as_uri(), inputs.with_name(f"out-{number}.npy").as_uri())
        await client.wait_job(job)
        done["jobs"] += 1
        inputs.unlink()
        inputs.with_name(f"out-{number}.npy").unlink(missing_ok=True)
        await client.admin("delete-app", app=app)
        await client.admin("delete-version", model=app, version="1")


async def workers_come_and_go(client: Client, own: rig.DemoSystem, done: Counter[str]) -> None:
    """A second worker with a name of its own: half a minute here, half a minute away."""
    words = dies_with_parent(command("run", "worker", "--data-dir", str(own.data_dir)), signal.SIGTERM)
    for number in count():
        name = f"guest-{number}"
        with (own.data_dir / "guest.err").open("wb") as err:
            worker = subprocess.Popen(words, stderr=err, env=os.environ | {"INFAAS_WORKER__NAME": name})  # noqa: ASYNC220  (it returns at once)
        try:
            while not any(each["worker"] == name for each in await client.workers()):  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.5)
            await asyncio.sleep(STAY_S)
        finally:
            await asyncio.to_thread(end, worker, ((signal.SIGTERM, 60.0), (signal.SIGKILL, 5.0)))
        done["workers"] += 1
        await asyncio.sleep(STAY_S)


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Of the means of PARTS equal parts: change an hour, and half of its 95 % interval."""
    hours, means = ([part.mean() for part in np.array_split(of, PARTS)] for of in (times / 3600.0, values))
    found = stats.linregress(hours, means)
    return found.slope, float(np.nan_to_num(found.stderr)) * stats.t.ppf(0.975, PARTS - 2)


async def soak(own: rig.DemoSystem, seconds: float, every: float) -> None:
    x = rig.stored()[0][:1]
    found = read_endpoints(own.data_dir)
    ended, done = Counter[str](), Counter[str]()
    looks: list[tuple[float, dict[str, float]]] = []
    async with infaas.connect(data_dir=own.data_dir) as client:
        dispatchers = [name for name in json.loads((own.data_dir / "parts.json").read_text()) if "dispatcher" in name]
        await warm(client, x, WARM * len(dispatchers))
        coming = (load(client, x, ended), come_and_go(client, own, x, done), workers_come_and_go(client, own, done))
        asking = [asyncio.create_task(each) for each in coming]
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            for task in asking:
                if task.done():
                    task.result()
            looks.append((now, await look(client, own, found.sql)))
            await asyncio.sleep(every)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    print(f"{seconds / 60:.0f} min: {dict(ended)}; {dict(done)}; restarts {restarts(found.metrics):.0f}, wanted 0")
    show(looks)


def restarts(page: str) -> float:
    with urllib.request.urlopen(page) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("infaas_part_restarts_total{"))


def show(looks: list[tuple[float, dict[str, float]]]) -> None:
    settled = looks[len(looks) // 4 :]
    times = np.array([at for at, _ in settled])
    print(f"{'':44} {'first':>10} {'last':>10} {'slope an hour':>14}   95 %")
    for name in sorted({name for _, each in looks for name in each}):
        values = np.array([each.get(name, 0.0) for _, each in settled])
        change, half = slope(times, values)
        flat = abs(change) <= half + 1e-6 * (1.0 + abs(values[-1]))
        mark = "" if flat else "  shrinks" if change < 0 else "  kept" if KEEPS.match(name) else "  grows"
        print(f"{name:44} {looks[0][1].get(name, 0.0):10.1f} {values[-1]:10.1f} {change:14.2f} ± {half:.2f}{mark}")


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    options = parser.parse_args()
    with rig.system(BUSY) as own:
        asyncio.run(rig.prepare(own.data_dir))
        asyncio.run(soak(own, 60.0 * options.minutes, options.every))


if __name__ == "__main__":
    main()
