"""What the machines could never hold is refused when it is asked for, with the figures."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import Ensemble
from bus.messages.public import Error
from bus.messages.verbs import AddApp, SetApp, SetReplicas, SetSelection
from services.core.catalog import Catalog, key_of
from services.core.settings import MachineKind, MonitorSettings
from services.registrar.checks import Ceiling
from tests.support.simulated.registrations import PROFILE, app_record, heartbeat, model_record, variant_record

SMALL = variant_record(
    profile=replace(PROFILE, memory_mb=100.0)
)  # ten on a device of 1000 MB, of which all may be taken
ROOM = Ceiling(monitor=MonitorSettings(memory_share=1.0), cache_mb=100.0)


def catalog(*records: Any) -> Catalog:
    found = Catalog()
    for record in (SMALL, model_record(), app_record(), *records):
        found.apply(key_of(record), encode(record))
    return found


def worker(memory_mb: float = 1000.0, **fields: Any) -> Any:
    beat = heartbeat(**fields)
    return replace(beat, devices=[replace(beat.devices[0], memory_mb=memory_mb)])


def count_of(count: int) -> list[Any]:
    each = SetReplicas(app="digits", model="mlp", count=count)
    everywhere, of_app = SetReplicas(model="mlp", count=count), SetReplicas(app="digits", count=count)
    return [each, everywhere, of_app, SetApp(app="digits", min_instances=count)]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("room", "workers", "most"),
    [
        (ROOM, 1, 10),
        (ROOM, 2, 20),
        (replace(ROOM, monitor=MonitorSettings(memory_share=0.5)), 1, 5),
        (replace(ROOM, monitor=MonitorSettings(memory_share=1.0, device_mb=300)), 1, 3),
        (replace(ROOM, monitor=MonitorSettings(memory_share=1.0, max_models=2)), 1, 2),
        (replace(ROOM, kinds={"big": MachineKind(maximum=2, memory_mb=2000)}), 1, 50),
        (replace(ROOM, kinds={"like": MachineKind(maximum=3)}), 1, 40),
        (replace(ROOM, kinds={"cpu": MachineKind(maximum=3)}), 1, 30),
    ],
)
def test_no_more_instances_than_fit(room: Ceiling, workers: int, most: int, at: int) -> None:
    alive = [worker(worker=f"w{n}") for n in range(workers)]
    assert room.refuse(count_of(most)[at], catalog(), alive) is None
    error = room.refuse(count_of(most + 1)[at], catalog(), alive)
    assert isinstance(error, Error)
    assert error.code == "unsatisfiable"
    field = "min_instances" if at == 3 else "count"
    assert error.message.startswith(
        f"{field}: at most {most} instances fit, not {most + 1}: each of {SMALL.variant} takes 100 MB"
    )


def test_what_nobody_knows_is_not_refused() -> None:
    many = SetApp(app="digits", min_instances=100_000)
    assert ROOM.refuse(many, catalog(), []) is None, "no worker is alive"
    assert ROOM.refuse(AddApp(app="new", min_instances=100_000), catalog(), [worker()]) is None, "no model yet"
    gone = catalog(replace(SMALL, hardware="container-x"))
    assert ROOM.refuse(many, gone, [worker()]) is None, "its container may come back"
    assert ROOM.refuse(SetApp(app="digits", latency_ms=3.0), catalog(), [worker()]) is None


def test_caches_of_all_apps_fit_into_the_setting() -> None:
    other = app_record("other", selection=Ensemble(cache_mb=40.0))

    def asked(cache_mb: float) -> Error | None:
        change = SetSelection(app="digits", cache_mb=cache_mb)
        return ROOM.refuse(change, catalog(other), [])

    assert asked(60.0) is None
    assert asked(61.0) is not None
    error = asked(1e12)
    assert isinstance(error, Error)
    assert "cache_mb: a dispatcher keeps at most 100 MB of answers (dispatcher.cache_mb)" in error.message
    assert "other apps have 40; give at most 60" in error.message
