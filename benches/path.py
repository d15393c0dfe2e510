"""The whole path of a query against the bare echo, in one run: `python benches/path.py [--seconds S] [--rounds N] [--json]`.

Starts a system, registers the benches' model, and sends queries without requirements: 64 under way all the time, then one at a
time, each in turn with the echo (benches/echo.py, same server, same generator). Then the open loop: the highest Poisson rate
with p99 at most 50 ms counted from the intended send time. CPU is the kernel's, of all our processes and nats-server.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rig
from echo import SUBJECT, session

import infaas
from infaas.errors import InfaasError, Refused

APP = "bench"
LIMIT_MS = 50.0
SURE = 0.9  # probability above which a picture is a clear case
GOOD = 0.999  # share of queries that must be answered at a rate
COARSE, FINE = 1.25, 2  # step between rates at first, and how often the last step is halved
TRIES = 2  # failures that end a rate
TARGETS = {"throughput": 14_000, "p99_ms": 20.0, "of echo": 0.85, "p50 ratio": 2.0, "cpu_ms": 0.050, "open": 10_000}


async def prepare(data_dir: Path) -> int:
    """Register the model and query until it answers; returns how many variants there are."""
    with np.load(rig.VALIDATION) as stored:
        x = stored["x"]
    async with infaas.connect(data_dir=data_dir) as client:
        status = await client.register(rig.MODEL, app=APP, model="mlp64", validation=rig.VALIDATION)
        for _ in range(100):
            reply = await client.query(APP, x[:1], raise_refused=False)
            if not isinstance(reply, Refused):
                return len(status.variants)
            await asyncio.sleep(0.2)
    raise InfaasError(f"no answer: {reply}")


class Bench:
    """One system, one echo, and the generator that asks them in turn."""

    def __init__(self, own: rig.DemoSystem, echo: int, directory: Path) -> None:
        with np.load(rig.VALIDATION) as stored:
            x = stored["x"]
        (scores,) = session().run(["scores"], {"x": x})
        # Clear cases only, which every variant of the model decides alike: an answer that differs is wrong.
        clear = np.sort(scores, axis=1)[:, -1] > SURE
        x, scores = x[clear][:256], scores[clear][:256]
        self.url = own.urls["nats"]
        self.roots = {"echo": echo, "infaas": own.pid}
        self.system = own.pid
        self.sends = {
            "echo": (SUBJECT, rig.bodies(directory / "echo.npz", x, scores.argmax(1), raw=True)),
            "infaas": (f"infaas.query.{APP}", rig.bodies(directory / "queries.npz", x, scores.argmax(1))),
        }

    def run(self, what: str, *options: str) -> dict[str, Any]:
        """One run with the CPU seconds of everybody who took part, by kind."""
        subject, queries = self.sends[what]
        before = rig.cpu(self.system) | rig.cpu(self.roots["echo"])
        result = rig.generate(self.url, subject, queries, *options)
        after = rig.cpu(self.system) | rig.cpu(self.roots["echo"])
        result["cpu_s"] = rig.spent(before, after)
        if result["errors"]:
            print(f"{what} {' '.join(options)}: {result['errors']}", file=sys.stderr)
        return result

    def highest(self, what: str, seconds: float, start: float, say: Callable[[str], None]) -> dict[str, Any]:
        """The highest rate that holds: upwards by COARSE until one fails, then between the two."""
        best: dict[str, Any] = {"rate": 0.0, "tried": []}
        low, high, rate = 0.0, 0.0, start
        for step in range(20):
            good = False
            for again in range(TRIES):  # a busy moment of the machine is not the system's limit
                options = ("--rate", str(rate), "--seconds", str(seconds), "--seed", str(step * TRIES + again))
                result = self.run(what, *options)
                answered = result["answered"] - sum(result["errors"].values())
                good = result["p99_ms"] <= LIMIT_MS and answered >= GOOD * result["sent"]
                late = result["late_p99_ms"] > LIMIT_MS / 4
                best["tried"].append({"rate": rate, "p99_ms": result["p99_ms"], "good": good, "generator_late": late})
                say(f"  {what:7} {rate:8.0f}/s  p99 {result['p99_ms']:8.1f} ms{'  (generator late)' if late else ''}")
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


def per_answer(result: dict[str, Any], total: float) -> dict[str, float]:
    """CPU milliseconds an answer by kind of process; total: seconds that the generator ran, warm-up included."""
    answers = result["rate"] * total
    return {name: 1000 * seconds / answers for name, seconds in result["cpu_s"].items()}


def closed(bench: Bench, clients: int, seconds: float, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Both in turn; medians over the rounds, and the median of the rounds' own ratios."""
    found: dict[str, list[dict[str, Any]]] = {"echo": [], "infaas": []}
    for number in range(rounds):
        for what in ("echo", "infaas") if number % 2 == 0 else ("infaas", "echo"):
            result = bench.run(what, "--closed", str(clients), "--seconds", str(seconds))
            found[what].append(result)
            say(
                f"  {what:7} {clients:3} under way  {result['rate']:8.0f}/s"
                f"  p50 {result['p50_ms']:7.3f} ms  p99 {result['p99_ms']:7.3f} ms"
            )
    summary: dict[str, Any] = {
        what: {
            key: statistics.median(r[key] for r in results) for key in ("rate", "p50_ms", "p99_ms", "generator_cpu_s")
        }
        for what, results in found.items()
    }
    for what, results in found.items():
        # The generator's connection and warm-up second are in the CPU figures: so are their answers.
        each = [per_answer(r, seconds + 1.0) for r in results]
        names = {name for one in each for name in one}
        summary[what]["cpu_ms"] = {
            name: statistics.median(one.get(name, 0.0) for one in each) for name in sorted(names)
        }
    pairs = list(zip(found["infaas"], found["echo"], strict=True))
    summary["throughput_ratio"] = statistics.median(mine["rate"] / echo["rate"] for mine, echo in pairs)
    summary["p50_ratio"] = statistics.median(mine["p50_ms"] / echo["p50_ms"] for mine, echo in pairs)
    return summary


def report(found: dict[str, Any]) -> None:
    many, one = found["closed 64"], found["closed 1"]
    mine = many["infaas"]["cpu_ms"]
    serving = sum(mine.get(name, 0.0) for name in rig.SERVING)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-open", action="store_true", help="leave the open loop out")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document at the end and nothing else on stdout"
    )
    parser.add_argument("--fused", action="store_true", help="a system whose queries stay in one process")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    began = time.monotonic()
    with rig.system(fused=options.fused) as own:
        asyncio.run(own.start())
        say(f"system ready; {asyncio.run(prepare(own.data_dir))} variants")
        echo = subprocess.Popen(
            [sys.executable, str(rig.HERE / "echo.py"), own.urls["nats"]], stdout=subprocess.PIPE, text=True
        )
        try:
            assert echo.stdout is not None and echo.stdout.readline().strip() == "ready"
            bench = Bench(own, echo.pid, own.data_dir.parent)
            found: dict[str, Any] = {
                "closed 64": closed(bench, 64, options.seconds, options.rounds, say),
                "closed 1": closed(bench, 1, options.seconds, options.rounds, say),
            }
            if not options.no_open:
                found["open"] = {
                    what: bench.highest(what, options.seconds, 0.5 * found["closed 64"][what]["rate"], say)
                    for what in ("infaas", "echo")
                }
        finally:
            echo.terminate()
            echo.wait()
    found["seconds"] = time.monotonic() - began
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
