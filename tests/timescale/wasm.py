"""TimescaleDB as WebAssembly in a node process, for tests only; package.json names the package, server.mjs is the server."""

import shutil
import subprocess
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
PACKAGE = HERE / "node_modules" / "@unni-craftsman" / "pglite"


def missing() -> str:
    """Why it cannot run here; "" when it can."""
    if shutil.which("node") is None:
        return "node is not installed"
    if not PACKAGE.exists():
        return "the npm package with TimescaleDB is not installed: make test-timescale does it"
    return ""


class WasmTimescale:
    """One server. directory: its data, which a later one finds again. licence: "timescale" | "apache"."""

    def __init__(self, directory: Path, licence: str = "timescale") -> None:
        self._command = ["node", str(HERE / "server.mjs"), str(directory), licence]
        self._process: subprocess.Popen[bytes] | None = None
        self.dsn = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().split()
        if len(line) != 2 or line[0] != "port":
            self.stop()
            raise RuntimeError("the server did not start, see above")
        self.dsn = f"postgresql://postgres:any@127.0.0.1:{line[1]}/postgres"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it cleanly: it works without a disk's word, so that what a killed one wrote may be lost."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None
