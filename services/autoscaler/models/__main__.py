"""Wires the model-autoscaler of one worker."""

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.models import actor
from services.autoscaler.models.actor import ModelAutoscaler, make_model_autoscaler
from services.core.settings import Settings
from services.shell.host.machine import worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """The model-autoscaler of one worker, which runs beside its monitor. Raises SettingsError, which names the setting."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    prices = load_prices(settings.prices)

    def make() -> ModelAutoscaler:
        return make_model_autoscaler(settings, subjects, worker, prices)

    return [Runtime(f"model-autoscaler-{worker}", make, bus, subjects, insight=actor)]
