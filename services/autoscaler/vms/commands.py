"""What the controller asks of its edge. Pure."""

from msgspec import Struct

from bus.messages.scaling import LeaderRecord, MachineRecord, StartMachine, StopMachine


class Claim(Struct, frozen=True, kw_only=True):
    """Write `record` as the leader's, if it `allows` what stands there; the answer is a `Claimed`. by: who asks."""

    record: LeaderRecord
    expected: LeaderRecord | None
    by: str

    def allows(self, present: LeaderRecord | None) -> bool:
        """Whether this may be replaced: it is what was expected, or a renewal of our own that nobody has answered yet."""
        expected = self.expected
        if present is None or expected is None or expected.holder != self.by:
            return present == expected
        return (present.holder, present.epoch) == (expected.holder, expected.epoch)


class Claimed(Struct, frozen=True, kw_only=True):
    """present: what stands there now, when the claim came too late."""

    ok: bool
    present: LeaderRecord | None = None


class Save(Struct, frozen=True, kw_only=True):
    """Note this down for whoever leads next."""

    record: MachineRecord


class Drop(Struct, frozen=True, kw_only=True):
    """This machine is no more."""

    worker: str


class Start(Struct, frozen=True, kw_only=True):
    """Have a machine started."""

    order: StartMachine


class Stop(Struct, frozen=True, kw_only=True):
    """Have a machine stopped."""

    order: StopMachine


class Survey(Struct, frozen=True, kw_only=True):
    """Look which machines there are; the answer is an `Inventory`."""


class Node(Struct, frozen=True, kw_only=True):
    """A machine that the provider has. name: its worker's, if it carries one; kind: of worker that it may carry, "" = none.

    worker: the kind that it is told to carry, order: whose order that was ("EPOCH-NUMBER", "" = the operator's). availability: as the
    operator has set it, "active" or else. empty: no worker of earlier orders is left on it. bought: made by order, for this worker only.
    """

    name: str
    kind: str = ""
    worker: str = ""
    order: str = ""
    up: bool = True
    availability: str = "active"
    empty: bool = True
    bought: bool = False

    @property
    def open(self) -> bool:
        """Whether it may carry a worker, as far as the machine itself is concerned."""
        return self.up and self.availability == "active"


class Inventory(Struct, frozen=True, kw_only=True):
    """buys: when no machine is free, one may be made. error: why nothing can be told now; `nodes` says nothing then."""

    nodes: tuple[Node, ...] = ()
    buys: bool = False
    error: str = ""
