"""Forecasters of users, by import path."""

import pytest

from services.autoscaler.vms.edge import load_forecaster
from services.core.forecast.conformal import Conformal
from services.core.forecast.forecasters import LastValue, make_forecaster
from services.core.settings import AutoscalerSettings
from services.shell.settings import SettingsError


class Mine(Conformal):
    def __init__(self) -> None:
        super().__init__("mine", LastValue(), 1.0)


class Half:
    def observe(self, at: float, rate: float) -> None: ...


def test_a_users_forecaster_is_made_by_its_import_path_and_the_default_without() -> None:
    name = f"{__name__}:Mine"
    load_forecaster(AutoscalerSettings(forecaster=name))
    assert isinstance(make_forecaster(name), Mine)
    assert make_forecaster(name) is not make_forecaster(name)
    load_forecaster(AutoscalerSettings())
    assert make_forecaster(AutoscalerSettings().forecaster).name == "combined"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no.such.module:Mine", "cannot be loaded: there is no module no;"),
        (f"{__name__}:Nobody", "cannot be loaded: .* has no Nobody; it has "),
        (f"{__name__}:Half", "lacks the methods seed, point, quantile, peak"),
    ],
)
def test_what_is_wrong_with_it_is_said(name: str, fault: str) -> None:
    with pytest.raises(SettingsError, match=f"autoscaler.forecaster .* {fault}"):
        load_forecaster(AutoscalerSettings(forecaster=name))
