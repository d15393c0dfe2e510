"""What the benches share: a system of their own with their model, programs beside it, runs in turn, the load generators, and whose CPU time went where."""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime
import psutil
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import infaas
from infaas.answers import Answer
from infaas.demo.program import DemoSystem
from infaas.errors import InfaasError
from infaas.queries import encode_inputs
from infaas.queries import head as query_head

T = TypeVar("T")
HERE = Path(__file__).parent
MODEL, VALIDATION = HERE / "models" / "mlp64.onnx", HERE / "models" / "mlp64.npz"
APP = "bench"
SERVING = ("dispatcher", "executor", "monitor", "nats-server")  # what a query's way costs
# a process is named by its first service: recorder and controller are beside the registrar
BESIDE = ("registrar", "postgres", "up")
LEAD = 0.8  # by which the best score leads where every variant of a model answers the same
PATIENCE_S, AGAIN_S = 240.0, 0.05  # for an answer, and between queries until there is one

say = partial(print, file=sys.stderr, flush=True)  # of progress


def parser(doc: str | None, *, seconds: float | None = None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A program's options: these two, where they have a default."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seconds is not None:
        found.add_argument("--seconds", type=float, default=seconds, help="of each measurement")
    if rounds is not None:
        found.add_argument("--rounds", type=int, default=rounds)
    return found


@contextmanager
def system(settings: str = "", *, fused: bool = False, start: bool = True) -> Iterator[DemoSystem]:
    """A system of one's own, which is stopped and removed at the end. settings: TOML. fused: in one process. start: it runs already."""
    with tempfile.TemporaryDirectory(prefix="infaas-bench-", ignore_cleanup_errors=True) as directory:
        own = DemoSystem(Path(directory) / "data", settings=settings, fused=fused)
        try:
            if start:
                asyncio.run(own.start())
            yield own
        finally:
            own.stop()


def cli(data_dir: Path, *words: str) -> Any:
    """What `infaas ...` prints as JSON of the system in this directory; of a list the items. Raises InfaasError."""
    found = asyncio.run(DemoSystem(data_dir).infaas(*words))
    return found["items"] if isinstance(found, dict) and "items" in found else found


def stored(path: Path = VALIDATION) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Inputs and labels of a validation set."""
    with np.load(path) as found:
        return found["x"].astype(np.float32), found["y"]


def session(path: Path = MODEL) -> onnxruntime.InferenceSession:
    """A model on one thread, as an executor loads it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def clear_cases(
    model: Path = MODEL, validation: Path = VALIDATION, *, lead: float = LEAD, most: int = 256
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Inputs that a model decides clearly, and their classes: an answer that differs is wrong."""
    x, _ = stored(validation)
    (scores,) = session(model).run(["scores"], {"x": x})
    best = np.sort(scores, axis=1)
    clear = best[:, -1] - best[:, -2] > lead
    return x[clear][:most], scores[clear][:most].argmax(1)


async def until_answered(
    client: infaas.Client, app: str, x: Any, fits: Callable[[Answer], bool] = lambda _: True, **needs: Any
) -> Answer:
    """Ask until there is an answer, and one that fits. Raises InfaasError with what came last."""
    began, reply = time.monotonic(), object()
    while time.monotonic() - began < PATIENCE_S:
        try:
            reply = await client.query(app, x, **needs)
        except InfaasError as error:
            reply = error
        if isinstance(reply, Answer) and fits(reply):
            return reply
        await asyncio.sleep(AGAIN_S)
    raise InfaasError(f"no answer from {app}: {reply}")


async def prepare(data_dir: Path, app: str = APP, model: Path = MODEL, validation: Path = VALIDATION) -> int:
    """Register a model and query until it answers; returns how many variants there are."""
    async with infaas.connect(data_dir=data_dir) as client:
        status = await client.register(model, app=app, model=model.stem, validation=validation)
        await until_answered(client, app, stored(validation)[0][:1])
        return len(status.variants)


@contextmanager
def beside(*words: str) -> Iterator[int]:
    """A program of benches/ in a process of its own, from when it says that it is ready; its process id."""
    with subprocess.Popen([sys.executable, str(HERE / words[0]), *words[1:]], stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None and one.stdout.readline().strip() == "ready"
            yield one.pid
        finally:
            one.terminate()


async def paced(times: Iterable[float], ask: Callable[[float], Coroutine[Any, Any, T]]) -> list[T]:
    """One task at each of these times (s from now, ascending), however slow the others are; ask: is told when it is due, by the monotonic clock."""
    began, tasks = time.monotonic(), []
    for at in times:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        tasks.append(asyncio.create_task(ask(began + at)))
    return list(await asyncio.gather(*tasks))


# -- runs


def in_turn(
    runs: Mapping[str, Callable[[], T]], rounds: int, each: Callable[[str, T], object] = say
) -> dict[str, list[T]]:
    """All in turn, every second round the other way round; a shared machine is never the same twice. each: is told of every run."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(runs[name]())
            each(name, found[name][-1])
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each number, and of those in maps; a number that a run lacks is 0 there."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run.get(key) for run in runs]
        if any(isinstance(value, Mapping) for value in values):
            found[key] = medians([value or {} for value in values])
        elif not any(isinstance(value, str) for value in values):
            found[key] = statistics.median(value or 0.0 for value in values)
    return found


def median_of(a: Sequence[T], b: Sequence[T], value: Callable[[T, T], float]) -> float:
    """Of what each round's two runs say together, such as a ratio."""
    return statistics.median(value(*pair) for pair in zip(a, b, strict=True))


# -- processes


def tree(*pids: int) -> list[psutil.Process]:
    """Processes and all their descendants."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return found


def kind(process: psutil.Process) -> str:
    """Which of our processes this is, by its command line."""
    words = process.cmdline()
    if "infaas.cli.run" in words:
        return words[words.index("infaas.cli.run") + 1]
    for name in ("nats-server", "postgres"):
        if name in (words[0] if words else process.name()):
            return name
    return "up" if "infaas.cli" in " ".join(words) and "up" in words else "other"


def part_of(own: DemoSystem, name: str) -> psutil.Process:
    """The one process of this kind of a system."""
    (found,) = (each for each in tree(own.pid) if kind(each) == name)
    return found


def cpu(*pids: int) -> dict[int, tuple[str, float]]:
    """CPU seconds (user and system, all threads) of processes and their descendants: by pid, with its kind."""
    found = {}
    for each in tree(*pids):
        with suppress(psutil.Error):
            times = each.cpu_times()
            found[each.pid] = (kind(each), times.user + times.system)
    return found


def spent(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """CPU seconds between two looks, by kind."""
    total: dict[str, float] = defaultdict(float)
    for pid, (name, seconds) in after.items():
        total[name] += seconds - before.get(pid, (name, 0.0))[1]
    return dict(total)


def busy() -> float:
    """CPU seconds that the whole machine has taken, what a hypervisor took away included, without idle and waiting for a disk."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)  # those of guests are in the first ones


class Others:
    """How busy others keep the machine from now on: a run on a machine that others use says less. This process and its descendants are not others."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), busy(), cpu(os.getpid())

    def cpus(self) -> float:
        """In the mean since then."""
        ours = sum(spent(self._ours, cpu(os.getpid())).values())
        return max(0.0, busy() - self._busy - ours) / (time.monotonic() - self._began)


def memory(*pids: int) -> dict[str, float]:
    """Proportional set size in MB of processes and their descendants, by kind."""
    total: dict[str, float] = defaultdict(float)
    for each in tree(*pids):
        with suppress(psutil.Error):
            total[kind(each)] += each.memory_full_info().pss / 2**20
    return dict(total)


# -- load


def requests(
    path: Path, made: Sequence[bytes], expected: Sequence[int] = (), *, keyed: bool = False, classes: int = 10
) -> Path:
    """Write what the generator sends, and the classes that answers must name; none: they are not looked at. A table needs one length: the longest are kept."""
    longest = max(map(len, made))
    kept = [
        (row, one)
        for row, one in zip(made, expected if len(expected) else [-1] * len(made), strict=True)
        if len(row) == longest
    ]
    rows = np.stack([np.frombuffer(row, np.uint8) for row, _ in kept])
    np.savez(path, requests=rows, expected=[one for _, one in kept], keyed=keyed, classes=classes)
    return path


def bodies(
    path: Path, x: NDArray[np.float32], expected: Sequence[int] = (), *, raw: bool = False, **needs: Any
) -> Path:
    """For NATS: one item a query, as bare bytes (for the echo) or as queries with these requirements."""
    made = [row.tobytes() if raw else query_head(needs, encode_inputs(row[None])) for row in x]
    return requests(path, made, expected, keyed=not raw)


def generate(protocol: str, address: str, target: str, table: Path, *options: str) -> dict[str, Any]:
    """One run of generator.py; raises RuntimeError with what it said when it failed or an answer was wrong."""
    words = [sys.executable, str(HERE / "generator.py"), protocol, address, target, str(table), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    if result["wrong"]:
        raise RuntimeError(f"{result['wrong']} wrong answers: {result}")
    return result


def with_cpu(pids: Sequence[int], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A run of a generator with `cpu_ms`: CPU milliseconds an answer of these processes and their descendants, by kind. All of its time counts, and all of its answers."""
    before = cpu(*pids)
    result = run()
    used = spent(before, cpu(*pids))
    return result | {"cpu_ms": {name: 1000 * seconds / result["answered_all"] for name, seconds in used.items()}}


def serving_ms(result: Mapping[str, Any], *more: str) -> float:
    """CPU milliseconds an answer of all that is on a query's way."""
    return sum(result["cpu_ms"].get(name, 0.0) for name in (*SERVING, *more))
