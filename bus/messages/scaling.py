"""How load becomes capacity: demand as dispatchers saw it, asks for more, orders of the one controller, machines.

Times are Unix seconds. `epoch` is the controller's: it grows with every change of leader, and what carries a smaller one than
was heard before is refused, so that a leader that has lost its lease cannot act.
"""

from msgspec import Struct


class ClassDemand(Struct, frozen=True, array_like=True, gc=False):
    """Items of one app's queries with the same needs that went to one worker; worker "" = nobody could take them, "*" = to any.

    latency_ms, cost (US$ per 1,000): None = no limit. accuracy: 0 = any. items: in the report's period; others: those that went
    to other workers in it, refused: those that nobody could take.
    """

    app: str
    worker: str
    items: int
    latency_ms: float | None = None
    accuracy: float = 0.0
    cost: float | None = None
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    others: int = 0
    refused: int = 0


class DemandReport(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.demand.<dispatcher>`, every 0.5 s: what came in since the last one, by class. seconds: how long ago that was.

    To each worker that it concerns `infaas.worker.<worker>.demand`: the classes of the apps that it takes queries of, or is the
    first that could, a row for each with its own items beside everybody's; docs/adr/0004-digests.md.
    """

    dispatcher: str
    at: float
    seconds: float
    rows: list[ClassDemand]


class AskForCapacity(Struct, frozen=True, kw_only=True):
    """`infaas.controller.ask`: a worker -> the controller: this does not fit here, or must go elsewhere.

    why: "full" (no room on this worker), "interfered" (an instance here is slowed down and this worker has no free cores or
    other device), "hardware" (a variant of a kind that only other workers have is the better choice), "accuracy" (this worker
    carries it, though less accurately than others might that have room; no machine is worth adding). variants: those that
    would do, best first; load: items/s they must carry together; instances: of the first one, were it chosen alone.
    """

    worker: str
    at: float
    app: str
    why: str
    variants: list[str]
    load: float
    instances: int = 1
    latency_ms: float | None = None
    accuracy: float = 0.0
    reason: str = ""


class Drain(Struct, frozen=True, kw_only=True):
    """`infaas.worker.<worker>.drain`: take nothing new and finish what is queued; resume: the order is taken back."""

    epoch: int
    reason: str = ""
    resume: bool = False
    orderer: str = ""


class StartMachine(Struct, frozen=True, kw_only=True):
    """`infaas.machines.start` (answered by who can start workers here): one more worker of this kind, under this name.

    Idempotent by name. boot_s: wait so long before it starts (simulated machines). order: of this machine's life, "EPOCH-NUMBER",
    where a name may have several; bought: there is no machine with this name yet, one is to be made. The reply is MachineReply.
    """

    worker: str
    kind: str
    epoch: int
    boot_s: float = 0.0
    simulated: bool = False
    order: str = ""
    bought: bool = False


class StopMachine(Struct, frozen=True, kw_only=True):
    """`infaas.machines.stop`: end this worker (it has been drained). Idempotent. The reply is MachineReply.

    kind, order, bought: as it was started with; empty where it was not started by order.
    """

    worker: str
    epoch: int
    kind: str = ""
    order: str = ""
    bought: bool = False


class MachineReply(Struct, frozen=True, kw_only=True):
    """error: empty when it was done or is under way."""

    worker: str
    error: str = ""


class LeaderRecord(Struct, frozen=True, kw_only=True):
    """Key `controller` of the control bucket: who leads, since which epoch, until when (Unix s) unless renewed."""

    holder: str
    epoch: int
    until: float


class MachineRecord(Struct, frozen=True, kw_only=True):
    """Key `machine.<worker>` of the control bucket, written by the leader before it acts: what its successor goes on with.

    state: "Booting" (ordered), "Ready", "Draining" (an order to stop follows when it has nothing left to do), "Stopping" (given up:
    the order to stop is repeated until it is carried out). at: since when. place: variants, and for which app, that this machine
    was added for. order, bought: as in StartMachine.
    """

    worker: str
    kind: str
    epoch: int
    state: str
    at: float
    reason: str = ""
    place: list[tuple[str, str]] = []
    order: str = ""
    bought: bool = False
