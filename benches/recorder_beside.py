"""Recording beside serving: `python benches/recorder_beside.py [--rows-per-s 20000] [--rate 500] [--seconds 10] [--rounds 3]`.

A system as `infaas up` starts it answers an open loop of Poisson arrivals, in turn alone and while so many outcome rows a second
are published to its stream and recorded. Shown: the queries' latency, whether the recorder kept up, and the CPU of it and of
PostgreSQL. Wanted: at least 20,000 rows/s recorded, and latency as without.
"""

import asyncio
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import rig
from recorder_ingest import BATCH, messages, outcomes

from bus.natsbus import NatsBus
from services.recorder.events import EventMessage

COUNT = "SELECT count(*) FROM infaas.query_outcomes WHERE app = 'digits'"  # what `outcomes` makes


async def inject(url: str, sent: list[EventMessage], seconds: float, name: str) -> float:
    """Publish the messages evenly over so many seconds; returns the seconds until all were stored."""
    bus = await NatsBus.connect(url, name="bench")
    began, left = time.monotonic(), enumerate(sent)

    async def one(_: float) -> None:
        number, message = next(left)
        await bus.publish_durable(message.subject, message.data, f"{name}-{number}")

    await rig.paced(np.linspace(0.0, seconds, len(sent), endpoint=False), one)
    await bus.close()
    return time.monotonic() - began


def recorded(dsn: str) -> int:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        row = connection.execute(COUNT).fetchone()
    assert row is not None
    return int(row[0])


def main() -> None:
    parser = rig.parser(__doc__, seconds=10.0, rounds=3)
    parser.add_argument("--rows-per-s", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=500.0)
    options = parser.parse_args()
    rows = int(options.rows_per_s * options.seconds) // BATCH * BATCH
    with rig.system() as own, tempfile.TemporaryDirectory() as directory:
        asyncio.run(rig.prepare(own.data_dir))
        queries = rig.bodies(Path(directory) / "queries.npz", *rig.clear_cases())
        dsn, url = own.urls["sql"], own.urls["nats"]
        load = ("--unchecked", "--rate", str(options.rate), "--seconds", str(options.seconds))
        numbers = count()

        def alone() -> dict[str, Any]:
            return rig.generate("nats", url, f"infaas.query.{rig.APP}", queries, *load)

        def beside() -> dict[str, Any]:
            number = next(numbers)
            name = f"round-{number}"
            sent = messages(outcomes(rows, number), name)
            before, there = rig.cpu(own.pid), recorded(dsn)
            with ThreadPoolExecutor(1) as pool:
                injected = pool.submit(asyncio.run, inject(url, sent, options.seconds, name))
                result = alone()
                took = injected.result()
            published = time.monotonic()
            while recorded(dsn) < there + rows:
                time.sleep(0.05)
            used = rig.spent(before, rig.cpu(own.pid))
            cpu = " + PostgreSQL ".join(f"{1e6 * used.get(name, 0.0) / rows:.1f}" for name in ("registrar", "postgres"))
            after = f"all in SQL {time.monotonic() - published:.1f} s after the last; CPU {cpu} us a row"
            return result | {"rows": f"  {rows / took:,.0f} rows/s, {after}"}

        def told(what: str, one: dict[str, Any]) -> None:
            print(f"{what:7} p50 {one['p50_ms']:6.2f} ms  p99 {one['p99_ms']:7.2f} ms{one.get('rows', '')}", flush=True)

        found = rig.in_turn({"alone": alone, "beside": beside}, options.rounds, told)
    for key in ("p50_ms", "p99_ms"):
        without, with_it = (statistics.median(one[key] for one in runs) for runs in found.values())
        print(f"{key[:3]}: {with_it:.2f} ms beside, {without:.2f} ms alone: {with_it / without:.2f} times")


if __name__ == "__main__":
    main()
