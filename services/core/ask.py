"""What a query asks of selection, and what selection decides."""

from collections.abc import Sequence

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.public import Error

INFINITE = float("inf")


class Ask(Struct, frozen=True, gc=False):
    """A query's needs in SI units. deadline: Unix s, the earlier of latency and absolute deadline; cost: US$ per 1,000 items.

    length: of the axis that varies, for models that have one, rounded up to what was measured.
    """

    app: str
    items: int
    deadline: float
    latency_s: float = INFINITE
    accuracy: float = 0.0
    cost: float = INFINITE
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    length: int | None = None


class LoadOrder(Struct, frozen=True, gc=False):
    """Load this variant on this worker. seconds: predicted time until it can answer."""

    record: VariantRecord
    worker: str
    seconds: float


class Decision(Struct, frozen=True, gc=False):
    """What to do with one query; reason says why, for the record.

    assignments: instance ids, one a part (one, until ensembles). load: start this load in any case. wait: the query waits
    for that load. refusal: the query ends here. stranded: nobody is there to serve it now; ask again when somebody is.
    """

    assignments: Sequence[str] = ()
    load: LoadOrder | None = None
    wait: bool = False
    refusal: Error | None = None
    stranded: bool = False
    join: str | None = None
    reason: str = ""
