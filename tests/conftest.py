"""Fixtures that every test may ask for."""

from tests.database import database_dsn, postgres, reader_dsn, superuser_dsn

__all__ = ["database_dsn", "postgres", "reader_dsn", "superuser_dsn"]
