"""The command line `infaas`: one module a command group, imported only when its command is used."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from infaas.cli.output import FAILED, USAGE, Failure, one_line

if TYPE_CHECKING:
    from cyclopts import App

INTERRUPTED = 130

# command: where its function is, and what the overview says of it. A command whose module is not there is left out.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("infaas.cli.up:up", "Run a whole system on this machine."),
    "demo": ("infaas.cli.demo:demo", "Run a system for a moment, register real models and query them."),
    "register": ("infaas.cli.register:register", "Register a trained model: generate, measure and list its variants."),
    "query": ("infaas.cli.query:query", "Send one query and print its answer."),
    "explain": ("infaas.cli.query:explain", "Show the decision that a query would get now, and why."),
    "submit": ("infaas.cli.jobs:submit", "Hand in an offline job: a file of inputs to a file of outputs."),
    "jobs": ("infaas.cli.jobs:jobs", "List the offline jobs, or follow one."),
    "cancel": ("infaas.cli.jobs:cancel", "Cancel an offline job."),
    "plan": (
        "infaas.cli.plan:plan",
        "Plan instances and cost for loads and objectives in a file; nothing needs to run.",
    ),
    "simulate": (
        "infaas.cli.simulate:simulate",
        "Run a scenario's load, machines and faults on virtual time under one policy or several.",
    ),
    "replay": (
        "infaas.cli.replay:replay",
        "Run recorded traffic through any policy: what would it have cost?",
    ),
    "apps": ("infaas.cli.lists:apps", "List the apps."),
    "models": ("infaas.cli.lists:models", "List the registered models."),
    "variants": ("infaas.cli.lists:variants", "List the variants with what was measured of them."),
    "workers": ("infaas.cli.lists:workers", "List the workers, their devices and instances."),
    "admin": ("infaas.cli.admin:admin", "Change apps, links and versions of a running system."),
    "auth": ("infaas.cli.auth:auth", "Make and withdraw credentials for the bus, and the servers' configuration."),
    "status": ("infaas.cli.lists:status", "Show the whole system at a glance."),
    "sql": ("infaas.cli.sql:sql", "Run SQL with the read-only role, or open psql."),
    "bench": ("infaas.cli.bench:bench", "Put load on a running system and measure it."),
    "run": ("infaas.cli.run:run", "Run one service alone, or several in one process."),
    "settings": ("infaas.cli.settings:settings", "Print every setting with its default, bounds and meaning."),
    "doctor": ("infaas.cli.doctor:doctor", "Check this machine and a system; say what to do about what is wrong."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 the request failed, 2 bad usage. Shows no traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except Failure as failure:
        return _say(failure, failure.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("INFAAS_TRACEBACK"):
            raise
        return _say(_words(error), FAILED)


def build() -> "App":
    """The command line with all commands that are there, none of them imported yet."""
    from cyclopts import App  # noqa: PLC0415  (service processes start through this package without it)

    app = App(
        name="infaas",
        help="Model-less inference serving: say what a query needs, the system picks the model variant.",
        version=_version,
        result_action="return_value",
    )
    for order, (name, (place, text)) in enumerate(COMMANDS.items()):
        if find_spec(place.partition(":")[0]) is not None:
            app.command(place, name=name, help=text, sort_key=order)
    return app


def _run(arguments: Sequence[str]) -> int:
    from cyclopts import CycloptsError  # noqa: PLC0415

    try:
        result = build()(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _say(f"{one_line(error)} (see infaas {' '.join(error.command_chain or ())} --help)", USAGE)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        return _say(end.code, FAILED)
    return result if isinstance(result, int) else 0


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415

    try:
        return metadata.version("infaas")
    except metadata.PackageNotFoundError:
        return "not installed (run from its source)"


def _words(error: Exception) -> str:
    """An error that no command has put into words: expected ones as they are, others with their type."""
    expected = _expected()
    text = one_line(error) or type(error).__name__
    return text if isinstance(error, expected) else f"{type(error).__name__}: {text} (INFAAS_TRACEBACK=1 shows where)"


def _expected() -> tuple[type[Exception], ...]:
    """Our own exceptions, as far as their modules were used; texts of theirs are for people."""
    found: list[type[Exception]] = []
    places = {
        "infaas.errors": ["InfaasError"],
        "bus.port": ["BusError"],
        "services.shell.settings": ["SettingsError"],
        "services.shell.host.process": ["ServerError"],
        "services.shell.store": ["StoreError"],
    }
    for module, names in places.items():
        loaded: Any = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if loaded is not None]
    return tuple(found)


def _say(message: object, code: int) -> int:
    print(f"infaas: {one_line(message)}", file=sys.stderr)
    return code
