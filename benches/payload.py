"""What the size of a query costs the dispatcher: `python benches/payload.py [--seconds S] [--rounds N]`.

Three models that look at the first ten numbers of their input, with inputs of 256 bytes, 150 kB and 600 kB, each asked in turn
with a few queries under way. The dispatcher decodes heads only, so what it adds to a query should hardly depend on the size; what
grows is what the bus spends on moving bytes. To tell the two apart, a relay on the same bus that forwards bodies unread (echo.py)
is asked in turn with the system: dispatcher less relay is what receiving, deciding and routing cost, the relay is the bus.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rig
from onnx import TensorProto, helper

FLOATS = {"256 B": 64, "150 kB": 37_500, "600 kB": 150_000}
QUERIES = 16  # different ones
SAMPLES = 32  # of a validation set
UNDER_WAY = 4


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


def prepare(own: rig.DemoSystem, directory: Path) -> dict[str, Path]:
    """Register one app for each size and wait until it answers; returns what to send."""
    rng = np.random.default_rng(0)
    sends = {}
    for size, width in FLOATS.items():
        app = f"p{width}"
        x = rng.random((max(SAMPLES, QUERIES), width), np.float32)
        y = x[:, :10].argmax(1)
        np.savez(directory / f"{app}.npz", x=x, y=y)
        made = model(directory / f"{app}.onnx", width)
        asyncio.run(rig.prepare(own.data_dir, app, made, directory / f"{app}.npz"))
        sends[size] = rig.bodies(directory / f"{app}-queries.npz", x[:QUERIES], y[:QUERIES])
    return sends


def measure(own: rig.DemoSystem, relay: int, sends: dict[str, Path], seconds: float, rounds: int) -> dict[str, Any]:
    """Medians for each size: of the system, and of the relay in turn with it."""
    load = ("--closed", str(UNDER_WAY), "--seconds", str(seconds))
    ask = partial(rig.generate, "nats", own.urls["nats"])
    runs = {}
    for size, queries in sends.items():
        for subject, more in ((f"infaas.query.p{FLOATS[size]}", ()), ("bench.relay", ("--unchecked",))):
            runs[size, subject] = partial(rig.with_cpu, (own.pid, relay), partial(ask, subject, queries, *load, *more))

    def told(name: tuple[str, str], one: dict[str, Any]) -> None:
        of = "other" if name[1] == "bench.relay" else "dispatcher"
        rig.say(f"  {name[0]:7} {name[1]:20} {one['rate']:7.0f}/s  {one['cpu_ms'].get(of, 0.0):.4f} ms")

    found = [rig.medians(results) for results in rig.in_turn(runs, rounds, told).values()]
    return dict(zip(sends, zip(found[::2], found[1::2], strict=True), strict=True))


def main() -> None:
    options = rig.parser(__doc__, seconds=3.0, rounds=3).parse_args()
    with rig.system() as own:
        sends = prepare(own, own.data_dir.parent)
        url = own.urls["nats"]
        with rig.beside("echo.py", url, "sink"), rig.beside("echo.py", url, "relay") as relay:
            report(measure(own, relay, sends, options.seconds, options.rounds))


def report(found: dict[str, Any]) -> None:
    print("CPU, ms a query    rate/s   p50 ms  dispatcher  = relay (bus) + own  executor  nats-server")
    whole, own = {}, {}
    for size, (mine, bare) in found.items():
        cpu, relay = mine["cpu_ms"], bare["cpu_ms"]["other"]
        whole[size], own[size] = cpu["dispatcher"], cpu["dispatcher"] - relay
        print(
            f"  {size:13} {mine['rate']:9.0f} {mine['p50_ms']:8.2f} {whole[size]:11.4f} {relay:13.4f} {own[size]:5.4f}"
            f" {cpu['executor']:9.4f} {cpu['nats-server']:12.4f}"
        )
    ratios = [of["600 kB"] / of["150 kB"] for of in (own, whole)]
    print(f"600 kB : 150 kB   dispatcher without the bus {ratios[0]:.2f} (wanted: at most 2), whole {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
