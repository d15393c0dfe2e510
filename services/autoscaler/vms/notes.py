"""Keys of the control bucket and what stands under them. Pure."""

import msgspec

from bus.messages.scaling import LeaderRecord, MachineRecord

LEADER = "controller"
_MACHINE = "machine."
_leader = msgspec.msgpack.Decoder(LeaderRecord)
_machine = msgspec.msgpack.Decoder(MachineRecord)


def key_of(worker: str) -> str:
    return _MACHINE + worker


def worker_of(key: str) -> str | None:
    """Whose machine's key this is; None for other keys."""
    return key.removeprefix(_MACHINE) if key.startswith(_MACHINE) else None


def leader(value: bytes | None) -> LeaderRecord | None:
    """The record; None when there is none that can be read."""
    try:
        return _leader.decode(value) if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def machine(value: bytes | None) -> MachineRecord | None:
    try:
        return _machine.decode(value) if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
