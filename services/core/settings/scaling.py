"""Sections about how many instances and machines there are, and what they cost."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from msgspec import field

from bus.fields import PART, TARGET, TOKEN, Fault, Named, Number, Text
from services.core.settings.fields import (
    AMOUNT,
    CORES,
    MEMORY,
    SECONDS,
    WAIT,
    Accelerators,
    Section,
    Simulated,
    Texts,
    listed,
    words,
)

SCALERS = ("infaas", "replicate", "static", "off")
FORECASTERS = ("combined", "last", "mean", "seasonal-naive", "trend")  # of services.core.forecast.forecasters
ELSEWHERE = ("swarm", "command")  # providers whose machines are others than this one
_COMMAND = Text(r"(?s)[^\0]*", "words of a command")


class StaticVariant(Section, frozen=True, kw_only=True):
    """What a static system serves an app with."""

    variant: Annotated[str, TOKEN, "Variant that the policies static and replicate serve this app with."]
    instances: Annotated[int, Number(1, 1e6), "Instances of it in the whole cluster."] = 1


class AutoscalerSettings(Section, frozen=True, kw_only=True):
    """The plan for all workers, and the model-autoscaler of every worker (docs/scaling.md)."""

    policy: Annotated[
        str,
        Text("|".join([*SCALERS, r"[\w.]+:\w+"]), f"{', '.join(SCALERS)} or module:Class"),
        "Who decides: the plan; one variant an app, more or fewer of it; `choice`, never changed; nobody; or a class of "
        "yours (docs/scaling.md).",
    ] = "infaas"
    slo_target: Annotated[
        float, TARGET, "Share of an app's queries to be answered in time, for apps without a target of their own."
    ] = 0.99
    accuracy_mean: Annotated[
        float,
        Number(most=1, zero="none"),
        "Accuracy that the answers of each app without an own one have in the mean, at least cost.",
    ] = 0.0
    worth: Annotated[
        float,
        Number(most=1e9),
        "US$ per 1,000 answers that a point (0.01) of accuracy more is worth, for apps without an own one.",
    ] = 0.0
    period_s: Annotated[
        float, Number(above=0, most=3600), "Seconds between two looks of a worker at its load, between two plans."
    ] = 1.0
    slack: Annotated[float, Number(above=0, most=1000), "Throughput that is wanted, as a multiple of the load."] = 1.05
    forecaster: Annotated[
        str,
        Text("|".join([*FORECASTERS, r"[\w.]+:\w+"]), f"{', '.join(FORECASTERS)} or module:Class"),
        "Forecaster of the demand at the moment for which is planned (docs/scaling.md).",
    ] = "combined"
    loading_weight: Annotated[
        float, Number(most=1e6), "Weight of loading latency in a worker's reaction, 1/s (the paper's lambda)."
    ] = 0.1
    hold_s: Annotated[float, WAIT, "Seconds for which a reason to remove something must last."] = 5.0
    budget_per_hour: Annotated[
        float, Number(most=1e9, zero="no limit"), "US$ per hour that all workers together may cost."
    ] = 0.0
    bill: Annotated[
        Literal["machines", "instances"],
        "What is paid: machines while they run, so that an idle instance costs nothing; or instances while they are loaded.",
    ] = "machines"
    choice: dict[str, StaticVariant] = {}


class MachineKind(Section, frozen=True, kw_only=True):
    """A kind of worker that may be started."""

    minimum: Annotated[int, Number(most=10_000), "Workers of this kind that always run."] = 0
    maximum: Annotated[int, Number(most=10_000), "Workers of this kind that may run at a time."] = 0
    boot_s: Annotated[
        float,
        WAIT,
        "Seconds that the simulated provider takes to start one. With swarm and command: seconds, beside a minute, until one "
        "whose worker is silent counts as failed.",
    ] = 0.0
    cores: Annotated[int, CORES, "CPU cores for instances."] = 0
    memory_mb: Annotated[int, MEMORY, "MB of main memory for instances."] = 0
    simulate: Annotated[Simulated, "Devices to simulate: kind to count."] = {}
    accelerators: Annotated[
        Accelerators, "Accelerators of a machine, with the providers swarm and command: kind to count."
    ] = {}
    accelerator_mb: Annotated[
        int,
        Number(most=1e8, zero="by kind: 16 GB of a GPU, 8 GB of an Inferentia chip"),
        "MB of memory of each accelerator.",
    ] = 0


class SwarmSettings(Section, frozen=True, kw_only=True):
    """Workers as nodes of a Docker Swarm (docs/scaling.md)."""

    hosts: Annotated[
        Texts,
        Text(
            r"[\s,]*((unix|tcp|https?)://[^\s,]+[\s,]*)*",
            "addresses as tcp://engine-proxy:2375 or unix:///var/run/docker.sock",
        ),
        "Docker APIs of managers, best behind `infaas run engine-proxy`. When one fails the next is asked.",
    ] = ()
    token: Annotated[str, "Token of the engine proxy: its engine.token."] = ""
    timeout_s: Annotated[float, Number(0.1, 60), "Seconds for one answer of the Docker API."] = 3.0
    dry_run: Annotated[bool, "Log what would be done, and do nothing."] = False
    add: Annotated[
        Texts, _COMMAND, "Command that makes a machine, as words; kind and name follow. In a variable: as in a shell."
    ] = ()
    remove: Annotated[Texts, _COMMAND, "Command that removes a machine, in the same way."] = ()
    command_s: Annotated[float, SECONDS, "Seconds that a command may take."] = 300.0


class CommandSettings(Section, frozen=True, kw_only=True):
    """Workers that the operator's commands start and stop (docs/scaling.md)."""

    add: Annotated[
        Texts, _COMMAND, "Command that starts a worker, as words; kind and name follow. In a variable: as in a shell."
    ] = ()
    remove: Annotated[Texts, _COMMAND, "Command that stops a worker, in the same way."] = ()
    command_s: Annotated[float, SECONDS, "Seconds that a command may take."] = 300.0
    dry_run: Annotated[bool, "Log what would be done, and do nothing."] = False


class MachineSettings(Section, frozen=True, kw_only=True):
    """The VM-autoscaler (docs/scaling.md): which kinds of machine there may be, and who starts and stops them."""

    provider: Annotated[Literal["local", "simulated", "swarm", "command", "off"], "What starts and stops workers."] = (
        "local"
    )
    period_s: Annotated[float, Number(above=0, most=3600), "Seconds between two decisions."] = 2.0
    utilisation_above: Annotated[
        float, PART, "Utilisation of a kind of device, on every worker that has one, above which a worker is added."
    ] = 0.8
    overloaded_share: Annotated[
        float, PART, "Share of the workers with Overloaded instances above which a worker is added."
    ] = 0.8
    idle_s: Annotated[float, WAIT, "A worker that serves nothing for so many seconds may be removed."] = 30.0
    lease_s: Annotated[float, Number(0.2, 3600), "A leader that is silent for so many seconds is replaced."] = 3.0
    kinds: dict[Named, MachineKind] = {}
    swarm: SwarmSettings = field(default_factory=SwarmSettings)
    command: CommandSettings = field(default_factory=CommandSettings)

    def boots(self, simulate: Mapping[str, int]) -> dict[tuple[str, bool], float]:
        """By kind of device, real or simulated: seconds in which the machine that may be started soonest has one. simulate: as every worker does."""
        found: dict[tuple[str, bool], float] = {}
        for kind in self.kinds.values():
            if self.provider == "off" or not kind.maximum:
                continue
            seconds = kind.boot_s if self.provider != "local" else 0.0
            devices = dict.fromkeys(["cpu", *kind.accelerators], False) | dict.fromkeys(kind.simulate or simulate, True)
            found |= {one: min(seconds, found.get(one, seconds)) for one in devices.items()}
        return found

    def conflicts(self) -> Iterator[Fault]:
        for name, kind in self.kinds.items():
            yield from self._of_kind(f"machines.kinds.{name}", kind)
        yield from _of_commands("machines.swarm", self.swarm)
        yield from _of_commands("machines.command", self.command)
        if self.provider == "swarm" and not listed(self.swarm.hosts):
            yield Fault(
                "machines.swarm.hosts",
                "must name the Docker API of at least one manager, as tcp://engine-proxy:2375, for machines.provider swarm",
            )
        if self.provider == "command" and not (self.command.add or self.command.remove):
            yield Fault(
                "machines.command.add", "must be the command that starts a machine, for machines.provider command"
            )

    def _of_kind(self, where: str, kind: MachineKind) -> Iterator[Fault]:
        if kind.minimum > kind.maximum:
            yield Fault(f"{where}.minimum", f"must be at most {where}.maximum ({kind.maximum}), not {kind.minimum}")
        if self.provider in ELSEWHERE:
            for key in ("cores", "memory_mb"):
                if getattr(kind, key) == 0:
                    yield Fault(
                        f"{where}.{key}",
                        f"must be said with machines.provider {self.provider}: prices and room go by it, and its machines are "
                        "others than this one",
                    )
        elif kind.accelerators:
            yield Fault(
                f"{where}.accelerators",
                f"is for machines of the providers {' and '.join(ELSEWHERE)}; local ones have what their drivers show, and "
                "what `simulate` says",
            )


def _of_commands(section: str, settings: SwarmSettings | CommandSettings) -> Iterator[Fault]:
    for key, other in (("add", "remove"), ("remove", "add")):
        try:
            ours = words(getattr(settings, key))
        except ValueError as error:
            yield Fault(f"{section}.{key}", f"cannot be split into words as a shell would: {str(error).lower()}")
            continue
        if not ours and getattr(settings, other):
            why = "what is bought must be given back" if key == "remove" else "there would be nothing to remove"
            yield Fault(f"{section}.{key}", f"must be a command, too, where {section}.{other} is one: {why}")


class PriceSettings(Section, frozen=True, kw_only=True):
    """Prices of devices."""

    per_hour: Annotated[
        dict[Named, Annotated[float, AMOUNT]],
        "US$ per hour by kind of device, over services/core/prices.toml. A CPU's price is for one core.",
    ] = {}
