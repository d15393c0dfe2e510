"""The systems that the proofs ask: one worker with a real CPU and simulated accelerators, and the network registered there."""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import infaas
from infaas.demo.program import DemoSystem
from proof import network
from proof.choices import Chosen

APP, MODEL = "digits", "views"
SETTINGS = """
[worker]
simulate = {{ gpu = {gpu}, inferentia = {inferentia} }}
[registrar]
threads = [1]
max_batches = [8]
[monitor]
cost_s = 1.0  # a cost rate that follows the load
[prices.per_hour]
{prices}
[autoscaler]
policy = "{policy}"
"""


def settings(
    policy: str, devices: Mapping[str, int], choice: Chosen | None = None, prices: Mapping[str, float] | None = None
) -> str:
    """The settings file. devices: count of gpu and inferentia. prices: US$ per hour where not the defaults."""
    given = "\n".join(f"{kind} = {price}" for kind, price in (prices or {}).items())
    text = SETTINGS.format(policy=policy, prices=given, **devices)
    if choice is not None:
        text += f'choice.{APP} = {{ variant = "{choice.variant}", instances = {choice.instances} }}\n'
    return text


async def register(data_dir: Path, devices: Mapping[str, int], views: int = network.VIEWS) -> list[dict[str, Any]]:
    """Register the network, unless it is there, with a system that scales nothing; returns the variants with their profiles."""
    own = DemoSystem(data_dir, settings=settings("off", devices))
    with tempfile.TemporaryDirectory() as directory:
        try:
            await own.start()
            async with infaas.connect(data_dir=data_dir) as client:
                if not await client.models(model=MODEL):
                    model, validation = await asyncio.to_thread(network.make, Path(directory), views=views)
                    await client.register(model, app=APP, model=MODEL, validation=validation)
                return await client.variants(app=APP)
        finally:
            own.stop()
