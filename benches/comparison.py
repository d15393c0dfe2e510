"""INFaaS beside other servers of models: `python benches/comparison.py [--seconds S] [--rounds N] [--peers a,b]`.

Each system gets an environment of its own (made by pip in ~/.cache/infaas/peers, once), the same two models, one thread of the same
onnxruntime, and the same generator over HTTP on loopback. In each round the systems take turns: start to first answer, memory, a closed loop of 32 connections, then an open
loop at a rate that all can carry. CPU and memory are those of all processes of a system, from the kernel. Replies are compared with the model's. What cannot be
installed or started is a row that says why.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rig
from peers.environments import CACHE, environment
from peers.running import adopt, alone, serving
from peers.systems import PEERS, RUNTIME, requests
from peers.table import tables, written
from proof import network

import infaas

CONNECTIONS = 32
REGISTERED = {"infaas", "infaas-fused"}  # start with registered models
LEAD, MOST = 0.2, 128  # by which the best score leads where answers are compared, and how many are
SETTINGS = """
[autoscaler]
policy = "off"  # one instance, as the others have one worker
[registrar]
threads = [1]
max_batches = [8, 64]
"""


@dataclass(frozen=True)
class Model:
    """batch: the largest. rate: requests a second of the open loop. requests: different ones."""

    what: str
    batch: int
    rate: float
    file: Path
    validation: Path


def models(names: list[str]) -> dict[str, Model]:
    """The models of these names; `cnn` is made once and kept."""
    made = CACHE / "models" / "views.onnx"
    if "cnn" in names and not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        network.make(made.parent, views=1)
    all_of_them = {
        "mlp": Model("64 numbers, three dense layers, 0.3 MB", 64, 100.0, rig.MODEL, rig.VALIDATION),
        "cnn": Model(
            "784 numbers (a picture), two convolutions, 0.7 million weights", 8, 20.0, made, made.with_suffix(".npz")
        ),
    }
    return {name: all_of_them[name] for name in names}


async def register(data_dir: Path, chosen: dict[str, Model]) -> dict[str, str]:
    """Register the models, which also measures their variants; returns the full name of each one's fp32 variant."""
    own = rig.DemoSystem(data_dir, settings=SETTINGS)
    served = {}
    try:
        await own.start()
        async with infaas.connect(data_dir=data_dir) as client:
            for name, model in chosen.items():
                await client.register(model.file, app=name, model=name, validation=model.validation)
                rows = await client.variants(app=name)
                (variant,) = [row["variant"] for row in rows if row["variant"].endswith(f"-ort-fp32-t1-b{model.batch}")]
                served[name] = f"{name}.{name}.{variant}"
    finally:
        own.stop()
    return served


class Comparison:
    """What is asked, and what was found."""

    def __init__(self, chosen: dict[str, Model], directory: Path, seconds: float) -> None:
        self._models, self._directory, self._seconds = chosen, directory, seconds
        self._cases = {
            name: rig.clear_cases(one.file, one.validation, lead=LEAD, most=MOST) for name, one in chosen.items()
        }
        self._served: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.alone: list[dict[str, Any]] = []

    def prepare(self) -> float:
        """What INFaaS needs before it can be started: registered models; returns the seconds that it took."""
        began = time.monotonic()
        self._served = asyncio.run(register(self._directory / "data", self._models))
        return time.monotonic() - began

    def by_itself(self, name: str) -> None:
        self.alone.append({"model": name} | alone(self._models[name].file, self._cases[name][0], self._seconds))

    def run(self, system: str, python: str, name: str) -> dict[str, Any]:
        """One start of a system with a model, asked in both ways. A failure is kept as `failed`."""
        model, (x, classes) = self._models[name], self._cases[name]
        run: dict[str, Any] = {"system": system, "model": name}
        peer, served = PEERS[system], self._served.get(name, "model") if system in REGISTERED else "model"
        more = {"PEER_DATA_DIR": str(self._directory / "data"), "PEER_VALIDATION": str(model.validation)}
        try:
            with serving(system, peer, python, model.file, model.batch, self._directory, more) as server:
                run["start_s"] = server.first_answer(served, x)
                made = requests(peer, served, server.port, x)
                table = rig.requests(self._directory / f"{system}.npz", made, classes)
                time.sleep(1.0)
                run["idle_mb"] = server.memory()
                seconds = ("--seconds", str(self._seconds), "--closed", str(CONNECTIONS))
                closed = server.load(table, *seconds)
                run["loaded_mb"] = server.memory()
                opened = server.load(table, *seconds, "--rate", str(model.rate))
            run |= {key: closed[key] for key in ("rate", "cpu_ms", "others")}
            run |= {key: opened[key] for key in ("p50_ms", "p99_ms")} | {"late_ms": opened["late_p99_ms"]}
        except RuntimeError as error:
            run = {"system": system, "model": name, "failed": str(error)}
        self.runs.append(run)
        return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make the environments and do all rounds; returns the figures, which --json keeps after each round."""
    environments = {}
    for name in options.peers:
        environments[name] = environment(PEERS[name].like or name, install=not options.no_install)
        rig.say(f"{PEERS[name].title}: {environments[name].reason or 'installed'}")
    ready = [name for name, of in environments.items() if not of.reason]
    chosen = models(options.models)
    found: dict[str, Any] = {
        "when": f"{datetime.now(UTC):%-d %B %Y}, {os.cpu_count()} cores, Python {platform.python_version()}, {RUNTIME.replace('==', ' ')}. "
        f"{CONNECTIONS} connections, {options.seconds:g} s each.",
        "models": {name: {"what": model.what, "rate": model.rate} for name, model in chosen.items()},
        "systems": {name: asdict(of) for name, of in environments.items()},
    }
    adopt()
    with tempfile.TemporaryDirectory(prefix="infaas-peers-", ignore_cleanup_errors=True) as directory:
        comparison = Comparison(chosen, Path(directory), options.seconds)
        found |= {"runs": comparison.runs, "alone": comparison.alone}
        if REGISTERED & set(ready):
            rig.say("INFaaS registers the models, which measures their variants")
            found["registered_s"] = comparison.prepare()
        for number in range(options.rounds):
            for model in chosen:
                comparison.by_itself(model)
                for name in ready if number % 2 == 0 else ready[::-1]:
                    run = comparison.run(name, environments[name].python, model)
                    rig.say(f"round {number + 1} {model} {name}: {run.get('failed') or _line(run)}")
            if options.json:  # a long run that is ended keeps its rounds
                options.json.write_text(json.dumps(found, indent=1))
    return found


def _line(run: dict[str, Any]) -> str:
    return (
        f"start {run['start_s']:.1f} s, {run['rate']:,.0f}/s, {run['cpu_ms']:.3f} ms of CPU, p50 {run['p50_ms']:.1f} ms, "
        f"p99 {run['p99_ms']:.1f} ms, {run['idle_mb']:.0f} MB, {run['loaded_mb']:.0f} MB, others {run['others']:.1f} cores"
    )


def names(known: list[str]) -> Callable[[str], list[str]]:
    """A reader of comma-separated names, each of which must be known."""

    def read(text: str) -> list[str]:
        asked = text.split(",")
        if wrong := [name for name in asked if name not in known]:
            raise argparse.ArgumentTypeError(f"no {wrong[0]!r} here: choose of {', '.join(known)}")
        return asked

    return read


def main() -> None:
    parser = rig.parser(__doc__, seconds=4.0, rounds=3)
    parser.add_argument("--peers", type=names(list(PEERS)), default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--models", type=names(["mlp", "cnn"]), default=["mlp", "cnn"], help="of mlp,cnn")
    parser.add_argument("--no-install", action="store_true", help="only what is installed")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and run nothing")
    parser.add_argument("--write", type=Path, help="put the tables into this page, between its marks")
    options = parser.parse_args()
    found = json.loads(options.show.read_text()) if options.show else measure(options)
    print(tables(found))
    if options.write:
        options.write.write_text(written(options.write.read_text(), tables(found)))


if __name__ == "__main__":
    main()
