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
