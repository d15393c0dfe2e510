"""The paper's models as profiles, and a short Figure 5 with them: what must hold whatever the machine, no more."""

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from services.simulation.run import simulate_all
from services.simulation.scenario.read import read_scenario

PAPER = Path(__file__).resolve().parents[2] / "benches" / "paper"


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    sys.path.insert(0, str(PAPER))
    try:
        return importlib.import_module("zoo")
    finally:
        sys.path.remove(str(PAPER))


def test_the_committed_scenario_is_what_the_generator_writes(zoo: ModuleType) -> None:
    assert (PAPER / "fig5.toml").read_text() == zoo.text()


def test_it_has_the_papers_architectures_variants_and_ranges(zoo: ModuleType) -> None:
    models = zoo.zoo()
    every = [one for of in models.values() for one in of]
    assert (len(models), len(every), len({one.name for one in every})) == (22, 175, 175)
    families: Counter[str] = Counter()
    for of in zoo.ARCHITECTURES:
        assert len(models[of.name]) == of.variants
        families[of.family] += of.variants
    assert families == zoo.FAMILIES
    images = [one for one in every if one.architecture.family != "GNMT"]  # the paper's ranges are of these
    fastest, slowest = (pick(one.latency_ms for one in images) for pick in (min, max))
    assert fastest == pytest.approx(1.5, rel=0.05)
    assert slowest == pytest.approx(5700, rel=0.05)
    quickest, longest = (pick(one.load_s for one in images) for pick in (min, max))
    assert quickest == pytest.approx(0.59, rel=0.05)
    assert longest == pytest.approx(11, rel=0.05)
    assert sum(list(zoo.shares().values())[: len(zoo.POPULAR)]) == pytest.approx(0.8, abs=0.01)


def test_the_measured_anchors_come_out(zoo: ModuleType) -> None:
    named = {one.name: one for of in zoo.zoo().values() for one in of}
    assert named["resnet50-tf-cpu-t4"].latency_ms == pytest.approx(200, rel=0.05)
    assert named["resnet50-neuron-b2"].latency_ms == pytest.approx(20, rel=0.05)
    assert named["resnet50-neuron-b2"].capacity_qps == pytest.approx(100, rel=0.05)
    assert named["resnet50-trt-gpu-b8"].capacity_qps >= 750
    assert 300 <= named["resnet50-trt-gpu-b1"].capacity_qps <= 350
    assert named["resnet152-tf-cpu-t1"].latency_ms == pytest.approx(155 + 592, rel=0.05)


@pytest.mark.slow
def test_a_short_figure_5() -> None:
    """Before the first plateau: everybody serves it, and we do with cheaper machines."""
    scenario = replace(read_scenario(PAPER / "fig5.toml", policies=["infaas", "clipper+"]), duration_s=12.0)
    hardware = {one.variant: one.hardware for one in scenario.variants}
    ours, theirs = simulate_all(scenario)["policies"]
    assert ours["queries"] == theirs["queries"] > 1000
    for one in (ours, theirs):
        assert one["answered"] + one["refused"] + one["failed"] == one["queries"]
    assert ours["cost"] < theirs["cost"] / 1.15
    assert ours["slo_violation_ratio"] < 0.15
    for one, kinds in ((ours, {"cpu", "gpu", "inferentia"}), (theirs, {"cpu", "gpu"})):
        assert {hardware[name] for name in one["variants"]} == kinds
