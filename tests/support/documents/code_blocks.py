"""Code blocks of Markdown pages, and a reader's shell in which they run as they stand.

| language | what the tests do with a block |
|---|---|
| `sh` | bash runs it, in the directory of the page's reader |
| `console` | lines behind `$ ` are commands and run; what follows them is an example of their output, and is not compared |
| `python` | runs as a program of its own; `await` and `async with` may stand outside of functions; `python NAME.py`: is saved under this name, too |
| `toml` | is read: as settings; `toml plan`, `toml scenario`, `toml pipeline`: by that reader; `toml part`: any TOML |
| `sql` | runs as the read-only role (tests/contract/test_sql_command.py) |
| `json` | is read |
| `text`, `mermaid` | is not code |
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.servers.processes import environ

LANGUAGES = {"sh", "console", "python", "toml", "sql", "json", "text", "mermaid"}
SECONDS = 300  # for one block; only there to end a failing test
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE)
_LONG_LIVED = re.compile(r"^(?:[A-Z_]+=\S+ )*infaas (up|run|demo --keep)\b")
_LOOK = re.compile(r"infaas (?:doctor|status)\b[^|;&<>]*")
_AWAITING = """
import ast, asyncio, inspect, sys
code = compile(open(sys.argv[1]).read(), sys.argv[1], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
if code.co_flags & inspect.CO_COROUTINE:
    async def main():
        await eval(code, names)
    asyncio.run(main())
else:
    exec(code, names)
"""


class Block(NamedTuple):
    """One block of a page. line: of the page, where it begins. options: words behind the language."""

    page: Path
    line: int
    language: str
    options: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, *options = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, tuple(options), textwrap.dedent(match["text"])))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a `console` block, each with the output that the page shows."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        end = 1
        while end < len(lines) and (lines[end - 1].rstrip().endswith("\\") or "".join(lines[:end]).count("'") % 2):
            end += 1
        found.append(("".join(lines[:end]), "".join(lines[end:])))
    return found


class Reader:
    """Somebody who types a page's blocks, in one directory. data_dir: of the system that the commands find, if it is not ./.infaas."""

    def __init__(self, directory: Path, data_dir: Path | None = None, **variables: str) -> None:
        self.directory = directory
        self._data_dir = data_dir
        self._variables = variables
        self._servers: list[subprocess.Popen[str]] = []
        self._shell = directory / ".shell"  # what a block exports or activates is there for the next one

    def run(self, block: Block) -> None:
        """Run one block; raises AssertionError with what it printed when it fails."""
        if block.language == "sh":
            self._shell_block(block.text)
        elif block.language == "console":
            for command, shown in commands(block):
                self._shell_block(command, may_fail=shown.startswith(("infaas: ", "curl: ")))
        elif block.language == "python":
            path = self.directory / (block.options[0] if block.options else "block.py")
            path.write_text(self._here(block.text))
            self._finished([*self._python(), "-c", _AWAITING, str(path)])

    def close(self) -> None:
        """Stop what still runs, as Ctrl-C does."""
        for server in reversed(self._servers):
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()
            server.wait()
            server.stdout.close()
        self._servers.clear()

    # -- the shell

    def _shell_block(self, text: str, *, may_fail: bool = False) -> None:
        waiting: list[str] = []
        for line in text.splitlines():
            if _LONG_LIVED.match(line):
                self._commands("\n".join(waiting), may_fail=may_fail)
                waiting = []
                self._serve(line)
            else:
                waiting.append(line)
        self._commands("\n".join(waiting), may_fail=may_fail)

    def _commands(self, text: str, *, may_fail: bool) -> None:
        if not re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).strip():
            return
        before = f". {self._shell}\n" if self._shell.exists() else ""
        after = f"\ndeclare -px > {self._shell}\n"
        # A look changes nothing: on a busy machine one part answers late, and a later look sees that all is well.
        again_s = SECONDS if _LOOK.fullmatch(text.strip()) else 0.0
        command = ["bash", "-euo", "pipefail", "-c", before + self._here(text) + after]
        self._finished(command, may_fail=may_fail, again_s=again_s)

    def _serve(self, line: str) -> None:
        """Start what runs until it is stopped, and wait until it is ready."""
        line = self._here(line)
        own_system = " up" in line or "demo" in line
        if own_system:
            self.close()
            self._data_dir = None
        before = f". {self._shell}\n" if self._shell.exists() else ""
        server = subprocess.Popen(
            ["bash", "-c", f"{before}exec env {line.partition('#')[0]}"],
            cwd=self.directory, env=self._environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._servers.append(server)
        assert server.stdout is not None
        said = ""
        for output in server.stdout:
            said += output
            if output.startswith("ready") or '" runs"' in output or " runs" in output:
                threading.Thread(target=_drain, args=(server.stdout,), daemon=True).start()
                return
        raise AssertionError(f"{line}\n{said}")

    # -- where the page's addresses are here

    def _endpoints(self) -> dict[str, str | None]:
        data_dir = self._data_dir or self.directory / ".infaas"
        try:
            found: dict[str, str | None] = json.loads((data_dir / "endpoints.json").read_text())
        except OSError:
            return {}
        return found

    def _here(self, text: str) -> str:
        """Default ports are replaced by those of this system: several systems share the machine during tests."""
        found = self._endpoints()
        for port, name in (
            (8000, "gateway"),
            (8001, "gateway_grpc"),
            (9100, "metrics"),
            (8501, "dashboard"),
            (4222, "nats"),
        ):
            address = re.sub(r"^\w+://", "", found.get(name) or "").strip("/")
            if address and name != "nats":
                text = re.sub(rf"(localhost|127\.0\.0\.1):{port}\b", address, text)
            elif address:
                text = re.sub(rf"nats://(localhost|127\.0\.0\.1):{port}\b", found[name] or "", text)
        return text

    def _environ(self) -> dict[str, str]:
        bin_directory = str(Path(sys.executable).parent)
        more = {**self._variables, "PATH": f"{bin_directory}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        if self._data_dir is not None:
            more["INFAAS_DATA_DIR"] = str(self._data_dir)
        found = environ(**more)
        if "PYTHONPATH" in self._variables and not self._variables["PYTHONPATH"]:
            del found["PYTHONPATH"]
        return found

    def _python(self) -> list[str]:
        """The Python of the environment that the reader has activated, else the tests' own."""
        activated = self._shell.exists() and re.search(r'VIRTUAL_ENV="(.*?)"', self._shell.read_text())
        return [f"{activated[1]}/bin/python"] if activated else [sys.executable]

    def _finished(self, command: list[str], *, may_fail: bool = False, again_s: float = 0.0) -> None:
        """again_s: for so long a command that fails is run again."""
        until = time.monotonic() + again_s
        while True:
            done = subprocess.run(
                command,
                cwd=self.directory,
                env=self._environ(),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            if may_fail or done.returncode == 0 or time.monotonic() > until:
                break
        assert may_fail or done.returncode == 0, f"{command[-1]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def _drain(stream: Iterator[str]) -> None:
    with contextlib.suppress(ValueError):
        for _ in stream:
            pass
