"""Whether the database answers now, asked on a connection of its own."""

import asyncio
from typing import Any

import psycopg

from services.shell.store import one_line

CONNECT = 2  # s; the least that libpq takes
PATIENCE = 0.9  # s; less than a page of readiness waits for anybody


class Reach:
    """Asks by `SELECT 1`; while one question waits for its answer, further ones wait for the same."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None
        self._asking: asyncio.Task[str] | None = None

    async def look(self) -> str:
        """What is missing, in words; "" when the database answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask))
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), PATIENCE)
        except TimeoutError:
            return f"the database (no answer within {PATIENCE:g} s)"

    def _ask(self) -> str:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self._dsn, autocommit=True, connect_timeout=CONNECT, application_name="infaas readyz"
                )
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            return f"the database ({one_line(error)})"
        return ""
