"""What static systems deal out, and to whom."""

from bus.codec import encode
from services.autoscaler.models.baselines import Choices
from services.core.catalog import Catalog, key_of
from services.core.settings import StaticVariant
from tests.support.simulated.fleet import variant


def test_what_settings_chose_for_several_apps_is_dealt_out_app_after_app_by_kind_of_device() -> None:
    catalog = Catalog()
    for name, hardware in (("x-cpu", "cpu"), ("y-cpu", "cpu"), ("z-gpu", "gpu")):
        record = variant(name, hardware=hardware)
        catalog.apply(key_of(record), encode(record))
    given = {
        "d": StaticVariant(variant="y-cpu"),
        "a": StaticVariant(variant="x-cpu", instances=2),
        "b": StaticVariant(variant="z-gpu"),
        "c": StaticVariant(variant="y-cpu", instances=3),
        "e": StaticVariant(variant="unknown"),
    }
    assert Choices(given).offsets(catalog) == {"a": 0, "b": 0, "c": 2, "d": 5}
