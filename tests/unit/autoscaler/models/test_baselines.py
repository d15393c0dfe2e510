"""What static systems deal out, and to whom."""

from bus.codec import encode
from services.autoscaler.models.baselines import Choices, FixedVariant
from services.core.catalog import Catalog, key_of
from tests.support.simulated.fleet import variant


def test_what_settings_chose_for_several_apps_is_dealt_out_app_after_app_by_kind_of_device() -> None:
    catalog = Catalog()
    for name, hardware in (("x-cpu", "cpu"), ("y-cpu", "cpu"), ("z-gpu", "gpu")):
        record = variant(name, hardware=hardware)
        catalog.apply(key_of(record), encode(record))
    given = {
        "d": FixedVariant("y-cpu"),
        "a": FixedVariant("x-cpu", 2),
        "b": FixedVariant("z-gpu"),
        "c": FixedVariant("y-cpu", 3),
        "e": FixedVariant("unknown"),
    }
    assert Choices(given).turns(catalog) == {"a": 0, "b": 0, "c": 2, "d": 5}
