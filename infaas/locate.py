"""Where a running system is: what `infaas up` wrote, the environment, or the default ports."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infaas.errors import NotConnected

ENDPOINTS = "endpoints.json"  # written below its data directory by `infaas up`
DEFAULT_DATA_DIR = ".infaas"
DEFAULT_NATS = "nats://127.0.0.1:4222"
DEFAULT_SQL = "postgresql://infaas_reader@127.0.0.1:5433/infaas"


@dataclass(frozen=True)
class Endpoints:
    """URLs with credentials. sql: the read-only role; writer: the recorder's, metrics: the page; "" when unknown.

    data_dir: where they were read, None when from elsewhere.
    """

    nats: str
    sql: str
    prefix: str = "infaas"
    data_dir: Path | None = None
    writer: str = ""
    metrics: str = ""


def locate(data_dir: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Endpoints:
    """Find the system (contract, section 1); raises NotConnected when a data directory is named and nothing runs there.

    data_dir or INFAAS_DATA_DIR, else INFAAS_NATS_URL and INFAAS_SQL_DSN, else ./.infaas, else the default ports.
    """
    environ = os.environ if environ is None else environ
    named = data_dir or environ.get("INFAAS_DATA_DIR")
    if named:
        return read_endpoints(Path(named))
    nats, sql = environ.get("INFAAS_NATS_URL"), environ.get("INFAAS_SQL_DSN")
    prefix = environ.get("INFAAS_PREFIX") or "infaas"
    if nats or sql:
        # One of the two alone: the other is not looked for in a directory that may belong to another system.
        return Endpoints(nats or DEFAULT_NATS, sql or DEFAULT_SQL, prefix)
    try:
        return read_endpoints(Path(DEFAULT_DATA_DIR))
    except NotConnected:
        return Endpoints(DEFAULT_NATS, DEFAULT_SQL, prefix)


def find_sql(data_dir: str | Path | None = None) -> str:
    """The read-only SQL DSN, see `locate`."""
    return locate(data_dir).sql


def read_endpoints(data_dir: Path) -> Endpoints:
    """What `infaas up` wrote below `data_dir`; raises NotConnected when nothing was started there, or it was stopped."""
    path = data_dir / ENDPOINTS
    start = f"start one with `infaas up --data-dir {data_dir}`"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise NotConnected(f"no system runs in {data_dir}: {start}") from None
    except OSError as error:
        raise NotConnected(f"cannot read {path}: {error.strerror}; is it another user's system?") from error
    except ValueError as error:
        raise NotConnected(f"{path} is damaged ({error}); {start}") from error
    if not isinstance(found, dict) or not isinstance(found.get("nats"), str) or not isinstance(found.get("sql"), str):
        raise NotConnected(f"{path} is damaged (no nats and sql in it); {start}")
    if not found.get("running"):
        raise NotConnected(f"the system in {data_dir} is stopped: {start}")
    prefix, writer = str(found.get("prefix", "infaas")), str(found.get("writer", ""))
    return Endpoints(found["nats"], found["sql"], prefix, data_dir, writer, str(found.get("metrics") or ""))
