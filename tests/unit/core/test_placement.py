"""Does a variant fit on a device."""

import msgspec
import pytest

from services.core.placement import Device, free_mb, misfit
from tests.unit.core.test_cost import Variant

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (Variant(), ""),
        (Variant(threads=2, memory_mb=800.0), ""),
        (Variant(threads=3), "needs 3 threads, cpu has 2 cores"),
        (Variant(memory_mb=801.0), "needs 801 MB, cpu sets 800 MB aside"),
        (Variant(hardware="gpu"), "needs a device of kind gpu, cpu is of kind cpu"),
    ],
)
def test_fit(variant: Variant, why: str) -> None:
    found = misfit(variant.record(), CPU, memory_share=0.8)
    assert found.endswith(why)
    assert bool(found) == bool(why)


def test_simulated_variants_go_only_where_devices_are_simulated() -> None:
    real = Variant().record()
    simulated = msgspec.structs.replace(real, simulated=True)
    sleeper = msgspec.structs.replace(CPU, simulated=True)
    assert misfit(simulated, sleeper, 0.8) == ""
    assert "is simulated, cpu is real" in misfit(simulated, CPU, 0.8)
    assert "is real, cpu is simulated" in misfit(real, sleeper, 0.8)


def test_room_that_is_left() -> None:
    assert free_mb(CPU, 0.8, 300.0) == pytest.approx(500.0)
