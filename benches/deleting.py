"""When a deleted model's disk is given back: `python benches/deleting.py [--mb 100] [--seconds 120] [--times 2]`.

A model of so many MB is registered with `infaas register`, and deleted with `infaas app delete` and `infaas model delete-version` as soon as the database
has its copies. Shown: MB on disk of NATS, of the worker, of PostgreSQL's tables and of its write-ahead log, before, with it, and each 5 s after.
Wanted: within a minute all but the log as before; the log within ten minutes (docs/faq.md).
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
import psycopg
import rig

from tests.support.models import tiny_models

PLACES = {"NATS": "nats", "worker": "workers", "tables": "postgres", "log": "postgres"}
NEAR = 2.0  # MB; so much else changes meanwhile


def large(mb: float, seed: int) -> bytes:
    """Three matrix products, the middle one of so many MB."""
    rng = np.random.default_rng(seed)
    width = int((mb * 2**20 / 4) ** 0.5)
    first, middle, last = (
        rng.normal(size=shape).astype("f4")
        for shape in ((tiny_models.FEATURES, width), (width, width), (width, tiny_models.CLASSES))
    )
    nodes = "a = MatMul(x, w1)  b = MatMul(a, w2)  scores = MatMul(b, w3)"
    return tiny_models.scoring(nodes, w1=first, w2=middle / width, w3=last)


def taken(data_dir: Path) -> dict[str, float]:
    """MB on disk by place."""
    found = dict.fromkeys(PLACES, 0.0)
    for place, folder in PLACES.items():
        for path in (data_dir / folder).rglob("*"):
            if (place == "log") == ("pg_wal" in path.parts) or folder != "postgres":
                try:
                    found[place] += path.stat().st_blocks * 512 / 2**20 if path.is_file() else 0.0
                except OSError:
                    continue  # it has gone
    return found


def row(what: str, found: dict[str, float]) -> None:
    print(f"{what:16}" + "".join(f"{found[place]:10.1f}" for place in PLACES), flush=True)


async def once(own: rig.DemoSystem, writer: str, mb: float, seconds: float, number: int) -> None:
    name = f"large-{number}"
    file, validation = own.data_dir.parent / f"{name}.onnx", own.data_dir.parent / f"{name}.npz"
    file.write_bytes(large(mb, number))
    x, y = tiny_models.digits(100)
    np.savez(validation, x=x, y=y)
    data = validation.with_suffix(".npy")
    np.save(data, x)
    before = taken(own.data_dir)
    row("before", before)
    variants = (await own.infaas("register", file, "--app", name, "--model", name, "--validation", validation))[
        "variants"
    ]
    await own.infaas("query", name, "--latency-ms", "20000", "--input", data)
    with psycopg.connect(writer, autocommit=True) as database:
        size = "SELECT coalesce(sum(length(body)), 0) / 2^20 FROM infaas_internal.files"
        while (database.execute(size.encode()).fetchone() or (0,))[0] < mb:  # noqa: ASYNC110  # it can only be asked
            await asyncio.sleep(0.2)
    row(f"{len(variants)} variants", taken(own.data_dir))
    await own.infaas("app", "delete", name)
    await own.infaas("model", "delete-version", "--model", name, "--version", "1")
    began, back = time.monotonic(), dict[str, float]()
    while (now := time.monotonic() - began) < seconds and len(back) < len(PLACES):
        found = taken(own.data_dir)
        row(f"after {now:.0f} s", found)
        for place in PLACES:
            if place not in back and found[place] <= before[place] + NEAR:
                back[place] = now
        await asyncio.sleep(5.0)
    print(
        "given back after "
        + ", ".join(f"{place} {back[place]:.0f} s" if place in back else f"{place}: not yet" for place in PLACES)
    )


async def measure(own: rig.DemoSystem, options: argparse.Namespace) -> None:
    writer = json.loads((own.data_dir / "endpoints.json").read_text())["writer"]
    print(f"{'MB':16}" + "".join(f"{place:>10}" for place in PLACES))
    for number in range(options.times):
        await once(own, writer, options.mb, options.seconds, number)


def main() -> None:
    parser = rig.parser(__doc__, seconds=120.0)
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args()
    with rig.system() as own:
        asyncio.run(measure(own, options))


if __name__ == "__main__":
    main()
