"""Recording beside serving: `python benches/recorder_beside.py [--rows-per-s 20000] [--rate 500] [--seconds 10] [--rounds 3]`.

A system as `infaas up` starts it answers an open loop of Poisson arrivals, in turn alone and while so many outcome rows a second
are published to its stream and recorded. Shown: the queries' latency, whether the recorder kept up, and the CPU of it and of
PostgreSQL. Wanted: at least 20,000 rows/s recorded, and latency as without.
"""

import asyncio
import statistics
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import psycopg
import rig
from recorder_ingest import BATCH, messages, outcomes

from bus.natsbus import NatsBus
from services.recorder.events import EventMessage

COUNT = "SELECT count(*) FROM infaas.query_outcomes WHERE app = 'digits'"  # what `outcomes` makes


class Injector(threading.Thread):
    """Publishes the messages evenly over so many seconds. took: seconds until all were stored."""

    def __init__(self, url: str, sent: list[EventMessage], seconds: float, name: str) -> None:
        super().__init__()
        self.took = 0.0
        self._url, self._sent, self._seconds, self._name = url, sent, seconds, name

    def run(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        bus = await NatsBus.connect(self._url, name="bench")
        began = time.monotonic()
        async with asyncio.TaskGroup() as under_way:
            for number, message in enumerate(self._sent):
                await asyncio.sleep(began + self._seconds * number / len(self._sent) - time.monotonic())
                under_way.create_task(bus.publish_durable(message.subject, message.data, f"{self._name}-{number}"))
        self.took = time.monotonic() - began
        await bus.close()


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
        seen: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
        for number in range(options.rounds):
            sent = messages(outcomes(rows, number), f"round-{number}")
            for what, found in seen.items():
                before, at = rig.cpu(own.pid), recorded(dsn)
                injector = Injector(url, sent, options.seconds, f"round-{number}") if what == "beside" else None
                if injector is not None:
                    injector.start()
                result = rig.generate("nats", url, f"infaas.query.{rig.APP}", queries, *load)
                found.append((result["p50_ms"], result["p99_ms"]))
                line = f"{what:7} p50 {result['p50_ms']:6.2f} ms  p99 {result['p99_ms']:7.2f} ms"
                if injector is not None:
                    injector.join()
                    published = time.monotonic()
                    while recorded(dsn) < at + rows:
                        time.sleep(0.05)
                    after = time.monotonic() - published
                    used = rig.spent(before, rig.cpu(own.pid))
                    cpu = [1e6 * used.get(name, 0.0) / rows for name in ("registrar", "postgres")]
                    line += f"  {rows / injector.took:,.0f} rows/s, all in SQL {after:.1f} s after the last;"
                    line += f" CPU {cpu[0]:.1f} + PostgreSQL {cpu[1]:.1f} us a row"
                print(line, flush=True)
        for part, name in ((0, "p50"), (1, "p99")):
            alone, beside = (statistics.median(pair[part] for pair in seen[what]) for what in ("alone", "beside"))
            print(f"{name}: {beside:.2f} ms beside, {alone:.2f} ms alone: {beside / alone:.2f} times")


if __name__ == "__main__":
    main()
