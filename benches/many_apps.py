"""Many small models that share few cores: `python benches/many_apps.py [--apps N] [--rate R] [--latency-ms MS] [--seconds S]`.

Each app has one small ONNX model of its own and gets so many queries a second, evenly from a moment of its own, from a stock NATS client
that waits for nothing. The system has just started, so each app's first query also loads its model. Printed: the share of queries that are
refused, or answered after their objective, in the first half of the time and in the second; the slowest answer; and why queries were refused.

One model is registered. The others are copies of its records under other names, with the same file and profile: a worker loads each for itself.
"""

import asyncio
import json
import sys
import time
from collections import Counter

import msgspec
import nats
import numpy as np
import rig
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.subjects import Subjects
from infaas.demo.program import DemoSystem
from infaas.queries import encode_inputs
from infaas.queries import head as query_head
from services.core.catalog import key_of

APP = "app0"
SETTINGS = "[registrar]\nthreads = [1, 2]\nmax_batches = [8]\n"
SETTLE_S = 12.0  # s until the worker has given up the registered model's instance
LAST_S = 15.0  # s for the last replies
KINDS = {"app": AppRecord, "model": ModelRecord, "variant": VariantRecord}


async def copy_apps(client: nats.NATS, count: int) -> None:
    """The registered app's records, so many times under other names."""
    bucket = await client.jetstream().key_value(Subjects().catalog_bucket)
    records = []
    for key in await bucket.keys():
        kind = KINDS.get(key.partition(".")[0])
        entry = await bucket.get(key)
        if kind is not None and entry.value:
            records.append(msgspec.msgpack.decode(entry.value, type=kind))
    for number in range(1, count):
        for one in records:
            match one:
                case VariantRecord():
                    copy = replace(one, variant=f"{one.variant}-{number}", model=f"{one.model}-{number}")
                case ModelRecord():
                    copy = replace(one, model=f"{one.model}-{number}")
                case AppRecord():
                    links = {f"{model}-{number}": version for model, version in one.links.items()}
                    copy = replace(one, app=f"app{number}", links=links)
            await bucket.put(key_of(copy), encode(copy))


async def load(
    client: nats.NATS, apps: int, rate: float, latency_ms: float, seconds: float
) -> list[tuple[float, float, str]]:
    """(second in which it was sent, seconds until its reply, why it was refused) of each query."""
    needs = {"latency_ms": latency_ms} if latency_ms else {}
    body = query_head(needs, encode_inputs(rig.stored()[0][:1]))  # the field `retry_key` is the last one
    rng = np.random.default_rng(1)
    due = sorted(
        (float(first) + n / rate, app)
        for app, first in enumerate(rng.uniform(0.0, 1.0 / rate, apps))
        for n in range(int(rate * seconds))
    )
    which, began = iter([app for _, app in due]), time.monotonic()

    async def ask(_: float) -> tuple[float, float, str]:
        sent, subject = time.monotonic(), Subjects().query(f"app{next(which)}")
        try:
            reply = await client.request(subject, body + rng.bytes(16), timeout=LAST_S)
        except nats.errors.Error:
            return sent - began, float("inf"), "no reply"
        error = msgspec.msgpack.decode(reply.data).get("error")
        why = f"{error['code']}: {error['message']}" if error else ""
        return sent - began, time.monotonic() - sent, why

    return await rig.paced((at for at, _ in due), ask)


async def measure(own: DemoSystem, apps: int, rate: float, latency_ms: float, seconds: float) -> None:
    await own.infaas("register", rig.MODEL, "--validation", rig.VALIDATION, "--app", APP, "--model", "small")
    client = await nats.connect(own.urls["nats"])
    try:
        await copy_apps(client, apps)
        await asyncio.sleep(SETTLE_S)
        rows = await load(client, apps, rate, latency_ms, seconds)
    finally:
        await client.close()
    objective = latency_ms / 1000.0 if latency_ms else float("inf")
    for name, begin, end in (("first half", 0.0, seconds / 2), ("second half", seconds / 2, float("inf"))):
        part = [(took, why) for at, took, why in rows if begin <= at < end]
        refused = Counter(why for _, why in part if why)
        late = sum(not why and took > objective for took, why in part)
        slowest = max((took for took, why in part if not why), default=0.0)
        print(
            f"{name}: {len(part)} queries, {sum(refused.values()) / len(part):.2%} refused, {late / len(part):.2%} late, "
            f"slowest answer {slowest * 1000:.0f} ms; {json.dumps(dict(refused.most_common(3)))}",
            flush=True,
        )


def main() -> None:
    parser = rig.parser(__doc__, seconds=60.0)
    parser.add_argument("--apps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=5.0, help="queries a second of each app")
    parser.add_argument("--latency-ms", type=float, default=300.0, help="0: no objective")
    given = parser.parse_args()
    with rig.system(SETTINGS) as own:
        asyncio.run(measure(own, given.apps, given.rate, given.latency_ms, given.seconds))


if __name__ == "__main__":
    sys.exit(main())
