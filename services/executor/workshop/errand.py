"""What the executor's process hands to the helper it starts: one order, on standard input."""

from msgspec import Struct

from bus.messages.work import BuildVariants, InspectModel


class Errand(Struct, frozen=True, kw_only=True):
    """One order for one worker. Exactly one of inspect and build is set.

    devices: where variants of a kind other than the CPU are measured, by kind ("gpu": "cuda:0").
    """

    worker: str
    devices: dict[str, str] = {}
    inspect: InspectModel | None = None
    build: BuildVariants | None = None

    @property
    def registration(self) -> str:
        order = self.inspect or self.build
        return order.registration if order is not None else ""

    @property
    def kind(self) -> str:
        return "inspect" if self.inspect is not None else "build"
