"""Sections of the settings about machines: which kinds there may be, and who starts and stops them. Rules: machinechecks.py."""

from typing import Literal

from msgspec import field

from services.shell.sections import Section


class MachineKind(Section, frozen=True, kw_only=True):
    """A kind of worker that may be started. cores, memory_mb: 0 = what the machine has. simulate: devices to simulate.

    boot_s: how long a simulated provider takes to start one; with "swarm" and "command", how long one takes at most until its worker
    speaks, beside a minute. accelerators: those that machines of this kind have, where they are not this one, kind to count;
    accelerator_mb: memory of each, 0 = 16 GB of a GPU, 8 GB of an Inferentia chip.
    """

    minimum: int = 0
    maximum: int = 0
    boot_s: float = 0.0
    cores: int = 0
    memory_mb: int = 0
    simulate: dict[str, int] = {}
    accelerators: dict[str, int] = {}
    accelerator_mb: int = 0


class SwarmSettings(Section, frozen=True, kw_only=True):
    """Workers as nodes of a Docker Swarm (docs/scaling.md). hosts: Docker APIs of managers, best `infaas run engine-proxy`; when one
    fails the next is asked. token: as the proxy's engine.token. timeout_s: for one answer. dry_run: nothing is done, only told.

    add, remove: the operator's commands that make and remove a machine, as words; kind and name follow. command_s: for one to end.
    """

    hosts: tuple[str, ...] | str = ()
    token: str = ""
    timeout_s: float = 3.0
    dry_run: bool = False
    add: tuple[str, ...] | str = ()  # in a variable: as in a shell
    remove: tuple[str, ...] | str = ()
    command_s: float = 300.0


class CommandSettings(Section, frozen=True, kw_only=True):
    """Workers that the operator's commands start and stop (docs/scaling.md): as in SwarmSettings."""

    add: tuple[str, ...] | str = ()
    remove: tuple[str, ...] | str = ()
    command_s: float = 300.0
    dry_run: bool = False


class MachineSettings(Section, frozen=True, kw_only=True):
    """The VM-autoscaler (services/autoscaler/vms). provider: "local", "simulated", "swarm", "command" or "off".

    utilisation_above: of a kind of device, on every worker that has one. overloaded_share: of the workers. idle_s: a worker
    that serves nothing for so long may go. lease_s: a leader that is silent for so long is replaced. kinds: by name.
    """

    provider: Literal["local", "simulated", "swarm", "command", "off"] = "local"
    period_s: float = 2.0
    utilisation_above: float = 0.8
    overloaded_share: float = 0.8
    idle_s: float = 30.0
    lease_s: float = 3.0
    kinds: dict[str, MachineKind] = {}
    swarm: SwarmSettings = field(default_factory=SwarmSettings)
    command: CommandSettings = field(default_factory=CommandSettings)
