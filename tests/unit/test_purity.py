"""Services are pure by default: a module reaches I/O, clocks, randomness, logging and transport only if it is named here.

Pure code depends on its arguments alone. Production and the simulator can both run it, and a test needs nothing but values.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What pure code may import: values and arithmetic. Whatever is not here is taken to reach the outside.
# importlib.resources: files that a package brings along are as constant as its code.
# weakref: for what is decoded once for all; the same is decoded again when nobody has it any more.
STANDARD = {
    "abc", "array", "ast", "base64", "binascii", "bisect", "collections", "contextlib", "dataclasses", "datetime", "difflib", "enum",
    "functools", "hashlib", "heapq", "importlib.resources", "io", "ipaddress", "itertools", "json", "math", "operator", "posixpath", "re", "shlex",
    "struct", "tomllib", "types", "typing", "unicodedata", "urllib.parse", "weakref", "zlib",
}  # fmt: skip
INSTALLED = {"google.protobuf", "msgpack", "msgspec", "numpy", "PIL", "scipy"}
# bus.login: its Login travels in an order; only an edge asks it to read files.
OURS = {
    "bus.codec", "bus.datatypes", "bus.fields", "bus.login", "bus.messages", "bus.port", "bus.rights", "bus.subjects", "bus.tensors",
    "bus.values", "infaas.answers", "infaas.errors", "infaas.queries", "infaas.tables", "services",
}  # fmt: skip
ALLOWED = STANDARD | INSTALLED | OURS
NAMES_OF_SYS = {"byteorder", "getsizeof"}
# Calls that need no import, or that what is allowed above offers.
CALLS = {"open", "input", "print", "__import__"}
CLOCKS = {"now", "today", "utcnow"}  # of datetime and date

# What reaches the outside, beside every `edge*` and `__main__` module: a module or package, and what it does there.
EXCEPTIONS = {
    "services.shell": "runs the actors: bus, clock, processes, files, metrics, logs",
    "services.simulation": "runs the actors in virtual time; reads scenarios and recordings, writes results",
    "services.autoscaler.vms.providers": "start and stop machines: commands, Docker",
    "services.engine.proxy": "answers HTTP requests, calls the Docker engine",
    "services.executor.backends": "frameworks that load files and compute on devices",
    "services.executor.workshop.helper": "starts and watches the sandbox",
    "services.executor.workshop.sandbox": "a process of its own",
    "services.executor.workshop.tasks": "work of the sandbox: files, frameworks, measurements",
    "services.gateway.clipper.admin": "HTTP endpoints",
    "services.gateway.clipper.rest": "HTTP endpoints",
    "services.gateway.download": "fetches files over HTTP",
    "services.gateway.http": "the HTTP application",
    "services.gateway.oip.rest": "HTTP endpoints",
    "services.gateway.rafiqi": "HTTP endpoints",
    "services.gateway.registration": "uploads model files",
    "services.gateway.rpc.calls": "gRPC endpoints",
    "services.gateway.rpc.server": "the gRPC server and its methods",
    "services.jobs.files": "reads and writes a job's files",
    "services.recorder.catalog": "writes PostgreSQL",
    "services.recorder.events": "writes PostgreSQL",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted((ROOT / "services").rglob("*.py"))}


@cache
def reached(module: str) -> frozenset[str]:
    """What a module of ours does that pure code must not."""
    return outward(ast.parse(MODULES[module].read_text()))


def below(name: str, roots: set[str] | dict[str, str]) -> bool:
    """Whether this is one of the modules or packages, or below one."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in roots for n in range(1, len(parts) + 1))


def exempt(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last == "__main__" or last.startswith("edge") or below(module, EXCEPTIONS)


def imported(tree: ast.Module) -> set[str]:
    """Modules that this one imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                inner = name in MODULES or node.module in ("bus", "infaas", "services", "urllib", "google")
                allowed = node.module == "sys" and alias.name in NAMES_OF_SYS
                found |= set() if allowed else {name if inner else node.module}
    return found


def outward(tree: ast.Module) -> frozenset[str]:
    """What a module does that pure code must not: imports and calls."""
    names = imported(tree)
    found = {name for name in names if not below(name, ALLOWED | {"__future__"})}
    found |= {name for name in names if name in MODULES and exempt(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = node.func
            if isinstance(call, ast.Name) and call.id in CALLS:
                found.add(f"{call.id}()")
            elif isinstance(call, ast.Attribute) and call.attr in CLOCKS and isinstance(call.value, ast.Name):
                found |= {f"{call.value.id}.{call.attr}()"} & {f"{of}.{call.attr}()" for of in ("datetime", "date")}
    return frozenset(found)


def test_services_are_pure_by_default() -> None:
    assert {name: sorted(reached(name)) for name in MODULES if not exempt(name) and reached(name)} == {}


def test_no_exception_is_stale() -> None:
    """Each one is there, and does reach the outside."""
    stale = {name for name in EXCEPTIONS if not any(below(module, {name}) and reached(module) for module in MODULES)}
    assert stale == set()


def test_the_rule_sees_what_it_forbids() -> None:
    for text in (
        "import time",
        "from os import path",
        "def f():\n    import logging",
        "from services.shell.runtime.runtime import unix_now",
        "from services.shell.runtime import runtime",
        "from bus import natsbus",
        "import bus.natsbus",
        "open('x')",
        "from datetime import datetime\ndatetime.now()",
        "from sys import argv",
    ):
        assert outward(ast.parse(text)), text
    for text in (
        "from math import inf",
        "from sys import byteorder",
        "from bus.messages.flow import Route",
        "self.now()",
    ):
        assert not outward(ast.parse(text)), text
