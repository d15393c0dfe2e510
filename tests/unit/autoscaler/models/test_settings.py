"""What settings of the model-autoscaler do."""

import pytest

from bus.subjects import Subjects
from services.autoscaler.models.actor import ModelAutoscaler
from services.core.actor import After, Envelope, Started, Tick
from services.core.settings import AutoscalerSettings
from tests.support.simulated.autoscaled_fleet import CPU, GPU, ScalingFleet
from tests.support.simulated.fleet import PRICES, variant


@pytest.mark.parametrize("period_s", [0.5, 3.0])
def test_it_looks_again_after_each_period(period_s: float) -> None:
    actor = ModelAutoscaler("w0", Subjects(), PRICES, AutoscalerSettings(period_s=period_s))
    for message in (Started(), Tick("check")):
        [again] = [one for one in actor.handle(Envelope(0.0, message)) if isinstance(one, After)]
        assert again.delay == period_s


@pytest.mark.parametrize(("loading_weight", "taken"), [(0.0, "cheap"), (1000.0, "dear")])
def test_loading_latency_counts_in_a_reaction_as_the_settings_say(loading_weight: float, taken: str) -> None:
    """One CPU is full; the GPU holds a cheap variant that loads in ten seconds and a dear one that is there at once."""
    small = variant("m-v1-ort-fp32-t1-b8", base_ms=10.0, per_item_ms=10.0)
    made = {
        name: variant(
            f"m-v1-trt-{name}-t1-b8", hardware="gpu", base_ms=2.0, per_item_ms=1.0, load_ms=load_ms, price_per_s=price
        )
        for name, load_ms, price in (("cheap", 10_000.0, 1e-4), ("dear", 10.0, 2e-4))
    }
    fleet = ScalingFleet(small, *made.values(), devices={"w0": (CPU, GPU)}, tuned={"loading_weight": loading_weight})
    fleet.load(20, 6, latency_ms=200, variant=small.variant)
    fleet.load(300, 3, latency_ms=200)
    ordered = [name for _, name, _ in fleet.scalings() if name != small.variant]
    assert ordered == [made[taken].variant]
