"""Names of subjects, streams and buckets, all derived from the prefix, and the grammar of subjects, wildcards and keys.

Systems with different prefixes on one NATS never see each other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from bus.port import BusError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
DISPATCHERS = "dispatchers"  # queue group that shares the queries
REGISTRARS = "registrars"
EXECUTORS = "executors"  # a device's executor process and its successor
RECORDERS = "recorders"
JOBS = "jobs"
WITHOUT_APP = "_"  # instead of an app's name: a model on its own, registered or queried without any app


def valid_name(name: object) -> bool:
    """Whether `name` may be an app, model, version or variant (it becomes a subject token)."""
    return isinstance(name, str) and NAME.match(name) is not None


class _ToOne(Protocol):
    """The method of a name with one token behind."""

    def __call__(self, name: str, /) -> str: ...


class _ToAny(Protocol):
    """The same, or the pattern of all."""

    def __call__(self, name: str = "*", /) -> str: ...


def _one(kind: str) -> _ToOne:
    return cast(_ToOne, lambda subjects, name: f"{subjects.prefix}.{kind}.{name}")


def _any(kind: str) -> _ToAny:
    return cast(_ToAny, lambda subjects, name="*": f"{subjects.prefix}.{kind}.{name}")


class _Store(property):
    """The name of a bucket."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda subjects: f"{subjects.prefix}-{kind}")

    if TYPE_CHECKING:

        def __get__(self, subjects: Any, of: type | None = None) -> str: ...  # type: ignore[override]  # never of the class


class _Stream(_Store):
    """The name of a stream."""

    def __init__(self, kind: str) -> None:
        property.__init__(self, lambda subjects: f"{subjects.prefix.upper().replace('-', '_')}_{kind}")


@dataclass(frozen=True)
class Subjects:
    """All names under one prefix."""

    prefix: str = "infaas"

    # outsiders
    query = _any("query")
    cancel = _any("cancel")  # of a query
    feedback = _any("feedback")
    explain = _any("explain")
    list = _any("list")
    admin = _any("admin")
    registration = _any("registration")
    registration_cancel = _any("registration-cancel")
    event = _one("event")

    def register(self) -> str:
        return f"{self.prefix}.register"

    # a query's way
    done = _one("done")
    trying = _one("trying")  # where executors name a suspect query that they run alone
    echo = _one("echo")  # where a dispatcher hears itself
    ended = _any("ended")  # where executors hear which of a dispatcher's queries with parts have ended
    # Between dispatchers: changed (weights of a context) | sought (the prediction that a feedback is for) | taken.<dispatcher> | told.<dispatcher>.<list>.<item>
    selection = _one("selection")
    pipeline = _one("pipeline")  # arrivals (of queries at pipelines with a plan, told by dispatchers)
    loads = _one("loads")  # where a dispatcher hears what became of its `EnsureLoaded`

    def execute(self, worker: str, device: str) -> str:
        return f"{self.prefix}.execute.{worker}.{device}"

    def undelivered(self, dispatcher: str, uid: str = "*") -> str:
        """Reply subject of a forwarded query: NATS answers there with 503 when the execute subject is dead."""
        return f"{self.prefix}.done.{dispatcher}.{uid}"

    def resubmit(self, dispatcher: str = "") -> str:
        """Where executors give queries back: to their dispatcher while it lives, otherwise to the dispatchers' queue group."""
        return f"{self.prefix}.resubmit.{dispatcher}" if dispatcher else f"{self.prefix}.resubmit"

    def resent(self, dispatcher: str = "") -> str:
        """Where dispatchers and executors are asked who has a query that its client sends again, and where a dispatcher hears who has."""
        return f"{self.prefix}.resent.{dispatcher}" if dispatcher else f"{self.prefix}.resent"

    def part(self, dispatcher: str, uid: str = "*") -> str:
        """Where a dispatcher hears the answers to the parts of its queries."""
        return f"{self.prefix}.part.{dispatcher}.{uid}"

    # fleet
    worker_heartbeat = _any("heartbeat.worker")
    dispatcher_heartbeat = _any("heartbeat.dispatcher")
    demand = _any("demand")  # what dispatchers were asked for, by requirement class, all workers together
    # ask (heard by the one that leads) | sampled (by executors) | objectives (what it publishes of all apps)
    controller = _one("controller")
    recorder = _one("recorder")  # demand (what the queries of an app were, by the minute)
    machines = _one("machines")  # start | stop

    def worker(self, worker: str, order: str) -> str:
        """order: load | release | drain | demand (what dispatchers were asked for and this worker took, for its autoscaler)"""
        return f"{self.prefix}.worker.{worker}.{order}"

    def executor(self, worker: str, device: str, order: str) -> str:
        """order: load | unload | demote | move | withdraw (of queries, by a dispatcher) | echo (to itself) | unheard (what a dispatcher did not get) | succeed (by its successor)"""
        return f"{self.prefix}.executor.{worker}.{device}.{order}"

    def monitor(self, worker: str, fact: str) -> str:
        """fact: loaded | failed | unloaded | moved | report"""
        return f"{self.prefix}.monitor.{worker}.{fact}"

    def exited(self, worker: str = "*", device: str = "*") -> str:
        return f"{self.prefix}.exited.{worker}.{device}"

    # registration work
    # inspected | built | variant-failed | progress | finished; release: what a dispatcher has counted of one; container: a question
    registrar = _one("registrar")

    def workshop(self, worker: str, order: str = "*") -> str:
        """order: inspect | build | cancel"""
        return f"{self.prefix}.workshop.{worker}.{order}"

    # offline jobs
    job = _any("job")
    job_status = _any("job-status")
    job_cancel = _any("job-cancel")
    job_chunks = _any("offline.chunks")  # chunks of a job's input, in the work queue `job_stream`
    offline = _one("offline")  # part | note | alive

    def offline_answer(self, worker: str, uid: str = "*") -> str:
        """Where a worker's runner hears what became of its queries."""
        return f"{self.prefix}.offline.answer.{worker}.{uid}"

    # streams and buckets
    outcome_stream = _Stream("OUTCOMES")
    event_stream = _Stream("EVENTS")
    job_stream = _Stream("JOBS")
    jobs_bucket = _Store("jobs")  # offline jobs: what each is, how far it is, and its last status
    # Outputs of chunks until they are written into the job's output, and chunks too large for a message; they expire.
    parts_bucket = _Store("job-parts")
    catalog_bucket = _Store("catalog")
    control_bucket = _Store("control")  # who leads: one key, changed by compare-and-set
    # What selection policies have learnt, by app and context: `<app>.<digest of the context or _>`.
    selection_bucket = _Store("selection")
    status_bucket = _Store("status")  # last status of registrations
    uploads_bucket = _Store("uploads")  # models to be registered, and files of jobs; they expire
    artifacts_bucket = _Store("artifacts")
    # Inputs too large for one message, each the MessagePack of a query's field `inputs`; they expire.
    inputs_bucket = _Store("inputs")
    # Outputs too large for one message, each the MessagePack of an Answer's field `outputs`; they expire.
    outputs_bucket = _Store("outputs")
    # Queries with their answers, where an app's owner lets them be kept: `<app>.<query>.<digest of its id>.<uid>`; they expire.
    payloads_bucket = _Store("payloads")


EVERY_SERVER = "$SYS.REQ.ACCOUNT.PING.STATZ"  # each NATS server answers, with numbers of the asker's own account

# -- Grammar, the same for every bus

MOST_SUBJECT = 1000  # bytes; a server closes connections whose control lines (subject, reply subject, sizes) pass 4096
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*\Z")


def check_subject(subject: str) -> None:
    """Refuse what could end a protocol line and begin another one. Raises BusError."""
    if not subject or " " in subject or not subject.isprintable():
        raise BusError(f"{subject[:80]!r} is not a subject: it is empty, or has spaces or control characters")
    if len(subject) > MOST_SUBJECT or (not subject.isascii() and len(subject.encode()) > MOST_SUBJECT):
        raise BusError(f"{subject[:80]!r}... is longer than the {MOST_SUBJECT} bytes that a subject may have")


def check_pattern(pattern: str) -> None:
    """Tokens joined by dots, `*` for any one of them, `>` at the end for all the rest. Raises BusError."""
    check_subject(pattern)
    tokens = pattern.split(".")
    for place, part in enumerate(tokens):
        wild = "*" in part or ">" in part
        if not part or (wild and len(part) > 1) or (part == ">" and place < len(tokens) - 1):
            raise BusError(f"{pattern!r} is not a subject to listen on: an empty token, or a misplaced wildcard")


def check_key(key: str) -> None:
    """Raises BusError for what a key-value bucket cannot have as a key."""
    if not _KEY.match(key):
        raise BusError(f"{key!r} is no key: letters, digits and - / _ = in parts joined by dots")


def check_headers(headers: Mapping[str, str]) -> None:
    """Names are printable ASCII without colon or space, values have no line breaks. Raises BusError."""
    for name, value in headers.items():
        if not name or not name.isascii() or not name.isprintable() or ":" in name or " " in name:
            raise BusError(f"{name!r} is no header name: printable ASCII without colon or space")
        if "\r" in value or "\n" in value:
            raise BusError(f"the value of header {name!r} has line breaks")


@lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """Whether `pattern` covers `subject`."""
    wanted = pattern.split(".")
    given = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(want in ("*", have) for want, have in zip(wanted, given, strict=True))


def of_one_hearer(subjects: Subjects) -> tuple[str, ...]:
    """How the subjects of a query's way begin: each message is for one hearer, whoever it is."""
    return tuple(f"{subjects.prefix}.{kind}." for kind in ("query", "execute", "done", "part"))
