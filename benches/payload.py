"""What the size of a query costs the dispatcher: `python benches/payload.py [--seconds S] [--rounds N]`.

Three models that look at the first ten numbers of their input, with inputs of 256 bytes, 150 kB and 600 kB, each asked in turn
with a few queries under way. The dispatcher decodes heads only, so what it adds to a query should hardly depend on the size; what
grows is what the bus spends on moving bytes. To tell the two apart, a relay on the same bus that forwards bodies unread (relay.py)
is asked in turn with the system: dispatcher less relay is what receiving, deciding and routing cost, the relay is the bus.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rig
from onnx import TensorProto, helper
from relay import RELAY

import infaas
from infaas.errors import InfaasError, Refused

FLOATS = {"256 B": 64, "150 kB": 37_500, "600 kB": 150_000}
QUERIES = 16  # different ones
SAMPLES = 32  # of a validation set
UNDER_WAY = 4
WARMUP = 0.5  # s


def model(path: Path, width: int) -> Path:
    """The scores are the first ten of x."""
    one = lambda name, value: helper.make_tensor(name, TensorProto.INT64, [1], [value])  # noqa: E731
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", "from", "to", "axis"], ["scores"])],
        f"first-ten-of-{width}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])],
        [one("from", 0), one("to", 10), one("axis", 1)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 10
    onnx.checker.check_model(made)
    onnx.save(made, path)
    return path


async def prepare(own: rig.DemoSystem, directory: Path) -> dict[str, Path]:
    """Register one app for each size and wait until it answers; returns what to send."""
    rng = np.random.default_rng(0)
    sends = {}
    async with infaas.connect(data_dir=own.data_dir) as client:
        for size, width in FLOATS.items():
            app = f"p{width}"
            x = rng.random((max(SAMPLES, QUERIES), width), np.float32)
            y = x[:, :10].argmax(1)
            validation = directory / f"{app}.npz"
            np.savez(validation, x=x, y=y)
            await client.register(model(directory / f"{app}.onnx", width), app=app, model=app, validation=validation)
            for _ in range(100):
                reply = await client.query(app, x[:1], raise_refused=False)
                if not isinstance(reply, Refused):
                    break
                await asyncio.sleep(0.2)
            else:
                raise InfaasError(f"no answer from {app}: {reply}")
            sends[size] = rig.bodies(directory / f"{app}-queries.npz", x[:QUERIES], y[:QUERIES])
    return sends


def spend(own: rig.DemoSystem, relay: int, subject: str, queries: Path, seconds: float) -> dict[str, float]:
    """One run: rate, p50, and CPU milliseconds a query by kind of process."""
    before = rig.cpu(own.pid) | rig.cpu(relay)
    options = ("--closed", str(UNDER_WAY), "--seconds", str(seconds), "--warmup", str(WARMUP))
    result = rig.generate(own.urls["nats"], subject, queries, *options, *(["--unchecked"] if subject == RELAY else []))
    used = rig.spent(before, rig.cpu(own.pid) | rig.cpu(relay))
    answers = result["rate"] * (seconds + WARMUP)
    return {
        "rate": result["rate"],
        "p50_ms": result["p50_ms"],
        **{kind: 1000 * s / answers for kind, s in used.items()},
    }


def measure(own: rig.DemoSystem, relay: int, sends: dict[str, Path], seconds: float, rounds: int) -> dict[str, Any]:
    """Medians for each size: of the system, and of the relay in turn with it."""
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {size: [] for size in sends}
    for _ in range(rounds):
        for size, queries in sends.items():
            mine = spend(own, relay, f"infaas.query.p{FLOATS[size]}", queries, seconds)
            bare = spend(own, relay, RELAY, queries, seconds)
            found[size].append((mine, bare))
            print(
                f"  {size:7} {mine['rate']:7.0f}/s  dispatcher {mine['dispatcher']:.4f} ms  relay {bare['other']:.4f} ms",
                file=sys.stderr,
            )
    return {
        size: [
            {key: statistics.median(run.get(key, 0.0) for run in runs) for key in runs[0]}
            for runs in zip(*pairs, strict=True)
        ]
        for size, pairs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with rig.system() as own:
        asyncio.run(own.start())
        sends = asyncio.run(prepare(own, own.data_dir.parent))
        command = [sys.executable, str(rig.HERE / "relay.py"), own.urls["nats"]]
        helpers = [subprocess.Popen([*command, what], stdout=subprocess.PIPE, text=True) for what in ("sink", "relay")]
        try:
            for each in helpers:
                assert each.stdout is not None and each.stdout.readline().strip() == "ready"
            found = measure(own, helpers[1].pid, sends, options.seconds, options.rounds)
        finally:
            for each in helpers:
                each.terminate()
                each.wait()
    report(found)


def report(found: dict[str, Any]) -> None:
    print("CPU, ms a query    rate/s   p50 ms  dispatcher  = relay (bus) + own  executor  nats-server")
    for size, (mine, bare) in found.items():
        own = mine["dispatcher"] - bare["other"]
        print(
            f"  {size:13} {mine['rate']:9.0f} {mine['p50_ms']:8.2f} {mine['dispatcher']:11.4f} {bare['other']:13.4f} {own:5.4f}"
            f" {mine['executor']:9.4f} {mine['nats-server']:12.4f}"
        )
    own = {size: mine["dispatcher"] - bare["other"] for size, (mine, bare) in found.items()}
    whole = {size: mine["dispatcher"] for size, (mine, _) in found.items()}
    print(
        f"600 kB : 150 kB   dispatcher without the bus {own['600 kB'] / own['150 kB']:.2f} (wanted: at most 2), whole {whole['600 kB'] / whole['150 kB']:.2f}"
    )


if __name__ == "__main__":
    main()
