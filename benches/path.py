"""The whole path of a query against the bare echo, in one run: `python benches/path.py [--seconds S] [--rounds N] [--json]`.

Starts a system, registers the benches' model, and sends queries without requirements: 64 under way all the time, then one at a
time, each in turn with the echo (benches/echo.py, same server, same generator). Then the open loop: the highest Poisson rate
with p99 at most 50 ms counted from the intended send time. CPU is the kernel's, of all our processes and nats-server.
"""

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import rig

LIMIT_MS = 50.0
GOOD = 0.999  # share of queries that must be answered at a rate
COARSE, FINE = 1.25, 2  # step between rates at first, and how often the last step is halved
TRIES = 2  # failures that end a rate
TARGETS = {"throughput": 14_000, "p99_ms": 20.0, "of echo": 0.85, "p50 ratio": 2.0, "cpu_ms": 0.050, "open": 10_000}


class Bench:
    """One system, one echo, and the generator that asks them in turn."""

    def __init__(self, own: rig.DemoSystem, echo: int, directory: Path) -> None:
        x, classes = rig.clear_cases()
        self.url, self.pids = own.urls["nats"], (own.pid, echo)
        self.sends = {
            "echo": ("bench.model", rig.bodies(directory / "echo.npz", x, classes, raw=True)),
            "infaas": (f"infaas.query.{rig.APP}", rig.bodies(directory / "queries.npz", x, classes)),
        }

    def run(self, what: str, *options: str) -> dict[str, Any]:
        """One run with the CPU of everybody who took part, by kind."""
        result = rig.with_cpu(self.pids, partial(rig.generate, "nats", self.url, *self.sends[what], *options))
        if result["errors"]:
            rig.say(f"{what} {' '.join(options)}: {result['errors']}")
        return result

    def highest(self, what: str, seconds: float, start: float) -> dict[str, Any]:
        """The highest rate that holds: upwards by COARSE until one fails, then between the two."""
        best: dict[str, Any] = {"rate": 0.0, "tried": []}
        low, high, rate = 0.0, 0.0, start
        for step in range(20):
            good = False
            for again in range(TRIES):  # a busy moment of the machine is not the system's limit
                options = ("--rate", str(rate), "--seconds", str(seconds), "--seed", str(step * TRIES + again))
                result = self.run(what, *options)
                answered = result["sent"] - sum(result["errors"].values())
                good = result["p99_ms"] <= LIMIT_MS and answered >= GOOD * result["sent"]
                late = result["late_p99_ms"] > LIMIT_MS / 4
                best["tried"].append({"rate": rate, "p99_ms": result["p99_ms"], "good": good, "generator_late": late})
                rig.say(
                    f"  {what:7} {rate:8.0f}/s  p99 {result['p99_ms']:8.1f} ms{'  (generator late)' if late else ''}"
                )
                if good:
                    break
            if good:
                low = rate
                best |= {"rate": rate, "p50_ms": result["p50_ms"], "p99_ms": result["p99_ms"]}
            else:
                high = rate
            if not high:
                rate *= COARSE
            elif not low:
                rate /= 2
            else:
                rate = (low * high) ** 0.5
                if high / low < COARSE ** (1 / 2**FINE):
                    break
            if rate < 50:
                break
        return best


def closed(bench: Bench, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Both in turn; medians over the rounds, and the median of the rounds' own ratios."""

    def told(what: str, one: dict[str, Any]) -> None:
        figures = f"{one['rate']:8.0f}/s  p50 {one['p50_ms']:7.3f} ms  p99 {one['p99_ms']:7.3f} ms"
        rig.say(f"  {what:7} {clients:3} under way  {figures}")

    load = ("--closed", str(clients), "--seconds", str(seconds))
    found = rig.in_turn({what: partial(bench.run, what, *load) for what in bench.sends}, rounds, told)
    ratio = partial(rig.median_of, found["infaas"], found["echo"])
    return {what: rig.medians(results) for what, results in found.items()} | {
        "throughput_ratio": ratio(lambda mine, echo: mine["rate"] / echo["rate"]),
        "p50_ratio": ratio(lambda mine, echo: mine["p50_ms"] / echo["p50_ms"]),
    }


def report(found: dict[str, Any]) -> None:
    many, one = found["closed 64"], found["closed 1"]
    mine = many["infaas"]["cpu_ms"]
    serving = rig.serving_ms(many["infaas"])
    bare = sum(many["echo"]["cpu_ms"].get(name, 0.0) for name in ("other", "nats-server"))
    print("\n64 under way                 infaas       echo      ratio   wanted")
    print(
        f"  answers/s              {many['infaas']['rate']:10.0f} {many['echo']['rate']:10.0f} {many['throughput_ratio']:10.2f}"
        f"   >= {TARGETS['throughput']}, >= {TARGETS['of echo']} of the echo"
    )
    for key in ("p50_ms", "p99_ms"):
        wanted = f"   <= {TARGETS['p99_ms']} ms" if key == "p99_ms" else ""
        print(
            f"  {key[:3]}, ms                {many['infaas'][key]:10.2f} {many['echo'][key]:10.2f} {many['infaas'][key] / many['echo'][key]:10.2f}{wanted}"
        )
    print(f"  server CPU, ms/answer  {serving:10.4f} {bare:10.4f} {serving / bare:10.2f}   <= {TARGETS['cpu_ms']}")
    print("    of it " + ", ".join(f"{name} {mine.get(name, 0.0):.4f}" for name in rig.SERVING))
    print("    beside " + ", ".join(f"{name} {mine.get(name, 0.0):.4f}" for name in rig.BESIDE))
    print(
        f"one at a time\n  p50, ms                {one['infaas']['p50_ms']:10.3f} {one['echo']['p50_ms']:10.3f}"
        f" {one['p50_ratio']:10.2f}   <= {TARGETS['p50 ratio']} of the echo"
    )
    if "open" in found:
        mine_open, echo_open = found["open"]["infaas"], found["open"].get("echo", {"rate": float("nan")})
        print(
            f"open loop, p99 <= {LIMIT_MS:g} ms\n  highest rate/s         {mine_open['rate']:10.0f} {echo_open['rate']:10.0f}"
            f" {mine_open['rate'] / echo_open['rate']:10.2f}   >= {TARGETS['open']}"
        )


def main() -> None:
    parser = rig.parser(__doc__, seconds=4.0, rounds=3)
    parser.add_argument("--no-open", action="store_true", help="leave the open loop out")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--fused", action="store_true", help="a system whose queries stay in one process")
    options = parser.parse_args()
    began = time.monotonic()
    with rig.system(fused=options.fused) as own, rig.beside("echo.py", own.urls["nats"], "model") as echo:
        rig.say(f"system ready; {asyncio.run(rig.prepare(own.data_dir))} variants")
        bench = Bench(own, echo, own.data_dir.parent)
        found = {f"closed {n}": closed(bench, n, options.seconds, options.rounds) for n in (64, 1)}
        if not options.no_open:
            found["open"] = {
                what: bench.highest(what, options.seconds, 0.5 * found["closed 64"][what]["rate"])
                for what in ("infaas", "echo")
            }
    found["seconds"] = time.monotonic() - began
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
