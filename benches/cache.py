"""What keeping answers brings and costs: `python benches/cache.py [--seconds S] [--rounds N]`.

A system with one CPU instance of a convolutional network of some milliseconds an item, without batching and autoscaler. 32 clients in a
closed loop send pictures of which every second one was sent before: without a cache and with 64 MB, in turn. Then, beside it, what a
part that is not kept costs a dispatcher, and how much memory a process grows by when it fills a cache.
"""

import asyncio
import os
import subprocess
import sys
import timeit
from itertools import count
from pathlib import Path

import numpy as np
import rig
from msgspec import Raw
from overload import APP, own_system

import infaas
from bus.codec import encode
from bus.messages.public import Tensor
from services.dispatcher.cache import MB, PartSource, PredictionCache
from services.dispatcher.predictions import digest_of

CLIENTS = 32
REPEATED = 0.5  # share of the queries
KEPT_MB = 64
SOURCE = PartSource("m", "1", "m-v1-ort-fp32-t1-b8", "cpu", "w1", 0.9, simulated=False)


async def throughput(data_dir: Path, seconds: float, seed: int, *, kept_mb: float) -> tuple[float, float]:
    """(answers a second, share of them that were kept). Pictures of one seed are sent by no other."""
    rng = np.random.default_rng(seed)
    sent: list[np.ndarray] = []
    answered = kept = 0
    async with infaas.connect(data_dir=data_dir) as client:
        await client.admin("set-selection", app=APP, cache_mb=kept_mb)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds

        async def one() -> None:
            nonlocal answered, kept
            while loop.time() < until:
                if sent and rng.random() < REPEATED:
                    picture = sent[rng.integers(len(sent))]
                else:
                    picture = rng.normal(size=(1, 1, 28, 28)).astype("f4")
                    sent.append(picture)
                answer = await client.query(APP, picture)
                answered += 1
                kept += answer.cached

        await asyncio.gather(*(one() for _ in range(CLIENTS)))
    return answered / seconds, kept / answered


def miss_us(floats: int) -> tuple[float, float]:
    """Microseconds that a part pays when its answer is not kept: (the digest of its inputs, the look-up)."""
    inputs = Raw(encode(Tensor("FP32", [1, floats], os.urandom(4 * floats))))
    cache = PredictionCache(KEPT_MB * MB)
    for _ in range(10_000):
        cache.put(os.urandom(16), "m", "1", SOURCE, {"y": Tensor("FP32", [1, 10], bytes(40))})
    digests = [os.urandom(16) for _ in range(1000)]

    def look_up() -> None:
        for digest in digests:
            cache.get(digest, "m", "1", lambda source: source.reaches(0.5))

    digest_s = min(timeit.repeat(lambda: digest_of(inputs), number=1000, repeat=30)) / 1000
    return digest_s * 1e6, min(timeit.repeat(look_up, number=1, repeat=30)) / 1000 * 1e6


FILL = """
import gc, os, psutil, sys
from bus.messages.public import Tensor
from services.dispatcher.cache import PartSource, PredictionCache
size, bound = int(sys.argv[1]), int(sys.argv[2])
gc.collect()
resident = lambda: psutil.Process().memory_info().rss
before, cache, n, full = resident(), PredictionCache(bound), 0, 0
while not full or n < 2 * full:
    source = PartSource("m", "1", "v", "cpu", "w1", 0.9, False)
    cache.put(os.urandom(16), "m", "1", source, {"y": Tensor("FP32", [1, size // 4], os.urandom(size))})
    n += 1
    if cache.evictions and not full:
        full = n
print((resident() - before) / bound, cache.size / bound, len(cache))
"""


def memory(size: int, bound: int) -> tuple[float, float, int]:
    """A process that puts twice as many answers of so many bytes as fit: (its growth, what the cache counts, both of the bound; answers)."""
    arguments = [sys.executable, "-c", FILL, str(size), str(bound)]
    told = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=rig.HERE.parent)
    grown, counted, answers = told.stdout.split()
    return float(grown), float(counted), int(answers)


def measure(data_dir: Path, seconds: float, rounds: int) -> None:
    asyncio.run(throughput(data_dir, 1.0, 999, kept_mb=0))  # loads what serves
    for item in rig.cli(data_dir, "variants", "--app", APP):
        if item["instances"]:
            print(f"{item['variant']}: {item['latency_ms']:.2f} ms an item, {item['saturation_qps']:.0f}/s at most")
    seeds = count()
    runs = {
        mb: lambda mb=mb: asyncio.run(throughput(data_dir, seconds, next(seeds), kept_mb=mb)) for mb in (0, KEPT_MB)
    }
    found = rig.in_turn(
        runs, rounds, lambda mb, one: print(f"{one[0]:6.0f}/s with {mb} MB ({one[1]:.0%} kept)", flush=True)
    )
    ratio = rig.median_of(found[KEPT_MB], found[0], lambda with_it, without: with_it[0] / without[0])
    print(f"half of the queries repeated: {ratio:.2f} × the throughput")


def main() -> None:
    given = rig.parser(__doc__, seconds=4.0, rounds=3).parse_args()
    for floats in (64, 784):
        digest, look_up = miss_us(floats)
        print(f"a miss, {floats} floats: digest {digest:.2f} µs, look-up {look_up:.2f} µs")
    for size in (40, 4000):
        grown, counted, answers = memory(size, KEPT_MB * MB)
        print(
            f"{KEPT_MB} MB of answers of {size} bytes: {answers:,}; grew by {grown:.1%} of the bound, counted {counted:.1%}"
        )
    with own_system(batch=1) as own:
        measure(own.data_dir, given.seconds, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
