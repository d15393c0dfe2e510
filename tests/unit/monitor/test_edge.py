"""The monitor's senses."""

import asyncio
from pathlib import Path

import pytest

from services.monitor.edge import MachineEdge
from services.monitor.machine import MachineSample, SampleMachine


def test_a_sample_is_taken_without_waiting() -> None:
    edge = MachineEdge()
    sum(range(200_000))
    sample = edge.inline(SampleMachine())
    assert isinstance(sample, MachineSample)
    assert 0.0 <= sample.utilisation <= 1.0
    assert sample.memory_used_mb > 10.0


def test_memory_is_the_cgroups_where_it_is_limited(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "memory.current").write_text("104857600\n")
    sample: MachineSample = MachineEdge(tmp_path).inline(SampleMachine())
    assert sample.memory_used_mb == 100.0
    (tmp_path / "memory.max").write_text("max\n")
    assert MachineEdge(tmp_path).inline(SampleMachine()).memory_used_mb != 100.0


def test_other_commands_are_not_taken() -> None:
    edge = MachineEdge()
    assert edge.inline("dance") is NotImplemented
    with pytest.raises(ValueError, match="knows no str"):
        asyncio.run(edge.perform("dance"))
