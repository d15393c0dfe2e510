"""What the documents say of scenario files."""

import re
from pathlib import Path

from services.simulation.scenario import catalogue, faults, loads, machines, model, policies, read
from services.simulation.scenario.read import read_scenario

ROOT = Path(__file__).parents[4]


def test_every_key_is_explained():
    told = (ROOT / "docs/scenarios.md").read_text()
    blocks = [
        read.ScenarioFile, read.Header, catalogue.AppBlock, catalogue.VariantBlock, machines.WorkerBlock, loads.LoadBlock, policies.PolicyBlock,
        model.FaultSpec, model.JobSpec, model.CostSpec,
    ]  # fmt: skip
    keys = {key for block in blocks for key in block.__struct_encode_fields__}
    keys |= {*policies.SECTIONS, *faults.FAULTS, *policies.BASES}
    assert {key for key in keys if not re.search(rf"[`{{\[ ]{re.escape(key)}[`\] =]", told)} == set()


def test_the_example_is_sound():
    scenario = read_scenario(ROOT / "examples/scenario.toml")
    assert scenario.name == "example"
    assert scenario.duration_s <= 600
    assert {one.hardware for one in scenario.variants} == {"cpu", "gpu"}
    assert len(scenario.policies) == 4


def test_the_blocks_of_the_planning_example_may_stand_in_a_scenario(tmp_path):
    """But for `qps`, which belongs in [[load]], and what is scarce, which belongs in [[worker]]."""
    plan = (ROOT / "examples/plan.toml").read_text()
    blocks = "\n".join(
        line for line in plan.splitlines() if not line.startswith(("slack", "lambda", "qps", "#")) and line
    )
    file = tmp_path / "s.toml"
    file.write_text(
        blocks
        + """
[scenario]
duration_s = 10
[[worker]]
kind = "all"
devices = { cpu = 4, gpu = 1, inferentia = 1 }
start = 1
[[load]]
app = "classify"
rate = 4
"""
    )
    found = {one.variant: (one.threads, one.max_batch, one.price_per_s) for one in read_scenario(file).variants}
    assert found == {"A": (4, 1, 1.0), "B": (1, 2, 3.0), "C": (1, 12, 16.0)}
