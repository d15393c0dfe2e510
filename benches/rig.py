"""What the benches share: a system of their own, the load generator, and whose CPU time went where."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infaas.demo.program import DemoSystem
from infaas.queries import encode_inputs
from infaas.queries import head as query_head

HERE = Path(__file__).parent
MODEL, VALIDATION = HERE / "models" / "mlp64.onnx", HERE / "models" / "mlp64.npz"
TICKS = os.sysconf("SC_CLK_TCK")
SERVING = ("dispatcher", "executor", "monitor", "nats-server")  # what a query's way costs
# a process is named by its first service: recorder and controller are beside the registrar
BESIDE = ("registrar", "postgres", "up")


@contextmanager
def system(settings: str = "", *, fused: bool = False) -> Iterator[DemoSystem]:
    """A directory for a system of one's own; what is left of it at the end is stopped and removed. settings: TOML. fused: in one process."""
    with tempfile.TemporaryDirectory(prefix="infaas-bench-", ignore_cleanup_errors=True) as directory:
        own = DemoSystem(Path(directory) / "data", settings=settings, fused=fused)
        try:
            yield own
        finally:
            own.stop()


# -- processes


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(fields[1])].append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in parents[todo.pop()]:
            found.append(child)
            todo.append(child)
    return found


def kind(pid: int) -> str:
    """Which of our processes this is, by its command line; "" when it has ended."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    line = " ".join(words)
    if "infaas.cli.run" in words:
        return words[words.index("infaas.cli.run") + 1]
    if "nats-server" in words[0]:
        return "nats-server"
    if "postgres" in words[0]:
        return "postgres"
    return "up" if "infaas.cli" in line and "up" in words else "other"


def cpu(pid: int) -> dict[int, tuple[str, float]]:
    """CPU seconds (user and system, all threads) of a process and its descendants: by pid, with its kind."""
    found = {}
    for each in [pid, *children(pid)]:
        try:
            fields = (Path("/proc") / str(each) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[each] = (kind(each), (int(fields[11]) + int(fields[12])) / TICKS)
    return found


def spent(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """CPU seconds between two looks, by kind."""
    total: dict[str, float] = defaultdict(float)
    for pid, (name, seconds) in after.items():
        total[name] += seconds - before.get(pid, (name, 0.0))[1]
    return dict(total)


def memory(pid: int) -> dict[str, float]:
    """Proportional set size in MB of a process and its descendants, by kind."""
    total: dict[str, float] = defaultdict(float)
    for each in [pid, *children(pid)]:
        try:
            lines = (Path("/proc") / str(each) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total[kind(each)] += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return dict(total)


# -- load


def bodies(path: Path, x: NDArray[np.float32], expected: NDArray[np.int64], *, raw: bool = False) -> Path:
    """Write what the generator sends: one item a query, as bare bytes (for the echo) or as queries without requirements."""
    made = [row.tobytes() if raw else query_head({}, encode_inputs(row[None])) for row in x]
    heads = np.stack([np.frombuffer(each, np.uint8) for each in made])
    np.savez(path, heads=heads, expected=expected, key=np.array(not raw))
    return path


def generate(url: str, subject: str, queries: Path, *options: str) -> dict[str, Any]:
    """One run of the load generator; raises RuntimeError with what it said when it failed or an answer was wrong."""
    return _generated("generator.py", url, subject, str(queries), *options)


def generate_http(host: str, port: int, requests: Path, *options: str) -> dict[str, Any]:
    """The same over HTTP."""
    return _generated("http_generator.py", host, str(port), str(requests), *options)


def generate_grpc(host: str, port: int, requests: Path, *options: str) -> dict[str, Any]:
    """The same over gRPC."""
    return _generated("grpc_generator.py", host, str(port), str(requests), *options)


def _generated(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / arguments[0]), *arguments[1:]], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    if result["wrong"]:
        raise RuntimeError(f"{result['wrong']} wrong answers: {result}")
    return result
