"""What one message costs: stock nats-py callbacks against our direct path, side by side in one run.

Two echo services (echo.py) wait on one nats-server, one written with nats-py as its documentation shows, one with `bus.natsbus`. The generator
keeps 64 requests of 300 bytes in flight, to one and then to the other, in turns. Printed: answers/s, CPU of the echo service
and of nats-server per answer (user + system, from the kernel's clock), the medians over the turns and their ratio.

    python benches/bus_core.py [--rounds 5] [--seconds 1.5] [--window 64] [--bytes 300]
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import rig

from tests.support.servers.nats import NatsServer


def main() -> None:
    parser = rig.parser(__doc__, seconds=1.5, rounds=5)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = NatsServer(Path(directory))
        server.start()
        sent = rig.bodies(Path(directory) / "sent.npz", np.zeros((1, options.bytes // 4), "f4"), np.zeros(1), raw=True)
        load = (sent, "--unchecked", "--closed", str(options.window), "--seconds", str(options.seconds))
        try:
            with (
                rig.beside("echo.py", server.url, "stock") as stock,
                rig.beside("echo.py", server.url, "direct") as direct,
            ):
                runs = {
                    name: partial(
                        rig.with_cpu,
                        [pid, server.pid],
                        partial(rig.generate, "nats", server.url, f"bench.{name}", *load),
                    )
                    for name, pid in (("stock", stock), ("direct", direct))
                }
                found = rig.in_turn(runs, options.rounds, lambda name, one: rig.say(f"  {name:8} {one['rate']:.0f}/s"))
        finally:
            server.stop()
    of = {name: rig.medians(results) for name, results in found.items()}
    print(f"{'echo':8} {'answers/s':>10} {'service us':>11} {'nats us':>8}")
    for name, one in of.items():
        print(
            f"{name:8} {one['rate']:10.0f} {1e3 * one['cpu_ms']['other']:11.1f} {1e3 * one['cpu_ms']['nats-server']:8.1f}"
        )
    rates, cpu = ([of[name][key] for name in ("direct", "stock")] for key in ("rate", "cpu_ms"))
    print(
        f"direct / stock: answers/s x {rates[0] / rates[1]:.2f}, service CPU x {cpu[0]['other'] / cpu[1]['other']:.2f}"
    )


if __name__ == "__main__":
    main()
