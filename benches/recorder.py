"""Recording outcomes: `python benches/recorder.py [--rows-per-s 20000] [--rate 500] [--seconds 10] [--rounds 3]`.

A system as `infaas up` starts it answers an open loop of Poisson arrivals, in turn alone and while so many outcome rows a second
are published to its stream and recorded. Shown: the queries' latency, whether the recorder kept up, and the CPU of it (beside it in its process
are registrar and controller) and of PostgreSQL. Then as many rows at once, without queries: how many a second it brings from the stream into the database.
"""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import psycopg
import rig

from bus.codec import encode
from bus.messages.events import OutcomeEvent
from bus.natsbus import NatsBus
from services.recorder.events import EventMessage

BATCH = 512  # rows of a message
APP = "digits"
COUNT = f"SELECT count(*) FROM infaas.query_outcomes WHERE app = '{APP}'"


def outcomes(rows: int, seed: int) -> list[OutcomeEvent]:
    rng = random.Random(seed)
    began = time.time() - rows / 20_000
    return [
        OutcomeEvent(
            time=began + i / 20_000, uid=rng.randbytes(16), id=f"q{i}", app=APP, outcome="late" if i % 50 == 0 else "ok",
            model="mlp", variant=f"mlp-v1-ort-fp32-t{1 + i % 2}-b64", worker="w0", hardware="cpu",
            latency_ms=rng.expovariate(0.3), slo_ms=50.0, accuracy=0.97, batch=rng.randint(1, 64), cost=rng.random() * 1e-8,
            version="1", policy="infaas",
        )
        for i in range(rows)
    ]  # fmt: skip


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
    with rig.system() as own:
        asyncio.run(rig.prepare(own.data_dir))
        queries = rig.bodies(own.data_dir.parent / "queries.npz", *rig.clear_cases())
        dsn, url, numbers = own.urls["sql"], own.urls["nats"], count()
        load = ("--unchecked", "--rate", str(options.rate), "--seconds", str(options.seconds))
        ask = partial(rig.generate, "nats", url, f"infaas.query.{rig.APP}", queries, *load)

        def beside(seconds: float = options.seconds, *, asked: bool = True) -> dict[str, Any]:
            number = next(numbers)
            made, name = outcomes(rows, number), f"round-{number}"
            bodies = (encode({"id": f"{name}-{at}", "rows": made[at : at + BATCH]}) for at in range(0, rows, BATCH))
            sent = [EventMessage("infaas.event.outcome", body) for body in bodies]
            before, there = rig.cpu(own.pid), recorded(dsn)
            with ThreadPoolExecutor(1) as pool:
                injected = pool.submit(asyncio.run, inject(url, sent, seconds, name))
                result = ask() if asked else {}
                stored = injected.result()
            published = time.monotonic()
            while recorded(dsn) < there + rows:
                time.sleep(0.05)
            after, used = time.monotonic() - published, rig.spent(before, rig.cpu(own.pid))
            took = stored if asked else stored + after
            cpu = [1e6 * used.get(name, 0.0) / rows for name in ("registrar", "postgres")]
            line = f"in SQL {after:.1f} s after the last; CPU {cpu[0]:.1f} + PostgreSQL {cpu[1]:.1f} us a row"
            return result | {"rows": f"{rows / took:,.0f} rows/s, {line}"}

        def told(what: str, one: dict[str, Any]) -> None:
            print(
                f"{what:7} p50 {one['p50_ms']:6.2f} ms  p99 {one['p99_ms']:7.2f} ms  {one.get('rows', '')}", flush=True
            )

        found = rig.in_turn({"alone": ask, "beside": beside}, options.rounds, told)
        print(f"at once: {beside(0.0, asked=False)['rows']}; wanted: >= 20,000/s, <= 12 us")
    without, with_it = (rig.medians(runs) for runs in found.values())
    for key in ("p50_ms", "p99_ms"):
        print(
            f"{key[:3]}: {with_it[key]:.2f} ms beside, {without[key]:.2f} ms alone: {with_it[key] / without[key]:.2f} times"
        )


if __name__ == "__main__":
    main()
