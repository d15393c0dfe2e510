"""Does a variant fit on a device."""

import msgspec
import pytest

from bus.messages.catalog import VariantRecord
from services.core.placement import Amount, Device, cores_needed, fits, misfit, short_of, shortage, total
from tests.unit.core.test_cost import varied

CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (varied(), ""),
        (varied(threads=2, memory_mb=800.0), ""),
        (varied(threads=3), "needs 3 threads, cpu has 2 cores"),
        (varied(memory_mb=801.0), "needs 801 MB, cpu sets 800 MB aside: use a larger device or raise monitor.memory_share"),
        (varied(hardware="gpu"), "needs a device of kind gpu, cpu is of kind cpu"),
    ],
)  # fmt: skip
def test_fit(variant: VariantRecord, why: str) -> None:
    found = misfit(variant, CPU, memory_share=0.8)
    assert found.endswith(why)
    assert bool(found) == bool(why)


def test_simulated_variants_go_only_where_devices_are_simulated() -> None:
    real = varied()
    simulated = msgspec.structs.replace(real, simulated=True)
    sleeper = msgspec.structs.replace(CPU, simulated=True)
    assert misfit(simulated, sleeper, 0.8) == ""
    assert "is simulated, cpu is real" in misfit(simulated, CPU, 0.8)
    assert "is real, cpu is simulated" in misfit(real, sleeper, 0.8)


@pytest.mark.parametrize(
    ("kind", "cores", "limit"),
    [("cpu", 2, 8.0), ("inferentia", 4, 4.0), ("gpu", 1, float("inf"))],
)
def test_cores_are_promised_by_kind(kind: str, cores: int, limit: float) -> None:
    """CPU cores several times over, an accelerator's once, a GPU's are not counted."""
    device = Device(name="d", kind=kind, cores=cores, memory_mb=1000.0)
    assert total(device, 0.8, 4.0) == Amount(800.0, limit, float("inf"))
    assert total(device, 0.8, 4.0, device_mb=300.0, max_models=2) == Amount(300.0, limit, 2)


@pytest.mark.parametrize(("kind", "threads", "cores"), [("cpu", 3, 3.0), ("inferentia", 3, 1.0), ("gpu", 3, 0.0)])
def test_cores_that_an_instance_takes(kind: str, threads: int, cores: float) -> None:
    assert cores_needed(varied(hardware=kind, threads=threads)) == cores


def test_what_is_missing_and_in_words() -> None:
    limit, taken = Amount(800.0, 4.0), Amount(300.0, 4.0)
    assert short_of(Amount(100.0, 1.0), limit - taken) == Amount(0.0, 1.0)
    assert short_of(Amount(600.0, 0.0), limit - taken) == Amount(100.0, 0.0)
    assert short_of(Amount(500.0, 0.0), limit - taken).none
    assert shortage("v", Amount(100.0, 1.0), taken, limit, "i0") == (
        "v needs 1 core; instances in use take 4 of the 4 that i0 may promise"
    )
    assert "v needs 600 MB; instances in use take 300 of the 800 MB" in shortage(
        "v", Amount(600.0, 1.0), taken, limit, "i0"
    )


def test_what_was_measured_on_another_kind_of_cpu_does_not_fit() -> None:
    int8 = msgspec.structs.replace(varied(), arithmetic="exact")
    plain = msgspec.structs.replace(CPU, arithmetic="saturating")
    assert "exact sums of small integers; cpu has saturating ones" in misfit(int8, plain, 1.0)
    assert not fits(int8, 2, 1000.0, 1.0, "saturating")
    for able in (CPU, msgspec.structs.replace(CPU, arithmetic="exact")):
        assert misfit(int8, able, 1.0) == ""
        assert fits(int8, 2, 1000.0, 1.0, able.arithmetic)
    assert misfit(varied(), plain, 1.0) == ""
