"""`infaas sql`: one SQL query with the read-only role, or psql."""

import math
import os
import shutil
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from infaas.cli.options import DataDir, Json
from infaas.cli.output import fail, line_width, one_line, show, usage
from infaas.connecting import find_sql

_WIDEST = 64  # characters of a cell on a terminal, as many as a name may have; the last column and pipes get all


def sql(query: str | None = None, *, data_dir: DataDir = None, json: Json = False) -> None:
    """Run one SQL query with the read-only role and print its rows. Without a query, open psql.

    The schema is `infaas`; docs/sql.md describes its tables.

    Example: `infaas sql "SELECT app, outcome, count(*) FROM query_outcomes GROUP BY 1, 2"`

    Parameters
    ----------
    query
        The SQL query.
    data_dir
        Data directory of the system to use. Default: INFAAS_DATA_DIR, INFAAS_SQL_DSN, ./.infaas, then the default port.
    json
        Print {"columns": [...], "rows": [...]}.

    """
    dsn = find_sql(data_dir)
    if query is None:
        if json:
            usage('--json needs a query: infaas sql --json "SELECT ..."')
        _psql(dsn)
    assert query is not None
    columns, rows = _ask(dsn, query)
    show({"columns": columns, "rows": rows}, json, _render)


_READS = "; `infaas sql` only reads"
_REMEDIES = {  # by SQLSTATE
    "42P01": "; `infaas sql \"SELECT table_name FROM information_schema.tables WHERE table_schema = 'infaas'\"` lists what there is",
    "42601": "; docs/sql.md has examples",
    "42501": _READS,
    "25006": _READS,
    "55000": _READS,
}


def _ask(dsn: str, query: str) -> tuple[list[str], list[list[Any]]]:
    import psycopg  # noqa: PLC0415  (the command line starts without it)

    try:
        connection = psycopg.connect(dsn, connect_timeout=10, application_name="infaas sql")
    except psycopg.OperationalError as error:
        fail(f"cannot reach the database: {one_line(error)}; is the system running? (infaas doctor)")
    except psycopg.Error as error:
        fail(f"INFAAS_SQL_DSN is not a database's address: {one_line(error)}")
    with connection:
        # INFAAS_SQL_DSN may name a role with more rights. This command never writes.
        connection.read_only = True
        try:
            cursor = connection.execute(query.encode())
            while cursor.nextset():
                pass
        except psycopg.Error as error:
            diagnosis = error.diag
            hint = f" ({one_line(diagnosis.message_hint)})" if diagnosis.message_hint else ""
            hint = _REMEDIES.get((error.sqlstate or "")[:5], hint)
            fail(f"{one_line(diagnosis.message_primary or error)}{hint}")
        if cursor.description is None:
            return [], []
        return [column.name for column in cursor.description], [[_plain(cell) for cell in row] for row in cursor]


def _plain(cell: Any) -> Any:
    """A cell as a JSON value: times in ISO 8601, NaN and infinities as null, all other types as text."""
    if isinstance(cell, Decimal):
        cell = None if not cell.is_finite() else int(cell) if cell == cell.to_integral_value() else float(cell)
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else None
    if cell is None or isinstance(cell, (bool, int, str)):
        return cell
    if isinstance(cell, (datetime, date)):
        return cell.isoformat()
    if isinstance(cell, (list, tuple)):
        return [_plain(item) for item in cell]
    if isinstance(cell, dict):
        return {str(key): _plain(value) for key, value in cell.items()}
    return cell.hex() if isinstance(cell, bytes) else str(cell)


def _render(document: dict[str, Any]) -> None:
    columns, rows = document["columns"], document["rows"]
    if not columns:
        print("(this statement returns no rows)")
        return
    right = [
        all(isinstance(row[i], (int, float, type(None))) for row in rows) and bool(rows) for i in range(len(columns))
    ]
    lines = [columns, *([*(_cell(cell) for cell in row[:-1]), _text(row[-1])] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for number, line in enumerate(lines):
        cells = zip(line, widths, right, strict=True)
        print("  ".join(text.rjust(width) if flag else text.ljust(width) for text, width, flag in cells).rstrip())
        if number == 0:
            print("  ".join("-" * min(width, _WIDEST) for width in widths))
    print(f"({len(rows)} row{'' if len(rows) == 1 else 's'})")


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    text = f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _cell(cell: Any) -> str:
    text = _text(cell)
    return text if len(text) <= _WIDEST or line_width() == sys.maxsize else text[: _WIDEST - 1] + "…"


def _psql(dsn: str) -> None:
    """Replace this process by psql. The password is passed in the environment, where other users do not see it."""
    from psycopg import ProgrammingError  # noqa: PLC0415
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

    program = shutil.which("psql") or _psql_of_the_wheel()
    if program is None:
        fail(
            'psql is not installed: install PostgreSQL\'s client, or give a query: infaas sql "SELECT * FROM variants"'
        )
    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError as error:
        fail(f"INFAAS_SQL_DSN is not a database's address: {one_line(error)}")
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}
    names |= {"sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT"}
    environ = {names[key]: str(value) for key, value in parts.items() if key in names and value is not None}
    sys.stdout.flush()
    os.execve(program, [program], {**os.environ, **environ})  # noqa: S606  (a fixed program needs no shell)


def _psql_of_the_wheel() -> str | None:
    from services.shell.host.postgres import find_postgres  # noqa: PLC0415
    from services.shell.host.process import ServerError  # noqa: PLC0415

    try:
        program: Path = find_postgres() / "psql"
    except ServerError:
        return None
    return str(program) if os.access(program, os.X_OK) else None
