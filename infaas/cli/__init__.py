"""The command line `infaas`. Each command group is one module, which is imported only when its command is used."""

import os
import re
import sys
from collections.abc import Sequence
from errno import EACCES, ENOSPC
from typing import TYPE_CHECKING, Any, NamedTuple

from bus.fields import meant, similar
from infaas.cli.output import FAILED, USAGE, Failure, one_line

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

INTERRUPTED = 130


class Command(NamedTuple):
    """function: or the group of commands. summary: its line in `infaas --help`; `infaas COMMAND --help` prints the function's docstring.

    places: what else it is called, by its noun.
    """

    function: str
    summary: str
    places: tuple[str, ...] = ()


_OFTEN = {
    "up": Command("infaas.cli.up:up", "Run a whole system on this machine until Ctrl-C."),
    "demo": Command("infaas.cli.demo:demo", "Start a system, register real models, query them and check every answer."),
    "register": Command(
        "infaas.cli.register:register",
        "Register a trained model: build, measure and list its variants.",
        ("model register",),
    ),
    "query": Command("infaas.cli.query:query", "Send one query and print its answer.", ("app query",)),
    "explain": Command(
        "infaas.cli.query:explain",
        "Show which variant a query would get now, and why not the others.",
        ("app explain",),
    ),
    "submit": Command(
        "infaas.cli.jobs:submit", "Submit an offline job: compute the outputs for a file of inputs.", ("job submit",)
    ),
    "apply": Command("infaas.cli.apply:apply", "Make apps, models and pipelines as a file says. Shows a plan first."),
    "status": Command("infaas.cli.doctor:status", "Show the whole system at a glance."),
    "open": Command("infaas.cli.up:open_page", "Open the dashboard, or the gateway's page, in a browser."),
    "logs": Command("infaas.cli.parts:logs", "Show what the services of a system on this machine log."),
    "doctor": Command(
        "infaas.cli.doctor:doctor", "Check this machine and the system. Each failed check names its remedy."
    ),
}
_NOUNS = {
    "app": Command("infaas.cli.admin:app", "List, query, add, change and delete apps."),
    "model": Command(
        "infaas.cli.admin:model", "List and register models, their versions and variants, and link them to apps."
    ),
    "pipeline": Command(
        "infaas.cli.pipeline:pipeline",
        "Add, list, plan, deploy, remove and trace pipelines: apps that other apps answer.",
    ),
    "worker": Command("infaas.cli.admin:worker", "List workers, their devices and instances."),
    "release": Command(
        "infaas.cli.admin:release",
        "Bring a new version out in steps, judged against the old one; list, show, pause, promote and abort.",
    ),
    "job": Command("infaas.cli.admin:job", "Submit, list, follow and cancel offline jobs."),
}
_MORE = {
    "container": Command(
        "infaas.cli.container:container", "Serve a Python class of your own, in a process of its own."
    ),
    "bench": Command("infaas.cli.bench:bench", "Send load to a running system and measure its answers."),
    "export": Command("infaas.cli.apply:export", "Print a running system as a file for `infaas apply`."),
    "feedback": Command("infaas.cli.query:feedback", "Report the true labels of earlier queries, from a file."),
    "payloads": Command("infaas.cli.admin:payloads", "Export and delete queries that were kept with their answers."),
    "remeasure": Command(
        "infaas.cli.payloads:remeasure", "Measure an app's models anew on its labelled queries that were kept."
    ),
    "sql": Command("infaas.cli.sql:sql", "Query the recorded history with SQL, or open psql."),
    "plan": Command(
        "infaas.cli.plan:plan", "Plan instances and cost for the loads and objectives in a file. Needs no system."
    ),
    "expect": Command("infaas.cli.capacity:expect", "Say what load an app is to expect, and when."),
    "recommend": Command(
        "infaas.cli.capacity:recommend", "Print which machines carry a load of an app, the cheapest first."
    ),
    "simulate": Command(
        "infaas.cli.simulate:simulate",
        "Simulate the load, machines and faults of a file under one or several policies. Needs no system.",
    ),
    "replay": Command(
        "infaas.cli.replay:replay", "Simulate recorded traffic under other policies: what would it have cost?"
    ),
    "shadow": Command(
        "infaas.cli.shadow:shadow",
        "Run another scaling policy on the live demand, without acting: what would it do and cost?",
    ),
    "auth": Command("infaas.cli.auth:auth", "Make, change and revoke credentials for the bus."),
    "restart": Command(
        "infaas.cli.parts:restart", "Restart a service of a system on this machine without losing a query."
    ),
    "backup": Command(
        "infaas.cli.backup:backup", "Copy a running system into a folder: catalogue, files, history, settings."
    ),
    "restore": Command("infaas.cli.backup:restore", "Bring a backup into a running, empty system."),
    "catalog": Command("infaas.cli.backup:catalog", "Write the catalogue back from SQL after NATS has lost its disk."),
    "prune": Command("infaas.cli.parts:prune", "Delete the files that no registered version has."),
    "run": Command("infaas.cli.run:run", "Run one service, or several in one process."),
    "settings": Command("infaas.cli.settings:settings", "Print every setting with its default, bounds and meaning."),
}
_BEFORE = {
    "apps": Command("infaas.cli.lists:apps", "List the apps.", ("app list",)),
    "models": Command("infaas.cli.lists:models", "List the registered models.", ("model list",)),
    "variants": Command(
        "infaas.cli.lists:variants", "List the variants with their measured figures.", ("model variants",)
    ),
    "registrations": Command(
        "infaas.cli.lists:registrations",
        "List the registrations, with progress and failures.",
        ("model registrations",),
    ),
    "selection": Command(
        "infaas.cli.lists:selection", "Show what feedback has taught about an app's members.", ("app selection",)
    ),
    "workers": Command("infaas.cli.lists:workers", "List the workers, their devices and instances.", ("worker list",)),
    "jobs": Command("infaas.cli.jobs:jobs", "List the offline jobs, or follow one.", ("job list", "job show")),
    "cancel": Command("infaas.cli.jobs:cancel", "Cancel an offline job or a registration.", ("job cancel",)),
    "admin": Command("infaas.cli.admin:admin", "Change apps, their models and versions, by the verbs' full names."),
}
# What `infaas --help` shows, by headings.
_SHOWN = {
    "Often used": _OFTEN,
    "By noun: infaas NOUN VERB, as infaas app list": _NOUNS,
    "More": _MORE,
    "Names of 0.1, which go on: each is a verb of a noun": _BEFORE,
}
COMMANDS: dict[str, Command] = {name: one for part in _SHOWN.values() for name, one in part.items()}
_GROUPS = "infaas.cli.admin:"
_MEANT = {"ps": "status"}  # words that people try
_ELSEWHERE = {  # commands that are not called as their subjects are
    "pipelines": "pipeline list",
    "releases": "release list",
    "admin set-pipeline": "pipeline add",
    "admin deploy-pipeline": "pipeline deploy",
}


_UP = {"scipy", "onnx", "onnxruntime"}  # packages of the extra `up`

# Our own exceptions. Their texts need no further words.
_EXPECTED = {
    "infaas.errors.InfaasError",
    "bus.port.BusError",
    "services.shell.settings.SettingsError",
    "services.shell.host.process.ServerError",
    "services.shell.store.StoreError",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 done, 1 the request failed, 2 bad usage. Prints no traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except Failure as failure:
        return _complain(failure, failure.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("INFAAS_TRACEBACK"):
            raise
        return _complain(_text_of(error), FAILED)


def build(command: str | None = None) -> "App":
    """The command line with all commands; none of their modules is imported yet. command: the one whose full help is wanted."""
    from cyclopts import App, Group  # noqa: PLC0415  (service processes start through this package without it)

    app = App(
        name="infaas",
        help="Model-less inference serving: a query says what it needs, and the system picks the model variant."
        " `infaas help COMMAND` says what a command takes.",
        version=_version,
        version_flags=["--version", "-v"],
        result_action="return_value",
    )
    for place, (title, commands) in enumerate(_SHOWN.items()):
        group = Group(title, sort_key=place)
        for order, (name, (function, summary, _)) in enumerate(commands.items()):
            about = None if name == command else summary
            # `--version` of a command is a model's. Groups have said so of theirs.
            more: dict[str, Any] = {} if function.startswith(_GROUPS) else {"version_flags": []}
            app.command(function, name=name, help=about, sort_key=order, group=group, **more)
    app.register_install_completion_command(sort_key=len(COMMANDS))
    return app


def _run(arguments: Sequence[str]) -> int:
    from cyclopts import CycloptsError  # noqa: PLC0415

    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments and arguments[0] in _MEANT:
        arguments = [_MEANT[arguments[0]], *arguments[1:]]
    try:
        result = build(next(iter(arguments), None))(_with_dashes(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _complain(_usage_error(error), USAGE)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        return _complain(end.code, FAILED)
    return result if isinstance(result, int) else 0


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--option -` as `--option=-`: a lone - is a value, standard input, and would be taken for an option."""
    joined: list[str] = []
    for word in arguments:
        if word == "-" and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=-"
        else:
            joined.append(word)
    return joined


def _usage_error(error: "CycloptsError") -> str:
    """What is wrong with the command line and what was meant, in one sentence."""
    from cyclopts import exceptions  # noqa: PLC0415

    command = " ".join(error.command_chain or ()) or "infaas"
    unused = [repr(token) for token in error.unused_tokens or ()]
    see = f"`infaas {command} --help` lists " if error.command_chain else "`infaas --help` lists "
    match error:
        case exceptions.UnknownCommandError() if unused:
            word = (error.unused_tokens or [""])[0]
            if error.command_chain and error.app is not None:
                verbs = [name for name in error.app if not name.startswith("-")]
                return f"{command} has no verb {word!r}: use {', '.join(verbs)}{meant(word, verbs)}"
            if word in ("down", "stop"):
                return f"there is no command {word!r}: Ctrl-C where `infaas up` runs, or SIGTERM, stops everything"
            return f"there is no command {word!r}{meant(word, COMMANDS) or '; `infaas --help` lists all'}"
        case exceptions.UnknownOptionError():
            word = error.token.keyword or error.token.value
            known = {name.lstrip("-"): name for one in error.argument_collection if one.parse for name in one.names}
            near = similar(word.lstrip("-"), known)
            own = "--metric NAME --accuracy NUMBER states a metric of your own; " * ({"mae", "metric"} <= known.keys())
            return f"{command} has no option {word}; {f'did you mean {known[near]}?' if near else f'{own}{see}its options'}"
        case exceptions.MissingArgumentError() if error.argument is not None:
            name = error.argument.name
            given = error.keyword is not None or bool(error.argument.tokens)
            option = name.startswith("-")
            if given:
                return f"{command}: {name} needs a value: write it after {name}, {see}what it takes"
            return f"{command} needs {name}{f': write {name} VALUE' * option}, {see}what it takes"
        case exceptions.CoercionError() if error.msg is None and error.token is not None:
            kind = "a number" if error.target_type is float else "a whole number" if error.target_type is int else ""
            if kind:
                return (
                    f"{command}: {error.token.keyword or error.token.value} must be {kind}, not {error.token.value!r}"
                )
        case exceptions.UnusedCliTokensError():
            return f"{command} does not take {', '.join(unused)}: write each value after its option, {see}them"
    text = one_line(error).removesuffix(".")
    return f"{text[:1].lower()}{text[1:]}: {see}what it takes"


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415

    try:
        return metadata.version("infaas")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _text_of(error: Exception) -> str:
    """The text of an error that no command has handled. Unexpected errors are named with their type."""
    if isinstance(error, OSError) and error.strerror is not None:
        remedy = {ENOSPC: "the disk is full: free some space", EACCES: "choose a place that you may use"}.get(
            error.errno or 0
        )
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}; {remedy or 'INFAAS_TRACEBACK=1 shows where'}"
    text = one_line(getattr(error, "told", error)) or type(error).__name__
    kinds = {f"{one.__module__}.{one.__name__}" for one in type(error).__mro__}
    if "bus.port.Forbidden" in kinds:
        return f"forbidden: {text}: ask an operator for the right (infaas auth)"
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] in _UP:
        return f"{text}: pip install 'infaas[up]'"
    expected = not kinds.isdisjoint(_EXPECTED)
    return text if expected else f"{type(error).__name__}: {text} (INFAAS_TRACEBACK=1 shows where)"


def _command(subject: re.Match[str]) -> str:
    words = " ".join(filter(None, subject.groups()))
    return f"`infaas {_ELSEWHERE.get(words, words)}`"


def _complain(message: object, code: int) -> int:
    """Subjects that a service's error names are commands here."""
    text = re.sub(r"\binfaas\.(?:list\.([a-z]+)|(admin)\.([a-z-]+))", _command, one_line(message))
    print(f"infaas: {text}", file=sys.stderr)
    return code
