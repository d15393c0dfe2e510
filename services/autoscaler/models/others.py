"""The other workers, as a dispatcher's digest of the fleet has them: who comes first of those that have, or could have, something. Pure."""

from collections.abc import Iterable

from bus.messages.catalog import VariantRecord
from bus.messages.digest import FleetDigest, PoolDigest, VariantDigest
from bus.messages.fleet import WorkerHeartbeat
from services.core.lifecycle import COUNTED


class Others:
    """digest: None while none has come, or the last one is too old: then nothing is known of others."""

    def __init__(self, worker: str, digest: FleetDigest | None) -> None:
        self._worker = worker
        self._holders: dict[str, str] = {}
        self._able: dict[tuple[str, bool], str] = {}
        self.pools: list[PoolDigest] = digest.pools if digest is not None else []
        self.variants: list[VariantDigest] = digest.variants if digest is not None else []
        self.alone = digest is None or digest.workers < 2
        for row in self.variants:
            name = self._first(row.holders)
            if name is not None:
                known = self._holders.get(row.variant)
                self._holders[row.variant] = name if known is None or name < known else known
        for pool in self.pools:
            name = self._first(pool.first)
            if name is not None:
                self._able[pool.kind, pool.simulated] = name

    def _first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name != self._worker), None)

    def holder(self, records: Iterable[VariantRecord]) -> str | None:
        """The first of the others that has one of these variants, or is loading it."""
        found = None
        for record in records:
            name = self._holders.get(record.variant)
            if name is not None and (found is None or name < found):
                found = name
        return found

    def able(self, kinds: Iterable[tuple[str, bool]]) -> str | None:
        """The first of the others that has a device of one of these kinds."""
        return min((self._able[kind] for kind in kinds if kind in self._able), default=None)

    def instances(self, records: Iterable[VariantRecord], mine: WorkerHeartbeat) -> int:
        """How many instances of these variants the others have or are loading."""
        names = {record.variant for record in records}
        own = sum(one.variant in names and one.state in COUNTED for one in mine.instances)
        return max(0, sum(row.instances for row in self.variants if row.variant in names) - own)
