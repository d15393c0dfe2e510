"""What the controller asks of its edge. Pure."""

from msgspec import Struct

from bus.messages.scaling import LeaderRecord, MachineRecord, StartMachine, StopMachine


class Claim(Struct, frozen=True, kw_only=True):
    """Write `record` as the leader's, if it is `expected` that stands there (None: nothing); the answer is a `Claimed`."""

    record: LeaderRecord
    expected: LeaderRecord | None


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
