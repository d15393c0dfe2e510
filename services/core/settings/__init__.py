"""All settings: one Struct a section, whose annotations hold each setting's bounds and meaning. Pure.

`services.shell.settings.load` reads them from a file and variables. An actor gets its section whole.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import field

from bus.fields import SOME_TEXT, TOKEN, Fault, Text
from services.core.settings.connections import (
    BusSettings,
    DashboardSettings,
    EngineSettings,
    GatewaySettings,
    KeepDays,
    MetricsSettings,
    StoreSettings,
    TelemetrySettings,
)
from services.core.settings.fields import Section, Setting, described, listed, words
from services.core.settings.scaling import (
    ELSEWHERE,
    SCALERS,
    AutoscalerSettings,
    CommandSettings,
    MachineKind,
    MachineSettings,
    PriceSettings,
    StaticVariant,
    SwarmSettings,
)
from services.core.settings.serving import (
    POLICIES,
    DispatcherSettings,
    EnsembleSettings,
    ExecutorSettings,
    JobsSettings,
    MonitorSettings,
    QualitySettings,
    RegistrarSettings,
    WorkerSettings,
)

__all__ = [
    "ELSEWHERE",
    "POLICIES",
    "SCALERS",
    "AutoscalerSettings",
    "BusSettings",
    "CommandSettings",
    "DashboardSettings",
    "DispatcherSettings",
    "EngineSettings",
    "EnsembleSettings",
    "ExecutorSettings",
    "GatewaySettings",
    "JobsSettings",
    "KeepDays",
    "MachineKind",
    "MachineSettings",
    "MetricsSettings",
    "MonitorSettings",
    "PriceSettings",
    "QualitySettings",
    "RegistrarSettings",
    "Section",
    "Setting",
    "Settings",
    "StaticVariant",
    "StoreSettings",
    "SwarmSettings",
    "TelemetrySettings",
    "WorkerSettings",
    "described",
    "listed",
    "words",
]


class Settings(Section, frozen=True, kw_only=True):
    """All settings of one process."""

    prefix: Annotated[
        str, TOKEN, "First token of all subjects and bucket names. Systems with different prefixes share a NATS unseen."
    ] = "infaas"
    goal: Annotated[
        Literal["cost", "accuracy"],
        "What queries are served with: the cheapest variant that meets their needs, or the most accurate that the machines can "
        "carry. Dispatchers and workers of one system must have the same.",
    ] = "cost"
    data_dir: Annotated[str, SOME_TEXT, "Directory of the system's state."] = ".infaas"
    log_level: Annotated[
        str,
        Text("(?i)debug|info|warning|error|critical", "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        "Least severity that is logged.",
    ] = "INFO"
    bus: BusSettings = field(default_factory=BusSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    dispatcher: DispatcherSettings = field(default_factory=DispatcherSettings)
    selection: EnsembleSettings = field(default_factory=EnsembleSettings)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    registrar: RegistrarSettings = field(default_factory=RegistrarSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    autoscaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    machines: MachineSettings = field(default_factory=MachineSettings)
    prices: PriceSettings = field(default_factory=PriceSettings)
    jobs: JobsSettings = field(default_factory=JobsSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def conflicts(self) -> Iterator[Fault]:
        for section in (self.executor, self.monitor, self.gateway, self.dashboard, self.registrar, self.machines):
            yield from section.conflicts()
        if self.dispatcher.failure_timeout_s <= self.monitor.heartbeat_s:
            yield Fault(
                "dispatcher.failure_timeout_s",
                f"must be above monitor.heartbeat_s ({self.monitor.heartbeat_s:g}), not {self.dispatcher.failure_timeout_s:g}: "
                "every worker would count as dead between two of its heartbeats",
            )
        if self.dispatcher.max_inline >= self.bus.max_payload:
            yield Fault(
                "dispatcher.max_inline",
                f"must be below bus.max_payload ({self.bus.max_payload}), not {self.dispatcher.max_inline}: "
                "such a body would fit in no message",
            )
        if self.jobs.chunk_kb * 1024 >= self.bus.max_payload:
            yield Fault(
                "jobs.chunk_kb",
                f"must be below bus.max_payload ({self.bus.max_payload} bytes), not {self.jobs.chunk_kb} KB: "
                "such a chunk would fit in no message",
            )
