"""The controller's edge: records in the control bucket, and the provider of machines."""

import asyncio
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, TypeVar

from msgspec import Struct

from bus.codec import BadMessage, decode_kept, encode
from bus.messages.scaling import LeaderRecord, PipelineReplicas
from bus.port import Bus, KeyValue, NotFound, WrongRevision
from bus.subjects import Subjects
from services.autoscaler.vms.commands import (
    DRIFT,
    LEADER,
    ClaimLease,
    FetchDistribution,
    FleetSolved,
    LeaseClaimed,
    ListMachines,
    SaveDrift,
    SaveMachine,
    SaveReplicas,
    SolveFleet,
    Start,
    Stop,
    machine_key,
)
from services.autoscaler.vms.providers.base import Provider
from services.core.catalog import replicas_key
from services.core.drift import Distribution
from services.core.forecast.forecasters import OTHERS
from services.core.planning.fleet import solve_fleet
from services.core.settings import AutoscalerSettings
from services.shell.policies import own_object

SEARCH_S = (
    0.45  # s for each of the two plans; what HiGHS has found by then is within 1 % of the best (benches/planning.py)
)
T = TypeVar("T")


class ControllerEdge(Struct, eq=False):
    """provider: None if no machines are started or stopped."""

    bus: Bus
    subjects: Subjects
    provider: Provider | None
    _bucket: KeyValue | None = None

    async def perform(self, command: Any) -> Any:
        """Carry out one command. Raises what the bus raises, and ProviderError."""
        if self._bucket is None:
            self._bucket = await self.bus.key_value(self.subjects.control_bucket)
        match command:
            case ClaimLease():
                return await _claim(self._bucket, command)
            case SaveMachine(worker=worker, record=None):
                await self._bucket.delete(machine_key(worker))
            case SaveMachine(worker=worker, record=record):
                await self._bucket.put(machine_key(worker), encode(record))
            case SaveReplicas():
                await _replace(self._bucket, command)
            case SaveDrift(app=app, record=None):
                await self._bucket.delete(DRIFT + app)
            case SaveDrift(app=app, record=drifted):
                await self._bucket.put(DRIFT + app, encode(drifted))
            case FetchDistribution(key=key):
                artifacts = await self.bus.object_store(self.subjects.artifacts_bucket, create=False)
                try:
                    return Distribution.read(await artifacts.get(key))
                except BadMessage:
                    return None
            case Start() if self.provider is not None:
                await self.provider.start(command.order)
            case Stop() if self.provider is not None:
                await self.provider.stop(command.order)
            case SolveFleet():
                return await asyncio.to_thread(_solve, command)
            case ListMachines() if self.provider is not None:
                return await self.provider.inventory()
            case _:
                raise ValueError(f"the controller's edge cannot {type(command).__name__}")
        return None


def import_solver() -> None:
    """Import HiGHS where scipy has it, and no more of scipy: all of scipy.optimize takes ten times as much memory, for good."""
    name, found = "scipy.optimize._highspy._core", find_spec("scipy")
    folders = [f"{folder}/optimize/_highspy" for folder in (found and found.submodule_search_locations) or ()]
    spec = None if name in sys.modules else PathFinder.find_spec(name, folders)
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _solve(command: SolveFleet) -> FleetSolved:
    """Both plans, in a thread: HiGHS may take a second, and the lease must be renewed meanwhile. Raises Unsolved."""
    import_solver()
    started = time.perf_counter()
    growth = None if command.growth is None else solve_fleet(command.growth, time_limit_s=SEARCH_S)
    present = solve_fleet(command.present, time_limit_s=SEARCH_S)
    return FleetSolved(growth, present, (time.perf_counter() - started) * 1000.0)


def load_forecaster(settings: AutoscalerSettings) -> None:
    """Let `make_forecaster` know the user's class that `autoscaler.forecaster` names, if it does. Raises SettingsError."""
    name = settings.forecaster
    if ":" in name:

        def make() -> Any:
            return own_object("autoscaler.forecaster", name, ("observe", "seed", "point", "quantile", "peak"))

        make()
        OTHERS[name] = make


async def _claim(bucket: KeyValue, claim: ClaimLease) -> LeaseClaimed:
    present, revision = await _present(bucket, LEADER, LeaderRecord)
    if claim.allows(present):
        try:
            await _write(bucket, LEADER, claim.record, revision)
        except WrongRevision:
            present, _ = await _present(bucket, LEADER, LeaderRecord)
        else:
            return LeaseClaimed(ok=True)
    return LeaseClaimed(ok=False, present=present)


async def _replace(bucket: KeyValue, command: SaveReplicas) -> None:
    """Write or delete the record if the command allows it. Raises WrongRevision if another has written meanwhile."""
    key = replicas_key(command.pipeline)
    present, revision = await _present(bucket, key, PipelineReplicas)
    if not command.allows(present):
        return
    if command.record is None:
        await bucket.delete(key)
    else:
        await _write(bucket, key, command.record, revision)


async def _write(bucket: KeyValue, key: str, record: Struct, revision: int) -> None:
    """Write the record in place of that revision; 0: there is none. Raises WrongRevision."""
    if revision:
        await bucket.update(key, encode(record), revision)
    else:
        await bucket.create(key, encode(record))


async def _present(bucket: KeyValue, key: str, kind: type[T]) -> tuple[T | None, int]:
    """A record and its revision. One that cannot be read counts as none and may be replaced."""
    try:
        entry = await bucket.get(key)
    except NotFound:
        return None, 0
    return decode_kept(kind, entry.value), entry.revision
