"""What the machines could never hold: operators who ask for it hear so at once, with the figures. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.catalog import PipelinePlan, VariantRecord
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.public import Error
from bus.messages.verbs import AddApp, AdminVerb, DeployPipeline, SetApp, SetReplicas, SetSelection
from services.core.catalog import Catalog
from services.core.settings import DispatcherSettings, MachineKind, MonitorSettings
from services.registrar.pipelines import absent_hardware, plan_of


class Ceiling(Struct, frozen=True, kw_only=True):
    """kinds: of machines that may be started. monitor: how much of a device instances may take. cache_mb: of a dispatcher's answers."""

    kinds: Mapping[str, MachineKind] = {}
    monitor: MonitorSettings = MonitorSettings()
    cache_mb: float = DispatcherSettings().cache_mb

    def refuse(self, request: AdminVerb, catalog: Catalog, workers: Sequence[WorkerHeartbeat]) -> Error | None:
        """Why a request asks for more than there can be; None: it does not, or nobody knows it. workers: those that are alive."""
        match request:
            case DeployPipeline() if workers and isinstance(plan := plan_of(request.plan), PipelinePlan):
                brought = {one for kind in self.kinds.values() for one in ("cpu", *kind.simulate, *kind.accelerators)}
                present = {device.kind for worker in workers for device in worker.devices}
                return absent_hardware(plan, present | brought)
            case SetSelection():
                return self._cache(request.app, request.cache_mb, catalog)
            case AddApp(min_instances=int(least)) | SetApp(min_instances=int(least)):
                return self._instances("min_instances", least, catalog.variants_of(request.app), workers)
            case SetReplicas(app=str(app), model=None):
                return self._instances("count", request.count, catalog.variants_of(app), workers)
            case SetReplicas(model=str(model)):
                linking = catalog.apps_linking(model)
                apps = linking if request.app is None else linking & {request.app}
                versions = {record.links[model] for app in apps if (record := catalog.app(app)) is not None}
                variants = [one for version in versions for one in catalog.variants_at(model, version)]
                return self._instances("count", request.count, variants, workers)
        return None

    def _cache(self, app: str, cache_mb: float, catalog: Catalog) -> Error | None:
        others = sum(one.selection.cache_mb for one in catalog.apps if one.selection is not None and one.app != app)
        if cache_mb == 0 or cache_mb + others <= self.cache_mb:
            return None
        text = (
            f"cache_mb: a dispatcher keeps at most {self.cache_mb:g} MB of answers (dispatcher.cache_mb), of which other apps"
            f" have {others:g}; give at most {max(0.0, self.cache_mb - others):g}, or raise the setting"
        )
        return Error(code="bad_request", message=text)

    def _instances(
        self, field: str, count: int, variants: Iterable[VariantRecord], workers: Sequence[WorkerHeartbeat]
    ) -> Error | None:
        fits = [(self._most(record, workers), record.variant, record) for record in variants] if workers else []
        most, _, record = max(fits, key=lambda one: one[:2], default=(0, "", None))
        if record is None or most == 0 or count <= most:  # 0: its only machine may come back
            return None
        text = (
            f"{field}: at most {most:g} instances fit, not {count}: each of {record.variant} takes"
            f" {record.profile.memory_mb:g} MB, and instances may take {self.monitor.memory_share:.0%} of a device"
            " (monitor.memory_share); start further workers first, or give a smaller number"
        )
        return Error(code="unsatisfiable", message=text)

    def _most(self, record: VariantRecord, workers: Sequence[WorkerHeartbeat]) -> float:
        """Instances of one variant on all devices that there are, or may be, with nothing else on them."""

        def alike(worker: WorkerHeartbeat) -> list[DeviceStatus]:
            return [one for one in worker.devices if (one.kind, one.simulated) == (record.hardware, record.simulated)]

        count = sum(self._on(device.memory_mb, record) for worker in workers for device in alike(worker))
        largest = max((device.memory_mb for worker in workers for device in alike(worker)), default=float("inf"))
        for name, kind in self.kinds.items():
            present = sum((worker.kind or worker.hardware) == name for worker in workers)
            devices = (
                {"cpu": 1} if record.hardware == "cpu" else kind.simulate if record.simulated else kind.accelerators
            )
            memory = (kind.memory_mb if record.hardware == "cpu" else kind.accelerator_mb) or largest
            if kind.maximum > present:
                each = devices.get(record.hardware, 0) * (kind.maximum - present)
                count += each * self._on(memory, record) if each else 0
        return count

    def _on(self, memory_mb: float, record: VariantRecord) -> float:
        allowed = memory_mb * self.monitor.memory_share
        if self.monitor.device_mb:
            allowed = min(allowed, self.monitor.device_mb)
        fits = allowed // record.profile.memory_mb if record.profile.memory_mb > 0 else float("inf")
        return min(fits, self.monitor.max_models) if self.monitor.max_models else fits
