"""Scenario files for tests: a small sound one, and the same with single things changed."""

import json
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario

SOUND: dict[str, Any] = tomllib.loads("""
[scenario]
name = "small"
duration_s = 60
policies = ["infaas"]
[[app]]
name = "faces"
latency_ms = 300
[[app]]
name = "cars"
latency_ms = 100
[[variant]]
app = "faces"
model = "resnet50"
name = "A"
hardware = "cpu"
latency_ms = 200
saturation_qps = 5
uses = { cpu_cores = 4 }
memory_gb = 1.0
accuracy = 0.7
[[variant]]
app = ["faces", "cars"]
model = "resnet50"
name = "B"
hardware = "gpu"
batch_latency_ms = { 1 = 15.0, 8 = 22.0 }
memory_gb = 1.3
accuracy = 0.7
[[worker]]
kind = "cpu"
devices = { cpu = 8 }
resources = { memory_gb = 32 }
price_per_hour = 0.4
start = 2
max = 4
[[worker]]
kind = "gpu"
devices = { gpu = 1 }
resources = { gpu_memory_gb = 16, cpu_cores = 8 }
price_per_hour = 3.06
start = 1
max = 3
[[load]]
app = "faces"
rate = [[0, 4], [60, 80]]
[[load]]
app = "cars"
rate = 10
""")


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The sound one with values put at paths as variant.0.latency_ms; `...` takes the key away. Lists end with what is put at their length."""
    tree = deepcopy(SOUND)
    for path, value in changes:
        *above, last = path.split(".")
        at: Any = tree
        for key in above:
            at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
        if value is ...:
            del at[int(last) if isinstance(at, list) else last]
        elif isinstance(at, list) and int(last) == len(at):
            at.append(value)
        else:
            at[int(last) if isinstance(at, list) else last] = value
    return tree


def read(folder: Path, tree: dict[str, Any], **options: Any) -> Scenario:
    """What is read of such a file. tree: what TOML can say."""
    file = folder / "s.toml"
    file.write_text("".join(f"{key} = {written(value)}\n" for key, value in tree.items()))
    return read_scenario(file, **options)


def written(value: Any) -> str:
    """As TOML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)
