#!/usr/bin/env -S python -P
"""PostgreSQL in the place of the TimescaleDB image, with its variables and files: the wheel's programs. Runs inside of a container.

POSTGRES_USER, POSTGRES_DB, POSTGRES_PASSWORD or POSTGRES_PASSWORD_FILE, PGDATA; arguments as of `postgres`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from services.shell.host.postgres import find_postgres

PRELOADED = "shared_preload_libraries="  # what only the other image has


def main(arguments: list[str]) -> None:
    programs, data = find_postgres(), Path(os.environ.get("PGDATA", "/var/lib/postgresql/data"))
    user = os.environ.get("POSTGRES_USER", "postgres")
    if arguments[:1] != ["postgres"]:
        os.execvp(arguments[0], arguments)
    if not (data / "PG_VERSION").exists():
        file = os.environ.get("POSTGRES_PASSWORD_FILE", "")
        password = Path(file).read_text() if file else os.environ["POSTGRES_PASSWORD"]
        with tempfile.NamedTemporaryFile("w", dir="/tmp") as kept:
            kept.write(password.strip() + "\n")
            kept.flush()
            options = ["--auth-host=scram-sha-256", "--auth-local=trust", "--encoding=UTF8", "--no-locale"]
            command = [programs / "initdb", "-D", data, "-U", user, f"--pwfile={kept.name}", *options]
            subprocess.run(command, check=True)
        (data / "pg_hba.conf").open("a").write("host all all all scram-sha-256\n")
        if (database := os.environ.get("POSTGRES_DB", user)) != "postgres":
            made = f'CREATE DATABASE "{database}"\n'
            command = [programs / "postgres", "--single", "-D", data, "-j", "postgres"]
            subprocess.run(command, input=made, text=True, check=True)
    rest = [word for word in arguments[1:] if not word.startswith(PRELOADED)]
    for at in [at for at, word in enumerate(rest) if word == "-c" and rest[at + 1 : at + 2] in ([], ["-c"])][::-1]:
        del rest[at]  # of an option that was left out
    defaults = ["-c", "listen_addresses=*", "-c", "unix_socket_directories=/tmp"]
    os.execv(programs / "postgres", [str(programs / "postgres"), "-D", str(data), *defaults, *rest])


main(sys.argv[1:])
