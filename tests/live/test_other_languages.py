"""The examples in other languages ask a running system, where their tools are there: Node.js over NATS, Go over HTTP."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.servers.nats import free_port
from tests.support.servers.processes import ROOT
from tests.support.servers.system import APP, Whole

EXAMPLES = ROOT / "examples"
INSTALL = 180.0  # s that npm may take
SLOW = 240.0  # s that a program may take, Go's compiler included, on a busy machine
TRIES = 20  # a model may have to load first


def run(command: list[str], directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The program's end; it is asked again while the system says that a later try may succeed."""
    for _ in range(TRIES):
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=SLOW,
            cwd=directory,
            env={**os.environ, **environ},
        )
        if done.returncode == 0 or not any(
            word in done.stderr for word in ("deadline", "overloaded", "HTTP 503", "HTTP 504")
        ):
            break
    return done


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/javascript with its packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node or npm on the path")
    directory = tmp_path_factory.mktemp("javascript") / "javascript"
    shutil.copytree(EXAMPLES / "javascript", directory, ignore=shutil.ignore_patterns("node_modules"))
    try:
        install = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(install, check=True, capture_output=True, timeout=INSTALL, cwd=directory)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm cannot install the packages of examples/javascript: is there a registry?")
    return directory


CASES = """
import { Refused, connect, tensor } from "./infaas.mjs";
const client = await connect(process.env.INFAAS_NATS_URL);
const x = new Float32Array(3 * 784).fill(0.5);
const given = tensor(x, [3, 784]);
const asked = [given, { x: given }, Array.from({ length: 3 }, () => Array(784).fill(0.5))];
for (const inputs of asked) {
  const { outputs, variant, missed } = await client.query("digits", inputs, { latency_ms: 20000, accuracy: 0.5 });
  const { shape, data } = outputs.scores;
  if (`${shape}` !== "3,10" || !(data instanceof Float32Array) || data.length !== 30 || missed.length) throw new Error(variant);
}
const refused = async (work, code) => {
  const found = await work().then(() => null, (error) => error);
  if (!(found instanceof Refused) || found.code !== code) throw new Error(`not ${code}: ${found}`);
  return found;
};
await refused(() => client.query("nobody", given), "unknown_app");
await refused(() => client.query("digits", tensor(new Float32Array(4), [1, 4])), "bad_request");
const { closest } = await refused(() => client.query("digits", given, { accuracy: 1 }), "unsatisfiable");
if (!closest.variant) throw new Error("closest");
if ((await client.explain("digits", { latency_ms: 20000 })).candidates.length === 0) throw new Error("explain");
for (const wrong of [() => tensor(x, [1]), () => tensor({ length: 1 }, [1])]) {
  let told = "";
  try { wrong(); } catch (error) { told = error.message; }
  if (!told.startsWith("data ")) throw new Error(told);
}
await client.close();
console.log("all as documented");
"""


@pytest.mark.timeout(1200)
def test_node_asks_over_nats(javascript: Path, system: Whole) -> None:
    assert "@" in system.nats, "the URL has a user and a password"
    done = run(["node", "query.mjs", APP], javascript, INFAAS_NATS_URL=system.nats)
    assert done.returncode == 0, done.stderr
    assert "answered in" in done.stdout
    assert "scores [ 1, 10 ] Float32Array(10)" in done.stdout
    (javascript / "cases.mjs").write_text(CASES)
    done = run(["node", "cases.mjs"], javascript, INFAAS_NATS_URL=system.nats)
    assert done.stdout.strip() == "all as documented", done.stderr


@pytest.mark.timeout(1200)
def test_go_asks_over_http(system: Whole, tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("no go on the path")
    built = ["go", "build", "-o", str(tmp_path / "query"), "."]
    done = run(built, EXAMPLES / "go")
    assert done.returncode == 0, done.stderr
    done = run([str(tmp_path / "query"), APP], tmp_path, INFAAS_GATEWAY=system.gateway)
    assert done.returncode == 0, done.stderr
    assert "answered in" in done.stdout
    assert "scores [1 10]" in done.stdout
    done = run([str(tmp_path / "query"), "nobody"], tmp_path, INFAAS_GATEWAY=system.gateway)
    assert (done.returncode, done.stderr) == (1, "HTTP 404: no model 'nobody' is registered: see /v2/models\n")
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert "refused" in run([str(tmp_path / "query"), APP], tmp_path, INFAAS_GATEWAY=nowhere).stderr
