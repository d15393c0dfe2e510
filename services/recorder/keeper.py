"""Keeping the database: rollups brought up to date, rows that are old enough let go (schema/rollups.sql says how)."""

from services.shell.store import Store

_REFRESH = (b"SELECT infaas_internal.refresh_cost_events()", b"SELECT infaas_internal.refresh_query_outcomes()")


class Keeper:
    """Carries out the database's own maintenance, piece by piece. Not for several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def maintain(self) -> bool:
        """A bounded piece of each kind of work; True when there is more. Raises psycopg.Error.

        Each in a transaction of its own: none holds two watermarks, so that nobody waits for another in a circle.
        """
        more = False
        for refresh in _REFRESH:
            with self._store.transaction() as connection:
                row = connection.execute(refresh).fetchone()
                more |= bool(row and row[0])
        with self._store.transaction() as connection:
            kept = connection.execute(
                "SELECT relation FROM infaas_internal.retention WHERE keep IS NOT NULL ORDER BY 1"
            ).fetchall()
        for (relation,) in kept:
            more |= self.expire(relation)
        return more

    def expire(self, relation: str) -> bool:
        """Let some of the oldest rows of a relation go, as far as they are in the rollups; True when there are more."""
        with self._store.transaction() as connection:
            row = connection.execute("SELECT infaas_internal.expire(%s)", (relation,)).fetchone()
        return bool(row and row[0])
